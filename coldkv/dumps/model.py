"""What every dump reader returns: a Dump of LayerDumps of PlaneSources.

Nothing here imports torch until values are read, so headers can be shown in milliseconds.
"""

import hashlib
import os
from dataclasses import dataclass, field
from typing import Any

from coldkv.errors import InputError
from coldkv.geometry import Geometry

VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
KINDS = ("full", "sliding", "mla")
DEFAULT_PAGE_TOKENS = 64
DUMP_VERSION = 1


def torch_dtype(name: str):
    """`"bf16"` -> `torch.bfloat16` and so on."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


def value_dtype(tensor) -> str:
    """`"bf16"`, `"fp16"` or `"fp32"` of a torch tensor, else its torch name."""
    name = str(tensor.dtype).removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(name, name)


def check_plain_tensor(path, name: str, tensor) -> None:
    """Raises InputError for a torch tensor without ordinary memory behind it (sparse, meta, quantized)."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise InputError(f"dump {path}: tensor {name}: expected a plain dense tensor, found a {kind} one")


class PlaneSource:
    """K or V of one layer: `[tokens, kv_heads, head_dim]`, read in slices of tokens.

    `name`: tensor name in the file; `path`: the file; `dtype`: bf16, fp16, fp32 or a hot format id; `hot_format`: that
    id, or None for plain values; `nbytes`: stored bytes of the plane, scales included.
    """

    def __init__(self, path: str, name: str, dtype: str, tokens: int, kv_heads: int, head_dim: int, nbytes: int):
        self.path, self.name, self.dtype = path, name, dtype
        self.tokens, self.kv_heads, self.head_dim, self.nbytes = tokens, kv_heads, head_dim, nbytes

    @property
    def hot_format(self) -> str | None:
        return None if self.dtype in VALUE_BYTES else self.dtype

    def _check_span(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"{self.name}: tokens {start}:{stop} outside 0:{self.tokens}")

    def read(self, start: int, stop: int, out=None):
        """Tokens `[start, stop)` as a torch tensor `[stop-start, kv_heads, head_dim]` in the stored dtype (fp32,
        dequantized, for a hot plane). `out`: a contiguous tensor of that shape and dtype to fill and return; reusing
        one saves page faults. InputError if the file is shorter than its header says."""
        raise NotImplementedError

    def read_hot(self, start: int, stop: int):
        """(codes, scales) of a hot plane, each `[stop-start, kv_heads, lead]`; InputError for plain values."""
        raise InputError(f"dump {self.path}: tensor {self.name}: expected hot-tier codes, found {self.dtype} values")


@dataclass
class LayerDump:
    """One attention layer. `window` in tokens, `scaling` multiplies q.k, `softcap` in logits; None where unknown.

    `planes`: {"k": ..., "v": ...}; an MLA layer holds its latent as "k" alone.
    """

    index: int
    kind: str
    window: int | None
    scaling: float | None
    softcap: float | None
    planes: dict[str, PlaneSource]
    extra: dict[str, Any] = field(default_factory=dict)
    _queries: Any = None  # () -> (tensor [samples, q_heads, head_dim], positions [samples]) or None
    _positions: Any = None  # () -> int64 [tokens], or None
    _path: str = ""

    @property
    def has_queries(self) -> bool:
        """Whether `queries()` gives any; known without reading them."""
        return self._queries is not None

    @property
    def tokens(self) -> int:
        return self.planes["k"].tokens

    @property
    def kv_heads(self) -> int:
        return self.planes["k"].kv_heads

    @property
    def head_dim(self) -> int:
        return self.planes["k"].head_dim

    def queries(self):
        """(q fp32 `[samples, q_heads, head_dim]`, q_pos int64 `[samples]`), or None if the dump holds none."""
        if self._queries is None:
            return None
        import torch

        q, q_pos = self._queries()
        q, q_pos = q.to(torch.float32), q_pos.to(torch.int64)
        where = f"dump {self._path}: tensor layers.{self.index}.q"
        if not bool(torch.isfinite(q).all()):
            raise InputError(f"{where}: expected finite queries, found NaN or Inf")
        if q_pos.numel() and int(q_pos.min()) < 0:
            raise InputError(f"{where}_pos: expected positions from 0, found {int(q_pos.min())}")
        return q, q_pos

    def positions(self):
        """int64 `[tokens]`: the position in the text of every stored token."""
        return self._positions()


class Dump:
    """A KV dump: `path`, `format`, `meta` (the `coldkv.dump` JSON, {} if absent), `page_tokens`, `layers` ascending.

    `layers` lists only layers with KV, under the model's own layer numbers. Close it, or use it as a context manager.
    """

    def __init__(self, path: str, format: str, meta: dict, page_tokens: int, layers: list[LayerDump], close=None):
        self.path, self.format, self.meta, self.page_tokens = path, format, meta, page_tokens
        self.layers = sorted(layers, key=lambda layer: layer.index)
        self._close = close

    def layer(self, index: int) -> LayerDump:
        for layer in self.layers:
            if layer.index == index:
                return layer
        raise InputError(f"dump {self.path}: no layer {index}; layers with KV: {[x.index for x in self.layers]}")

    def sha256(self) -> str:
        """Hex digest of the file's bytes (for a cache held in memory: of its values, layer by layer)."""
        if self.path and os.path.isfile(self.path):
            with open(self.path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        import torch

        digest = hashlib.sha256()
        for layer in self.layers:
            for name in sorted(layer.planes):
                plane = layer.planes[name]
                digest.update(f"{layer.index}.{name} {plane.dtype} {plane.tokens} {plane.kv_heads}".encode())
                step = max(1, (4 << 20) // max(1, plane.nbytes // plane.tokens))
                for start in range(0, plane.tokens, step):
                    values = plane.read(start, min(start + step, plane.tokens))
                    digest.update(values.contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()

    def close(self) -> None:
        if self._close is not None:
            close, self._close = self._close, None
            close()

    def __enter__(self) -> "Dump":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def check_plane(path, name, dtype: str, shape, *, batch: bool = False) -> tuple[int, int, int]:
    """(tokens, kv_heads, head_dim) of a `[tokens, kv_heads, head_dim]` shape; InputError if it cannot be a plane."""
    where = f"dump {path}: tensor {name}"
    if dtype not in VALUE_BYTES:
        hint = None
        if dtype in ("U16", "I16", "uint16", "int16"):
            hint = "16-bit words are ambiguous: store them as bf16 or fp16"
        raise InputError(f"{where}: expected bf16, fp16 or fp32, found {dtype}", hint=hint)
    if len(shape) != 3:
        raise InputError(f"{where}: expected [tokens, kv_heads, head_dim], found shape {list(shape)}")
    tokens, heads, head_dim = (int(n) for n in shape)
    if tokens == 0:
        raise InputError(f"{where}: expected at least one token, found zero")
    if heads == 0:
        raise InputError(f"{where}: expected at least one KV head, found zero")
    try:
        Geometry(head_dim)
    except InputError as error:
        raise InputError(f"{where}: {error}, shape {list(shape)}") from None
    return tokens, heads, head_dim


def check_layer(path, layer: LayerDump) -> None:
    """K and V agree, MLA has no V. InputError names the tensors."""
    if "k" not in layer.planes:
        raise InputError(f"dump {path}: layer {layer.index}: V without K")
    k = layer.planes["k"]
    if layer.kind == "mla":
        if "v" in layer.planes:
            raise InputError(f"dump {path}: tensor {layer.planes['v'].name}: an MLA layer has one plane and no V")
        return
    if "v" not in layer.planes:
        raise InputError(
            f"dump {path}: layer {layer.index}: K without V", hint="only a layer of kind mla may leave V out"
        )
    v = layer.planes["v"]
    for what, a, b in (
        ("tokens", k.tokens, v.tokens),
        ("KV heads", k.kv_heads, v.kv_heads),
        ("head_dim", k.head_dim, v.head_dim),
    ):
        if a != b:
            raise InputError(
                f"dump {path}: tensor {v.name}: expected {a} {what} as {k.name} has, found {b}",
                hint="MLA latents are one plane: mark the layer's kind as mla" if what == "head_dim" else None,
            )


def check_queries(path, layer: LayerDump, q_shape, q_pos_shape) -> None:
    """`q` `[samples, q_heads, head_dim]` beside `q_pos` `[samples]`; q_heads a multiple of the KV heads."""
    where = f"dump {path}: tensor layers.{layer.index}.q"
    if q_shape is None or q_pos_shape is None:
        raise InputError(f"{where}: expected .q and .q_pos together, found only one of them")
    if len(q_shape) != 3 or q_shape[2] != layer.head_dim or q_shape[1] == 0 or q_shape[1] % layer.kv_heads:
        raise InputError(
            f"{where}: expected [samples, multiple of {layer.kv_heads} heads, {layer.head_dim}], found {list(q_shape)}"
        )
    if tuple(q_pos_shape) != (q_shape[0],):
        raise InputError(f"{where}_pos: expected [{q_shape[0]}], found {list(q_pos_shape)}")


def check_geometry(path, layers: list[LayerDump], geometry: Geometry | None) -> None:
    """A geometry given beside a self-describing dump must agree with it."""
    if geometry is None:
        return
    for layer in layers:
        for what, expected, found in (
            ("head_dim", geometry.head_dim, layer.head_dim),
            ("KV heads", geometry.kv_heads, layer.kv_heads),
        ):
            if expected != found:
                raise InputError(
                    f"dump {path}: tensor {layer.planes['k'].name}: expected {what} {expected} from the geometry, "
                    f"found {found}"
                )


def check_meta(path, meta) -> dict:
    """The `coldkv.dump` metadata: version 1, an object; missing keys are fine. Returns it."""
    where = f"dump {path}: metadata coldkv.dump"
    if not isinstance(meta, dict):
        raise InputError(f"{where}: expected a JSON object, found {type(meta).__name__}")
    if meta.get("version") != DUMP_VERSION:
        raise InputError(
            f"{where}: expected version {DUMP_VERSION}, found {str(meta.get('version'))[:40]}",
            hint="a newer coldkv may have written it",
        )
    page_tokens = meta.get("page_tokens", DEFAULT_PAGE_TOKENS)
    if type(page_tokens) is not int:
        raise InputError(f"{where}: page_tokens: expected a whole number, found {str(page_tokens)[:40]}")
    try:
        Geometry(2, page_tokens)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    for key in ("attention", "formats", "rope"):
        if not isinstance(meta.get(key), dict | None):
            raise InputError(f"{where}: {key}: expected an object, found {str(meta[key])[:40]}")
    return meta


def layer_attention(path, meta: dict, index: int) -> dict:
    """{kind, window, scaling, softcap, extra} of a layer from the metadata, with their types checked."""
    entry = (meta.get("attention") or {}).get(str(index)) or {}
    where = f"dump {path}: metadata coldkv.dump: attention of layer {index}"
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected an object, found {str(entry)[:40]}")
    kind = entry.get("kind", "full")
    if kind not in KINDS:
        raise InputError(f"{where}: kind: expected one of {', '.join(KINDS)}, found {str(kind)[:40]!r}")
    window = entry.get("window")
    if window is None and kind == "sliding":
        window = meta.get("sliding_window")
    if window is not None and (type(window) is not int or not 1 <= window < 2**31):
        raise InputError(f"{where}: window: expected a positive whole number, found {str(window)[:40]}")
    numbers = {}
    for key in ("scaling", "softcap"):
        value = entry.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < 1e30):
            raise InputError(f"{where}: {key}: expected a positive number, found {str(value)[:40]}")
        numbers[key] = None if value is None else float(value)
    extra = {k: v for k, v in entry.items() if k not in ("kind", "window", "scaling", "softcap")}
    return {"kind": kind, "window": window, "extra": extra, **numbers}


def default_positions(layer: LayerDump, longest: int):
    """A layer shorter than the longest one keeps the last tokens if it slides, the first ones otherwise."""

    def positions():
        import torch

        first = longest - layer.tokens if layer.kind == "sliding" else 0
        return torch.arange(first, first + layer.tokens, dtype=torch.int64)

    return positions


def finish_layers(path, layers: list[LayerDump], geometry: Geometry | None) -> list[LayerDump]:
    """Checks that hold for every format, and positions for layers that have none."""
    if not layers:
        raise InputError(
            f"dump {path}: no KV planes found",
            hint="expected layers.<i>.k and layers.<i>.v (safetensors, pt) or layer_<i>_k and layer_<i>_v (npz)",
        )
    for layer in layers:
        layer._path = path
        check_layer(path, layer)
    check_geometry(path, layers, geometry)
    longest = max(layer.tokens for layer in layers)
    for layer in layers:
        if layer._positions is None:
            layer._positions = default_positions(layer, longest)
    return layers
