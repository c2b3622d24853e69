"""The raw slot's byte layout, shared by the codecs that store 4-bit codes and g16 scale bytes (kernels/FORMAT.md)."""

import struct
from dataclasses import dataclass

import numpy as np

from coldkv.geometry import Geometry, round_up

MAGIC = 0x49384352
HEADER_BYTES = 16
SLOT_ALIGNMENT = 16
FLAG_VALID = 1
FLAG_ISO3 = 2

HEADER = struct.Struct("<IHH8s")


@dataclass(frozen=True)
class RawLayout:
    """Offsets in bytes of one raw slot: header at 0, codes, scales, zero padding."""

    codes_at: int
    scales_at: int
    end: int
    stride: int
    scales_per_row: int


def raw_layout(geometry: Geometry) -> RawLayout:
    code_bytes = geometry.page_tokens * geometry.head_dim // 2
    scales_per_row = geometry.groups(16)
    scales_at = HEADER_BYTES + code_bytes
    end = scales_at + geometry.page_tokens * scales_per_row
    return RawLayout(HEADER_BYTES, scales_at, end, round_up(end, SLOT_ALIGNMENT), scales_per_row)


def assemble(geometry: Geometry, header, codes, scales, valid):
    """Torch: put header uint8 `[n, 16]`, codes `[n, T, D/2]`, scales `[n, T, G]` into slots `[n, stride]`.

    A page whose `valid` (bool `[n]`) is false becomes an all-zero slot. Returns (slots, valid int32).
    """
    import torch

    at = raw_layout(geometry)
    slots = torch.zeros((codes.shape[0], at.stride), dtype=torch.uint8, device=codes.device)
    slots[:, :HEADER_BYTES] = header
    slots[:, at.codes_at : at.scales_at] = codes.flatten(1)
    slots[:, at.scales_at : at.end] = scales.flatten(1)
    slots *= valid[:, None].to(torch.uint8)
    return slots, valid.to(torch.int32)


def take_apart(geometry: Geometry, slots):
    """Torch: slots `[n, stride]` -> (codes uint8 `[n, T, D/2]`, scale bytes uint8 `[n, T, G]`)."""
    at = raw_layout(geometry)
    rows = (slots.shape[0], geometry.page_tokens)
    codes = slots[:, at.codes_at : at.scales_at].reshape(*rows, geometry.head_dim // 2)
    scales = slots[:, at.scales_at : at.end].reshape(*rows, at.scales_per_row)
    return codes, scales


def header_tensor(version: int, flags: int, reserved: bytes = bytes(8)):
    """Torch: one 16-byte slot header as uint8 `[16]`."""
    import torch

    return torch.frombuffer(bytearray(HEADER.pack(MAGIC, version, flags, reserved)), dtype=torch.uint8)


def check_raw_slots(slots: np.ndarray, geometry: Geometry, *, version: int, flags: int, check_reserved: bool = True):
    """Slots uint8 `[n, stride]` -> (index, problem) pairs: magic, version, flags, reserved, padding, scales."""
    at = raw_layout(geometry)
    if slots.ndim != 2 or slots.shape[1] != at.stride:
        return [(0, f"slot length: expected {at.stride} bytes, found {slots.shape[-1]}")]
    problems: list[tuple[int, str]] = []

    def note(bad: np.ndarray, text) -> None:
        problems.extend((int(i), text(int(i))) for i in np.flatnonzero(bad))

    head = np.ascontiguousarray(slots[:, :HEADER_BYTES])
    magic = head[:, 0:4].copy().view("<u4")[:, 0]
    found_version = head[:, 4:6].copy().view("<u2")[:, 0]
    found_flags = head[:, 6:8].copy().view("<u2")[:, 0]
    note(magic != MAGIC, lambda i: f"magic: expected 0x{MAGIC:08x}, found 0x{magic[i]:08x}")
    note(found_version != version, lambda i: f"version: expected {version}, found {found_version[i]}")
    note(found_flags != flags, lambda i: f"flags: expected {flags}, found {found_flags[i]}")
    if check_reserved:
        note(head[:, 8:].any(axis=1), lambda i: f"reserved bytes: expected zero, found {head[i, 8:].tobytes().hex()}")
    note(slots[:, at.end :].any(axis=1), lambda i: "padding: expected zero bytes")
    scales = slots[:, at.scales_at : at.end]
    bad_scale = (scales == 0) | (scales > 0x7E)
    note(bad_scale.any(axis=1), lambda i: scale_problem(scales[i], bad_scale[i], at.scales_per_row))
    return sorted(problems)


def scale_problem(scales: np.ndarray, bad: np.ndarray, per_row: int) -> str:
    first = int(np.flatnonzero(bad)[0])
    return f"scale at row {first // per_row}, group {first % per_row}: expected 0x01..0x7e, found 0x{scales[first]:02x}"
