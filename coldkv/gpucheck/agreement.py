"""One backend against another, bit for bit, on planes that no golden covers: random values and random bits.

Where a NaN is expected any NaN counts: FORMAT.md leaves its payload open. Error sums are compared within rounding,
since their order of addition is each backend's own.
"""

import numpy as np
import torch

from coldkv.backends import fitted
from coldkv.codecs import all_codecs
from coldkv.formats import FORMATS
from coldkv.geometry import Geometry
from coldkv.gpucheck.clock import Deadline
from coldkv.tiers import HotPlane

# (head-pages, page_tokens, head_dim): whole and short groups, odd strides, more work than one block of threads has
SHAPES = ((3, 5, 34), (2, 1, 2), (2, 16, 80), (4, 64, 128), (5, 64, 256), (2, 16, 576), (1, 3, 1024), (2, 256, 64))
SMALL_SHAPES = ((3, 5, 34), (2, 16, 80), (2, 16, 128))
SUM_TOLERANCE = 1e-12


def compare(backend, reference, deadline: Deadline, shapes=SHAPES, seed: int = 7) -> dict:
    """{"cases", "mismatches"}: both backends on the same planes, until the deadline.

    A mismatch names the operation and the plane, how many bytes differ, and the first of them.
    """
    check = _Comparison(backend, reference)
    rng = np.random.default_rng(seed)
    for n, page_tokens, head_dim in shapes:
        geometry = Geometry(head_dim, page_tokens)
        shape = (n, page_tokens, head_dim)
        for x, kind in ((_values(rng, shape), "values"), (_finite_bits(rng, shape), "bits")):
            if deadline.passed():
                return check.result()
            check.sums(x, geometry)
            check.loads(x, geometry)
            for fmt in FORMATS:
                name = f"{fmt} {kind} {shape}"
                plane = check.both(f"quantize {name}", lambda b, x=x, fmt=fmt: b.quantize(fmt, x.to(b.device)))
                check.plane(plane, geometry, name)
                check.plane(_random_plane(rng, plane), geometry, f"{fmt} any bits {shape}")
    return check.result()


class _Comparison:
    def __init__(self, backend, reference):
        self.backend, self.reference = backend, reference
        self.cases, self.mismatches = 0, []

    def result(self) -> dict:
        return {"cases": self.cases, "mismatches": self.mismatches}

    def both(self, name: str, work):
        """What the reference gives for `work(backend)`: a tensor, a plane or a tuple; the other's must be the same."""
        expected, found = work(self.reference), work(self.backend)
        self.cases += 1
        differing, first = 0, None
        for part, (a, b) in enumerate(zip(_tensors(found), _tensors(expected), strict=True)):
            wrong = np.flatnonzero(_bytes(a) != _bytes(b))
            differing += len(wrong)
            if len(wrong) and first is None:
                first = [part, int(wrong[0])]
        if differing:
            self.mismatches.append({"case": name, "bytes": differing, "first": first})
        return expected

    def plane(self, plane: HotPlane, geometry: Geometry, name: str) -> None:
        """Dequantize, and every codec with kernels that takes the plane."""
        self.both(f"dequantize {name}", lambda b: b.dequantize(plane))
        for codec in all_codecs():
            if codec.native is None or not codec.fits(plane.format):
                continue
            if codec.sized:
                self.both(f"lengths {codec.id} {name}", lambda b, codec=codec: b.lengths(codec, plane, geometry))
                codec = fitted(codec, plane, geometry, self.reference)
            slots, valid = self.both(
                f"encode {codec.id} {name}", lambda b, codec=codec: b.encode(codec, plane, geometry)
            )
            good = slots[valid.bool()].contiguous()
            # other payloads behind the same headers: every nibble and scale byte, NaN among them
            payload = torch.randint(0, 256, good.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
            payload[:, :16] = good[:, :16]
            reads = [("", good)] if codec.sized else [("", good), (" of any payload", payload)]
            for what, read in reads:
                if len(read):
                    args = (codec, read, geometry, plane.format)
                    self.both(f"decode{what} {codec.id} {name}", lambda b, args=args: b.decode(*args))
                    self.both(f"restore{what} {codec.id} {name}", lambda b, args=args: b.restore(*args))

    def loads(self, x: torch.Tensor, geometry: Geometry) -> None:
        """Gathers of all dtypes from views: every second head, and tokens further apart than they are long."""
        tokens = x.reshape(-1, 1, geometry.head_dim).repeat(1, 4, 1)
        view = Geometry(geometry.head_dim, geometry.page_tokens, 2)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            given = tokens.to(dtype)[:, ::2]
            self.both(f"load {dtype} {tuple(given.shape)}", lambda b, given=given: b.load(given, view))

    def sums(self, x: torch.Tensor, geometry: Geometry) -> None:
        y = torch.flip(x, (0, 1))
        work = [b.stats(x.to(b.device), y.to(b.device), 1, channels=True) for b in (self.backend, self.reference)]
        squares, magnitudes = float((x.double() ** 2 + y.double() ** 2).sum()), float(x.double().abs().sum())
        self.cases += 1
        for found, expected, scale in zip(*work, (squares, magnitudes), strict=True):
            if not torch.allclose(found.cpu(), expected.cpu(), rtol=SUM_TOLERANCE, atol=SUM_TOLERANCE * scale):
                self.mismatches.append({"case": f"stats {tuple(x.shape)}", "bytes": None, "first": None})


def _tensors(result) -> list[torch.Tensor]:
    parts = (result.codes, result.scales) if isinstance(result, HotPlane) else result
    return [part for part in (parts if isinstance(parts, tuple) else (parts,)) if part is not None]


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """Bytes on the host, every NaN as the same one."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return tensor.flatten().view(torch.uint8).numpy()


def _values(rng, shape) -> torch.Tensor:
    """Like KV: unequal channels, row norms over decades, a zero row and a tiny one."""
    norms = np.exp(2 * rng.standard_normal((*shape[:2], 1)))
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[-1])) * norms
    x[0, 0] = 0
    x[-1, -1] *= 1e-30
    return torch.from_numpy(x.astype(np.float32))


def _finite_bits(rng, shape) -> torch.Tensor:
    bits = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
    bits = np.where((bits & 0x7F800000) == 0x7F800000, bits & 0xBFFFFFFF, bits)
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def _random_plane(rng, like: HotPlane) -> HotPlane:
    """A plane of the same format with codes of any bits, except that bf16 and fp16 stay below 2 after the first
    head-page, or every page would be refused for a NaN. One scale in fifty gets any bits, for the same reason."""
    codes = torch.from_numpy(rng.integers(0, 256, tuple(like.codes.cpu().view(torch.uint8).shape), dtype=np.uint8))
    if like.codes.is_floating_point():
        codes[1:, :, 1::2] &= 0xBF
    scales = like.scales
    if scales is not None:
        scales = scales.cpu().clone()
        bits = scales.view(torch.uint8)
        chosen = torch.from_numpy(rng.random(tuple(bits.shape)) < 0.02)
        bits[chosen] = torch.from_numpy(rng.integers(0, 256, int(chosen.sum()), dtype=np.uint8))
    return HotPlane(like.format, codes.view(like.codes.dtype), scales, like.head_dim)
