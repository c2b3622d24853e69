"""The golden checksum table: its inputs and how they are made. `scripts/regold` writes it, tests only read it.

Inputs come from the raw output of a bit generator and exact integer arithmetic, so they do not depend on the version
of any library; their own checksum stands first in every row.
"""

import hashlib
import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch

from coldkv.backends import fitted
from coldkv.codecs import all_codecs, parse_codec
from coldkv.formats import FORMATS
from coldkv.geometry import Geometry
from coldkv.tiers import HotPlane

FOLDER = Path(__file__).parent / "golden"
HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512, 576)
KV_HEADS = (1, 2, 4, 8)
PAGE_TOKENS = (16, 64, 256)
ODD_SHAPES = ((34, 1, 16), (72, 2, 16), (2, 1, 64), (1024, 1, 16), (128, 3, 5))
# Options beside the defaults, and how many sixteenths of the chosen slot size the slots get. CALIB stands for a
# calibration file made here. These see the short list of shapes only.
VARIANTS = {
    "ecq": (
        ("rows=off,fill=0", 16),
        ("step=7,rounding=0.375", 12),
        ("calib=CALIB,fill=24", 17),
        ("calib=CALIB,rows=off,step=-9", 10),
    ),
}
PAIRS = [(codec.id, fmt) for codec in all_codecs() for fmt in FORMATS if codec.fits(fmt)]


def shapes(fmt: str) -> list[tuple[int, int, int]]:
    """(head_dim, kv_heads, page_tokens): the whole grid for int8, elsewhere one of each head_dim, and odd shapes."""
    grid = [(d, h, t) for d in HEAD_DIMS for h in KV_HEADS for t in PAGE_TOKENS]
    if fmt != "int8":
        grid = [(d, KV_HEADS[i % 4], PAGE_TOKENS[i % 2]) for i, d in enumerate(HEAD_DIMS)]
    return grid + list(ODD_SHAPES)


def cases(codec_id: str, fmt: str) -> list[tuple[tuple[int, int, int], str, int]]:
    """(shape, options, sixteenths of the slot size) of every row, in order."""
    short = shapes("bf16" if fmt == "int8" else fmt)
    first = [(shape, "", 16) for shape in (short if codec_id in VARIANTS and fmt != "int8" else shapes(fmt))]
    return first + [(shape, *variant) for variant in VARIANTS.get(codec_id, ()) for shape in short]


@cache
def calibration(kv_heads: int, head_dim: int) -> str:
    """Path of a calibration file for layer 0, plane "k", the same bytes everywhere."""
    count = kv_heads * head_dim
    raw = np.random.PCG64(count).random_raw(count)
    parts = {
        "mean": ((raw & np.uint64(0xFFF)).astype(np.float32) - 2048) / 4096,
        "prior": ((raw >> np.uint64(12)) % np.uint64(97)).astype(np.int16) - 48,
        "weight": np.ldexp(1 + ((raw >> np.uint64(20)) & np.uint64(255)).astype(np.float32) / 256, -1),
    }
    header, body = {}, b""
    for name, array in parts.items():
        data = array.astype(array.dtype.newbyteorder("<")).tobytes()
        kind = "I16" if name == "prior" else "F32"
        header[f"layers.0.k.{name}"] = {
            "dtype": kind, "shape": [kv_heads, head_dim], "data_offsets": [len(body), len(body) + len(data)],
        }  # fmt: skip
        body += data
    header["__metadata__"] = {"coldkv.calibration": json.dumps({"version": 1, "steps": {"0": {"k": -19}}})}
    text = json.dumps(header).encode()
    path = Path(tempfile.mkdtemp(prefix="coldkv-golden-")) / "calibration.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return str(path)


def make_input(head_dim: int, kv_heads: int, page_tokens: int) -> torch.Tensor:
    """bf16 `[page_tokens, kv_heads, head_dim]`, one page: bell-shaped, unequal channels, zero, tiny and huge rows."""
    seed = (head_dim * 64 + kv_heads) * 4096 + page_tokens
    raw = np.random.PCG64(seed).random_raw(page_tokens * kv_heads * head_dim)
    fields = [((raw >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4)]
    bell = (sum(fields) - 2 * 65535).astype(np.float32).reshape(page_tokens, kv_heads, head_dim)
    channel = np.ldexp(1.0, (np.arange(head_dim) * 7 % 5) - 16).astype(np.float32)
    row = np.ldexp(1.0, np.arange(page_tokens) * 5 % 7 - 3).astype(np.float32)
    row[5::16] = 0.0
    row[6::16] = 2.0**-20
    row[7::16] = 2.0**9
    return torch.from_numpy(bell * channel * row[:, None, None]).to(torch.bfloat16)


def sha(*tensors) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            digest.update(tensor.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def row(backend, codec_id: str, fmt: str, shape: tuple[int, int, int], options: str = "", share: int = 16) -> dict:
    """One row of the table as this backend computes it."""
    geometry = Geometry(shape[0], shape[2], shape[1])
    codec = parse_codec(f"{codec_id}:{options.replace('CALIB', calibration(shape[1], shape[0]))}")
    codec = codec.bind(0, "k", fmt, geometry)
    values = make_input(*shape)
    hot: HotPlane = backend.quantize(fmt, backend.load(values, geometry))
    found = {"options": options, "share": share} if codec_id in VARIANTS else {}
    if codec.needs_stride:
        found["lengths"] = backend.lengths(codec, hot, geometry).tolist()
        codec = fitted(codec, hot, geometry, backend)
        wanted = codec.slot_bytes(geometry, fmt) * share // 256 * 16
        codec = codec.with_stride(max(wanted, codec.least_stride(geometry, fmt)))
    slots, valid = backend.encode(codec, hot, geometry)
    if codec_id in VARIANTS:
        found["valid"] = valid.tolist()
        slots_read = slots[valid != 0]
    else:
        slots_read = slots
    restored = backend.restore(codec, slots_read, geometry, fmt)
    return {
        "head_dim": shape[0],
        "kv_heads": shape[1],
        "page_tokens": shape[2],
        "input": sha(values),
        "hot": sha(hot.codes, hot.scales),
        "slots": sha(slots, valid),
        "restored": sha(restored.codes, restored.scales),
        "decoded": sha(backend.decode(codec, slots_read, geometry, fmt)),
    } | found


def path(codec_id: str, fmt: str) -> Path:
    return FOLDER / codec_id / f"{fmt}.json"


def read(codec_id: str, fmt: str) -> list[dict]:
    return json.loads(path(codec_id, fmt).read_text())


def write(backend, codec_id: str, fmt: str) -> None:
    rows = [row(backend, codec_id, fmt, *case) for case in cases(codec_id, fmt)]
    target = path(codec_id, fmt)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")
