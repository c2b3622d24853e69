"""Small dumps for the tests, built from the format's own rules rather than with the writer under test."""

import json
import struct

import torch

SPELLED = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64", torch.int32: "I32",
    torch.int8: "I8", torch.uint8: "U8", torch.float64: "F64", torch.int16: "I16",
}  # fmt: skip


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def safetensors_bytes(tensors: dict, meta=None, change=None) -> bytes:
    """Header + data; `change(header dict)` may spoil the header before it is written."""
    header, data = {}, b""
    if meta is not None:
        header["__metadata__"] = {"coldkv.dump": meta if isinstance(meta, str) else json.dumps(meta)}
    for name, tensor in tensors.items():
        raw = raw_bytes(tensor)
        header[name] = {
            "dtype": SPELLED[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    if change is not None:
        change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def plane(tokens=5, heads=2, head_dim=8, dtype=torch.bfloat16, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)


def layers(indices=(0, 3), **kwargs) -> dict:
    """{"layers.0.k": ..., ...} with different values in every plane."""
    return {f"layers.{i}.{p}": plane(seed=2 * i + j, **kwargs) for i in indices for j, p in enumerate("kv")}
