"""Writing dumps in coldkv's own format, layer by layer."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from coldkv.atomic import atomic_path
from coldkv.dumps.model import DEFAULT_PAGE_TOKENS, DUMP_VERSION, Dump, LayerDump
from coldkv.dumps.safetensors import CODES_SPELLED, SCALES_SPELLED
from coldkv.errors import InputError
from coldkv.formats import format_of
from coldkv.safetensors_stream import StreamWriter

_SPELLED = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
CHUNK_BYTES = 4 << 20


@dataclass
class LayerSpec:
    """Shapes of one layer, needed before any data is written.

    `dtype`: bf16, fp16 or fp32 of K, V and q; `dtypes` overrides it for one of "k", "v", "q". `formats`: {"k": hot
    format id, ...} for planes stored as codes and scales. `planes`: ("k", "v"), or ("k",) for MLA. `q_samples`,
    `q_heads`: 0 where there are no queries. `positions`: the layer has its own int64 positions. `extra` goes into
    the layer's attention metadata.
    """

    index: int
    tokens: int
    kv_heads: int
    head_dim: int
    dtype: str = "bf16"
    kind: str = "full"
    window: int | None = None
    scaling: float | None = None
    softcap: float | None = None
    planes: tuple[str, ...] = ("k", "v")
    formats: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    q_samples: int = 0
    q_heads: int = 0
    positions: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def attention(self) -> dict:
        entry = {"kind": self.kind, "window": self.window, "scaling": self.scaling, "softcap": self.softcap}
        return {**entry, **self.extra}

    def tensors(self) -> list[tuple[str, str, tuple[int, ...]]]:
        base, rows = f"layers.{self.index}", (self.tokens, self.kv_heads)
        found: list[tuple[str, str, tuple[int, ...]]] = []
        for plane in self.planes:
            hot = self.formats.get(plane)
            if hot is None:
                dtype = _SPELLED[self.dtypes.get(plane, self.dtype)]
                found.append((f"{base}.{plane}", dtype, (*rows, self.head_dim)))
                continue
            form = format_of(hot)
            lead = self.head_dim * form.code_bits // (16 if form.code_bits == 16 else 8)
            found.append((f"{base}.{plane}.codes", CODES_SPELLED[hot][0], (*rows, lead)))
            if form.scale_bytes:
                scales = (*rows, form.scales_per_row(self.head_dim))
                found.append((f"{base}.{plane}.scales", SCALES_SPELLED[form.scale_bytes][0], scales))
        if self.q_samples:
            dtype = _SPELLED[self.dtypes.get("q", self.dtype)]
            found.append((f"{base}.q", dtype, (self.q_samples, self.q_heads, self.head_dim)))
            found.append((f"{base}.q_pos", "I64", (self.q_samples,)))
        if self.positions:
            found.append((f"{base}.positions", "I64", (self.tokens,)))
        return found


class DumpWriter:
    """Write a dump to `path`: atomically, in chunks, in any order of layers.

    `meta`: keys of `coldkv.dump` such as model, page_tokens, rope, text_sha256, provenance; version, attention and
    formats are filled in. Use as a context manager and call `write` until every tensor is complete; an exception
    leaves no file (or the older one). ValueError on missing or surplus data, OSError on a full disk.
    """

    def __init__(self, path: str | os.PathLike, layers: Iterable[LayerSpec], meta: Mapping[str, Any]):
        self.path = os.fspath(path)
        if os.path.splitext(self.path)[1].lower() != ".safetensors":
            raise InputError(f"output {self.path}: expected a name ending in .safetensors")
        self._layers = sorted(layers, key=lambda layer: layer.index)
        indices = [layer.index for layer in self._layers]
        if not indices or len(set(indices)) != len(indices):
            raise ValueError(f"expected layers, each once, found {indices}")
        self._meta = {"version": DUMP_VERSION, "page_tokens": DEFAULT_PAGE_TOKENS, **meta}
        self._meta["version"] = DUMP_VERSION
        self._meta["attention"] = {str(layer.index): layer.attention() for layer in self._layers}
        formats = {str(layer.index): layer.formats for layer in self._layers if layer.formats}
        self._meta.pop("formats", None)
        if formats:
            self._meta["formats"] = formats
        self._stack = ExitStack()

    def __enter__(self) -> "DumpWriter":
        with ExitStack() as stack:
            temporary = stack.enter_context(atomic_path(self.path))
            specs = [spec for layer in self._layers for spec in layer.tensors()]
            metadata = {"coldkv.dump": json.dumps(self._meta, separators=(",", ":"))}
            self._writer = stack.enter_context(StreamWriter(temporary, specs, metadata))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc):
        return self._stack.__exit__(*exc)

    def write(self, name: str, values) -> None:
        """Append a torch tensor or numpy array of the tensor's dtype to `name` (for example `layers.3.k`)."""
        if hasattr(values, "detach"):
            import torch

            values = values.detach().cpu().contiguous()
            values = values.reshape(-1).view(torch.uint8).numpy() if values.numel() else b""
        self._writer.write(name, values)


def _spec(dump: Dump, layer: LayerDump) -> tuple[LayerSpec, Any]:
    import torch

    longest = max(other.tokens for other in dump.layers)
    plain = layer.tokens == longest and torch.equal(layer.positions(), torch.arange(layer.tokens))
    dtypes = {name: plane.dtype for name, plane in layer.planes.items() if plane.hot_format is None}
    queries = layer.queries()
    if queries is not None:
        q, q_pos = queries
        narrow = q.to(torch.bfloat16)
        dtypes["q"] = "bf16" if torch.equal(narrow.to(torch.float32), q) else "fp32"
        queries = (narrow if dtypes["q"] == "bf16" else q, q_pos)
    spec = LayerSpec(
        index=layer.index,
        tokens=layer.tokens,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        kind=layer.kind,
        window=layer.window,
        scaling=layer.scaling,
        softcap=layer.softcap,
        planes=tuple(sorted(layer.planes)),
        formats={name: plane.hot_format for name, plane in layer.planes.items() if plane.hot_format},
        dtypes=dtypes,
        q_samples=0 if queries is None else queries[0].shape[0],
        q_heads=0 if queries is None else queries[0].shape[1],
        positions=not plain,
        extra=layer.extra,
    )
    return spec, queries


def write_dump(path: str | os.PathLike, dump: Dump, *, meta: Mapping[str, Any] | None = None) -> None:
    """Copy any Dump to coldkv's own format, streaming; `meta` is laid over the metadata of `dump`.

    Values keep their dtype, hot planes their codes and scales, queries their values (bf16 where that is exact, else
    fp32). A layer gets its own positions unless they are 0, 1, 2, ... Atomic.
    """
    pairs = [_spec(dump, layer) for layer in dump.layers]
    merged = {**dump.meta, "page_tokens": dump.page_tokens, **(meta or {})}
    with DumpWriter(path, [spec for spec, _ in pairs], merged) as writer:
        for layer, (spec, queries) in zip(dump.layers, pairs, strict=True):
            base = f"layers.{layer.index}"
            for name, plane in layer.planes.items():
                step = max(1, CHUNK_BYTES // max(1, plane.nbytes // plane.tokens))
                for start in range(0, plane.tokens, step):
                    stop = min(start + step, plane.tokens)
                    if plane.hot_format is None:
                        writer.write(f"{base}.{name}", plane.read(start, stop))
                        continue
                    codes, scales = plane.read_hot(start, stop)
                    writer.write(f"{base}.{name}.codes", codes)
                    if scales is not None:
                        writer.write(f"{base}.{name}.scales", scales)
            if queries is not None:
                writer.write(f"{base}.q", queries[0])
                writer.write(f"{base}.q_pos", queries[1])
            if spec.positions:
                writer.write(f"{base}.positions", layer.positions())
