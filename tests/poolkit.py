"""Small dumps and pools for the tests, and tampering with a pool so that its checksums hold again."""

import dataclasses
import math

import numpy as np
import torch
from dumpkit import safetensors_bytes

from coldkv import tiers
from coldkv.backends import TorchBackend
from coldkv.codecs import parse_codec
from coldkv.dumps import open_dump
from coldkv.formats import tier_formats
from coldkv.geometry import Geometry
from coldkv.pipeline import to_head_pages, to_tokens
from coldkv.pool.file import PoolFile, PoolWriter
from coldkv.pool.pack import pack
from coldkv.pool.policy import Policy
from coldkv.pool.restore import restore
from coldkv.table import assign, parse_table

torch.set_num_threads(1)  # the tensors are tiny: more threads only spin

EVERYTHING_COLD = Policy(keep_tokens=0, sink_tokens=0)


def values(tokens, heads, head_dim, seed, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)


def make_dump(path, layers, *, page_tokens=16, meta=None, change=None):
    """`layers`: index -> {tokens, heads, head_dim, kind, window, dtype, queries, positions}; `change(tensors)` may
    spoil values. Returns the tensors."""
    tensors, attention = {}, {}
    for index, layer in layers.items():
        shape = (layer.get("tokens", 100), layer.get("heads", 2), layer.get("head_dim", 32))
        kind = layer.get("kind", "full")
        attention[str(index)] = {"kind": kind, "window": layer.get("window"), "scaling": 0.25, "softcap": None}
        for number, plane in enumerate("k" if kind == "mla" else "kv"):
            seed = 2 * index + number
            tensors[f"layers.{index}.{plane}"] = values(*shape, seed, layer.get("dtype", torch.bfloat16))
        if layer.get("queries"):
            tensors[f"layers.{index}.q"] = values(3, 2 * shape[1], shape[2], 99 + index)
            tensors[f"layers.{index}.q_pos"] = torch.tensor([0, 5, shape[0] - 1])
        if "positions" in layer:
            tensors[f"layers.{index}.positions"] = layer["positions"]
    if change:
        change(tensors)
    content = {"version": 1, "page_tokens": page_tokens, "model": "tiny", "attention": attention, **(meta or {})}
    path.write_bytes(safetensors_bytes(tensors, content))
    return tensors


def pack_dump(
    dump_path, pool_path, *, table="0-99:int8", codecs=("e2m1-g16",), policy=EVERYTHING_COLD, backend=None, **how
):
    with open_dump(dump_path) as dump:
        assignment = assign(parse_table(table), [layer.index for layer in dump.layers])
        chosen = [parse_codec(text) for text in codecs]
        return pack(dump, str(pool_path), assignment, chosen, policy, backend or TorchBackend(), **how)


def restored_tensors(pool_path, out_path, **how):
    """(plane name -> fp32 `[tokens, heads, D]`, report) of a pool restored into `out_path`."""
    with PoolFile(pool_path) as pool:
        report = restore(pool, str(out_path), TorchBackend(), **how)
    with open_dump(out_path) as dump:
        found = {
            f"layers.{layer.index}.{name}": plane.read(0, layer.tokens).float()
            for layer in dump.layers
            for name, plane in layer.planes.items()
        }
    return found, report


def expected_plane(dense, fmt, codec, page_tokens, cold_pages):
    """What attention reads, straight from the oracle: hot tier everywhere, decoded slots on `cold_pages`."""
    tokens, heads, head_dim = dense.shape
    padded = torch.zeros(math.ceil(tokens / page_tokens) * page_tokens, heads, head_dim)
    padded[:tokens] = dense.float()
    geometry = Geometry(head_dim, page_tokens, heads)
    hot = tiers.quantize(fmt, to_head_pages(padded, geometry))
    result = tiers.dequantize(hot).reshape(-1, heads, page_tokens, head_dim)
    if len(cold_pages):
        rows = (torch.tensor(cold_pages)[:, None] * heads + torch.arange(heads)).flatten()
        taken = tiers.HotPlane(fmt, hot.codes[rows], None if hot.scales is None else hot.scales[rows], head_dim)
        slots, valid = codec.encode_torch(taken, geometry)
        assert valid.all()
        decoded = codec.decode_torch(slots, geometry, fmt)
        result[torch.tensor(cold_pages)] = decoded.reshape(-1, heads, page_tokens, head_dim)
    return to_tokens(result.flatten(0, 1), geometry)[:tokens]


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def cold_pages(pool_path, layer):
    with PoolFile(pool_path) as pool:
        table = pool.rows(f"layers.{layer}.block_table", 0, pool.layer(layer).pages)
    return np.flatnonzero(table <= -2).tolist()


def check_restored(tensors, found, pool_path, *, table_tiers, codec_of, page_tokens=16):
    """Compare every plane with the oracle; `table_tiers`: layer -> tier, `codec_of(format)`."""
    for name, dense in tensors.items():
        parts = name.split(".")
        if parts[2] not in ("k", "v"):
            continue
        fmt = tier_formats(table_tiers[int(parts[1])])[parts[2]]
        pages = cold_pages(pool_path, int(parts[1]))
        expected = expected_plane(dense, fmt, codec_of(fmt), page_tokens, pages)
        assert same_bits(found[name], expected), name


def reseal(source, target, change, *, relayout=None, meta=None):
    """Copy a pool with valid checksums after `change(tensors: dict of numpy arrays)`; slot and page CRC tables are the
    changer's business. `relayout(layer)` may replace a layout, `meta(dict)` edit the metadata."""
    with PoolFile(source) as pool:
        tensors = {name: pool.array(name).copy() for name in pool.tensor_names()}
        change(tensors)
        content = {k: v for k, v in pool.meta.items() if k not in ("version", "layers", "crc32")}
        if meta:
            meta(content)
        layers = [relayout(layer) if relayout else dataclasses.replace(layer) for layer in pool.layers]
        with PoolWriter(target, layers, content) as writer:
            for name, array in tensors.items():
                writer.write(name, array)
