"""KV dumps: one reader per file format, one writer for coldkv's own. See `open_dump`."""

import os

from coldkv.dumps.finite import check_finite
from coldkv.dumps.model import Dump, LayerDump, PlaneSource
from coldkv.dumps.sample import sample_path
from coldkv.dumps.writer import DumpWriter, LayerSpec, write_dump
from coldkv.errors import InputError
from coldkv.geometry import Geometry

__all__ = [
    "Dump", "DumpWriter", "LayerDump", "LayerSpec", "PlaneSource",
    "check_finite", "from_hf_cache", "open_dump", "sample_path", "write_dump",
]  # fmt: skip


def open_dump(path: str | os.PathLike, *, geometry: Geometry | None = None, batch: int | None = None) -> Dump:
    """Open a KV dump by its file name: `.safetensors`, `.npz`, `.pt` / `.pth` / `.bin`.

    `geometry`: page size to use, and head sizes that must agree with the file. `batch`: which sequence to take where
    the file holds several (`.pt` only). Only `.pt` needs torch before values are read.
    InputError: missing, empty, truncated or malformed file, dtype or shapes that are no KV planes, unknown extension.
    """
    path = os.fspath(path)
    extension = os.path.splitext(path)[1].lower()
    if batch is not None and extension not in (".pt", ".pth", ".bin"):
        raise InputError(f"dump {path}: a batch index applies to .pt files only")
    if extension == ".safetensors":
        from coldkv.dumps.safetensors import open_safetensors

        return open_safetensors(path, geometry)
    if extension == ".npz":
        from coldkv.dumps.npz import open_npz

        return open_npz(path, geometry)
    if extension in (".pt", ".pth", ".bin"):
        from coldkv.dumps.pt import open_pt

        return open_pt(path, geometry, batch)
    if not os.path.exists(path):
        raise InputError(f"dump {path}: no such file")
    raise InputError(f"dump {path}: expected .safetensors, .npz or .pt, found extension {extension or '(none)'!r}")


def from_hf_cache(cache, **options) -> Dump:
    """A Dump over a Hugging Face cache object; see `coldkv.dumps.hf_cache.from_hf_cache`."""
    from coldkv.dumps.hf_cache import from_hf_cache

    return from_hf_cache(cache, **options)
