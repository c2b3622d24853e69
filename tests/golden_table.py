"""The golden checksum table: its inputs and how they are made. `scripts/regold` writes it, tests only read it.

Inputs come from the raw output of a bit generator and exact integer arithmetic, so they do not depend on the version
of any library; their own checksum stands first in every row.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch

from coldkv.backends import fitted
from coldkv.codecs import all_codecs, get_codec
from coldkv.formats import FORMATS
from coldkv.geometry import Geometry
from coldkv.tiers import HotPlane

FOLDER = Path(__file__).parent / "golden"
HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512, 576)
KV_HEADS = (1, 2, 4, 8)
PAGE_TOKENS = (16, 64, 256)
ODD_SHAPES = ((34, 1, 16), (72, 2, 16), (2, 1, 64), (1024, 1, 16), (128, 3, 5))
PAIRS = [(codec.id, fmt) for codec in all_codecs() for fmt in FORMATS if codec.fits(fmt)]


def shapes(fmt: str) -> list[tuple[int, int, int]]:
    """(head_dim, kv_heads, page_tokens): the whole grid for int8, elsewhere one of each head_dim, and odd shapes."""
    grid = [(d, h, t) for d in HEAD_DIMS for h in KV_HEADS for t in PAGE_TOKENS]
    if fmt != "int8":
        grid = [(d, KV_HEADS[i % 4], PAGE_TOKENS[i % 2]) for i, d in enumerate(HEAD_DIMS)]
    return grid + list(ODD_SHAPES)


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


def row(backend, codec_id: str, fmt: str, shape: tuple[int, int, int]) -> dict:
    """One row of the table as this backend computes it."""
    geometry = Geometry(shape[0], shape[2], shape[1])
    codec = get_codec(codec_id)
    values = make_input(*shape)
    hot: HotPlane = backend.quantize(fmt, backend.load(values, geometry))
    sizes = {}
    if codec.needs_stride:
        sizes = {"lengths": backend.lengths(codec, hot, geometry).tolist()}
        codec = fitted(codec, hot, geometry, backend)
    slots, valid = backend.encode(codec, hot, geometry)
    restored = backend.restore(codec, slots, geometry, fmt)
    return {
        "head_dim": shape[0],
        "kv_heads": shape[1],
        "page_tokens": shape[2],
        "input": sha(values),
        "hot": sha(hot.codes, hot.scales),
        "slots": sha(slots, valid),
        "restored": sha(restored.codes, restored.scales),
        "decoded": sha(backend.decode(codec, slots, geometry, fmt)),
    } | sizes


def path(codec_id: str, fmt: str) -> Path:
    return FOLDER / codec_id / f"{fmt}.json"


def read(codec_id: str, fmt: str) -> list[dict]:
    return json.loads(path(codec_id, fmt).read_text())


def write(backend, codec_id: str, fmt: str) -> None:
    rows = [row(backend, codec_id, fmt, shape) for shape in shapes(fmt)]
    target = path(codec_id, fmt)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")
