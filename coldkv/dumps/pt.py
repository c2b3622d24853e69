"""Dumps saved with torch.save, loaded with `weights_only=True`: tensors and containers, never code.

Accepted: {"key_cache": [...], "value_cache": [...]} and lists or tuples of (k, v), each `[batch, kv_heads, tokens,
head_dim]`; {"past_key_values": either of them}; and dicts of coldkv's own tensor names (`layers.3.k` `[tokens,
kv_heads, head_dim]`, `layers.3.q`, `layers.3.q_pos`), with "coldkv.dump" as metadata. The file is mapped, and after
every read the mapped pages are handed back: a mapping of the whole file would count as resident memory.
"""

import ctypes
import json
import mmap
import re
import warnings

from coldkv.dumps.hf_cache import Entry, build_layers, entries_from_lists, entries_from_pairs
from coldkv.dumps.model import (
    DEFAULT_PAGE_TOKENS,
    Dump,
    LayerDump,
    check_meta,
    check_plain_tensor,
    check_queries,
    finish_layers,
    value_dtype,
)
from coldkv.errors import InputError
from coldkv.geometry import Geometry
from coldkv.safetensors_stream import open_regular

_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,6})\.(k|v|q|q_pos|positions)")


def _load(path: str):
    import os
    import pickle

    import torch

    fd, _ = open_regular(path)
    zipped = os.pread(fd, 4, 0) == b"PK\x03\x04"
    os.close(fd)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped), zipped
    except pickle.UnpicklingError as error:
        match = re.search(r"(?:GLOBAL|Unsupported (?:global|class|operand)|type) ([\w.]+(?: [\w.]+)?)", str(error))
        raise InputError(
            f"dump {path}: holds Python objects ({match[1] if match else 'a pickle with code'}), which are never run",
            hint='save plain tensors: torch.save({"key_cache": [...], "value_cache": [...]}, file), or .safetensors',
        ) from None
    except (RuntimeError, ValueError, EOFError, OSError, KeyError, TypeError, AttributeError, IndexError) as error:
        line = " ".join(str(error).split())[:160]
        raise InputError(f"dump {path}: not a complete torch file: {line}") from None


def _forget_pages(tensor) -> None:
    """Drop the resident pages of a read-only mapping; the next read takes them from the page cache again."""
    storage = tensor.untyped_storage()
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        _madvise()(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _madvise():
    return ctypes.CDLL(None, use_errno=True).madvise


def open_pt(path: str, geometry: Geometry | None = None, batch: int | None = None) -> Dump:
    """Open a `.pt` dump. Imports torch. InputError: pickles with code, truncated files, containers without KV."""
    content, mapped = _load(path)
    # Linux alone promises that MADV_DONTNEED re-reads a private file mapping.
    after = _forget_pages if mapped and hasattr(mmap, "MADV_DONTNEED") else None
    meta = _meta(path, content)
    if isinstance(content, dict) and "past_key_values" in content:
        content = content["past_key_values"]
    where = f"dump {path}"
    named = None
    if isinstance(content, dict) and "key_cache" in content and "value_cache" in content:
        entries = entries_from_lists(content["key_cache"], content["value_cache"], where)
    elif isinstance(content, list | tuple):
        entries = entries_from_pairs(content, where)
    elif isinstance(content, dict):
        named = _named(path, content)
        entries = [_named_entry(path, index, parts) for index, parts in sorted(named.items())]
        if batch is not None:
            raise InputError(f"{where}: a batch index applies to Hugging Face caches only")
    else:
        raise InputError(f"{where}: expected a dict or list of tensors, found {type(content).__name__}")
    layers = build_layers(path, entries, batch=batch, meta=meta, after=after)
    if named is not None:
        for layer in layers:
            _attach(path, layer, named[layer.index])
    layers = finish_layers(path, layers, geometry)
    page_tokens = geometry.page_tokens if geometry else meta.get("page_tokens", DEFAULT_PAGE_TOKENS)
    return Dump(path, "pt", meta, page_tokens, layers)


def _meta(path: str, content) -> dict:
    meta = content.get("coldkv.dump") if isinstance(content, dict) else None
    if meta is None:
        return {}
    if isinstance(meta, str):
        try:
            meta = json.loads(meta)
        except (ValueError, RecursionError) as error:
            raise InputError(f"dump {path}: coldkv.dump is not valid JSON: {str(error)[:120]}") from None
    return check_meta(path, meta)


def _named(path: str, content: dict) -> dict[int, dict]:
    import torch

    found: dict[int, dict] = {}
    for name, value in content.items():
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if not match:
            if isinstance(name, str) and name.startswith("layers."):
                raise InputError(f"dump {path}: tensor {name}: expected layers.<i>.k, .v, .q, .q_pos or .positions")
            continue
        if not isinstance(value, torch.Tensor):
            raise InputError(f"dump {path}: tensor {name}: expected a tensor, found {type(value).__name__}")
        check_plain_tensor(path, name, value)
        found.setdefault(int(match[1]), {})[match[2]] = value.detach()
    if not found:
        raise InputError(
            f"dump {path}: no KV found in a dict with {', '.join(map(str, list(content)[:4])) or 'no keys'}",
            hint="expected key_cache and value_cache, past_key_values, or layers.<i>.k and layers.<i>.v",
        )
    return found


def _named_entry(path: str, index: int, parts: dict) -> Entry:
    if "k" not in parts:
        raise InputError(f"dump {path}: tensor layers.{index}.k is missing, found only {', '.join(sorted(parts))}")
    for plane in ("k", "v"):
        if plane in parts and parts[plane].ndim != 3:
            raise InputError(
                f"dump {path}: tensor layers.{index}.{plane}: expected [tokens, kv_heads, head_dim], "
                f"found shape {list(parts[plane].shape)}"
            )
    states = [parts[p].transpose(0, 1)[None] if p in parts else None for p in ("k", "v")]
    return Entry(index, *states, names=(f"layers.{index}.k", f"layers.{index}.v"))


def _attach(path: str, layer: LayerDump, parts: dict) -> None:
    import torch

    q, q_pos, positions = parts.get("q"), parts.get("q_pos"), parts.get("positions")
    if q is not None or q_pos is not None:
        check_queries(path, layer, None if q is None else q.shape, None if q_pos is None else q_pos.shape)
        if value_dtype(q) not in ("bf16", "fp16", "fp32") or q_pos.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"dump {path}: tensor layers.{layer.index}.q: expected bf16, fp16 or fp32 with int64 or int32 "
                f"positions, found {value_dtype(q)} with {value_dtype(q_pos)}"
            )
        layer._queries = lambda: (q.clone(), q_pos.clone())
    if positions is not None:
        if positions.shape != (layer.tokens,) or positions.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"dump {path}: tensor layers.{layer.index}.positions: expected {layer.tokens} whole numbers, "
                f"found {value_dtype(positions)} {list(positions.shape)}"
            )
        layer._positions = lambda: positions.to(torch.int64)
