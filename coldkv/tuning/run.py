"""Tunes codec ecq on a dump: channel statistics, rate-distortion curves per layer and plane, steps for a budget."""

import copy
import json
from dataclasses import dataclass

import numpy as np
import torch

from coldkv._version import __version__
from coldkv.calibration import METADATA_KEY, VERSION, PlaneCalibration
from coldkv.codecs.ecq import Ecq
from coldkv.errors import InputError
from coldkv.formats import FORMATS
from coldkv.pipeline import layer_geometry, plane_format, read_pages
from coldkv.tuning.allocation import Point, allocate
from coldkv.tuning.attention import AttentionProbe
from coldkv.tuning.channels import flat_channels, key_channels

STEPS = range(-48, 33, 8)  # sixteenths of an octave: from an eighth to four times a row's root mean square
LEAST_MAGNITUDE = 2.0**-12


@dataclass
class TunedPlane:
    """Curve of one plane and what calibrates it; `priors` by step."""

    geometry: object
    fmt: str
    mean: np.ndarray
    weight: np.ndarray
    points: list[Point]
    priors: dict[int, np.ndarray]
    hot_bytes: int  # of all head-pages measured
    head_pages: int


def tune_plane(codec: Ecq, hot, geometry, channels, error_of, backend, steps=STEPS) -> TunedPlane:
    """`error_of(restored fp32 [tokens, heads, D]) -> float`; `hot` holds whole pages."""
    mean, weight = channels.mean.numpy(), channels.weight.numpy()
    found = TunedPlane(geometry, hot.format, mean, weight, [], {}, hot.nbytes, hot.head_pages)
    for step in steps:
        bound = copy.copy(codec)
        bound.calib_sha256 = "00"
        bound._plane = PlaneCalibration(mean, weight, np.zeros(mean.shape, np.int16), step)
        magnitude = bound.residual_magnitudes(hot, geometry).clamp(min=LEAST_MAGNITUDE)
        prior = (16 * magnitude.log2()).round().to(torch.int16).numpy() + np.int16(step)
        bound._plane = PlaneCalibration(mean, weight, prior, step)
        lengths = backend.lengths(bound, hot, geometry).cpu().numpy()
        bound = bound.with_stride(bound.choose_stride(lengths, geometry, hot.format))
        slots, valid = backend.encode(bound, hot, geometry)
        if not bool(valid.all()):
            continue
        restored = backend.decode(bound, slots, geometry, hot.format)
        error = error_of(_to_tokens(restored, geometry))
        found.points.append(Point(float(slots.numel()), error, step))
        found.priors[step] = prior
    return found


def _to_tokens(values: torch.Tensor, geometry) -> torch.Tensor:
    paged = values.reshape(-1, geometry.kv_heads, geometry.page_tokens, geometry.head_dim)
    return paged.transpose(1, 2).reshape(-1, geometry.kv_heads, geometry.head_dim)


def tune(dump, assignment, backend, *, keep: int, sink: int, codec: Ecq, nan="reject", advance=lambda n: None) -> dict:
    """(layer, plane) -> TunedPlane for every layer of `assignment`. InputError: no queries, or no whole page."""
    planes = {}
    for index, tier in assignment.pairs:
        layer = dump.layer(index)
        if not layer.has_queries:
            raise InputError(
                f"dump {dump.path}: tensor layers.{index}.q: expected queries, found none",
                hint="capture the dump with coldkv capture",
            )
        geometry = layer_geometry(layer, dump.page_tokens)
        whole = layer.tokens // geometry.page_tokens * geometry.page_tokens
        if not whole:
            raise InputError(f"dump {dump.path}: layer {index}: expected at least {geometry.page_tokens} tokens")
        hot, values = {}, {}
        for name, source in layer.planes.items():
            fmt = plane_format(source, name, tier)
            _, hot[name] = read_pages(source, fmt, geometry, backend, 0, whole, nan=nan)
            values[name] = _to_tokens(backend.dequantize(hot[name]), geometry).cpu()
        k = values["k"]
        probe = AttentionProbe.of(layer, k, values.get("v", k), keep=keep, sink=sink)
        probe.prepare()
        queries = layer.queries()[0]
        channels = {"k": key_channels(k, queries, skip=sink), "v": flat_channels(geometry)}
        errors = {"k": probe.error_k, "v": probe.error_v}
        for name in layer.planes:
            planes[index, name] = tune_plane(codec, hot[name], geometry, channels[name], errors[name], backend)
            advance(layer.planes[name].nbytes)
    return planes


def choose(planes: dict, ratio: float) -> dict:
    """(layer, plane) -> Point: the least total error at hot bytes / slot bytes of `ratio` or more over all planes."""
    budget = sum(plane.hot_bytes for plane in planes.values()) / ratio
    return allocate({key: plane.points for key, plane in planes.items()}, budget)


def write_calibration(path, planes: dict, chosen: dict, *, meta: dict) -> None:
    """The calibration file for `chosen`, written whole or not at all."""
    from safetensors.numpy import save

    from coldkv.atomic import atomic_path

    tensors, steps, curves = {}, {}, {}
    for (layer, name), plane in planes.items():
        point = chosen[layer, name]
        base = f"layers.{layer}.{name}"
        tensors[f"{base}.mean"] = np.ascontiguousarray(plane.mean, dtype=np.float32)
        tensors[f"{base}.weight"] = np.ascontiguousarray(plane.weight, dtype=np.float32)
        tensors[f"{base}.prior"] = np.ascontiguousarray(plane.priors[point.step])
        steps.setdefault(str(layer), {})[name] = point.step
        curves.setdefault(str(layer), {})[name] = [[p.step, p.cost / plane.head_pages, p.error] for p in plane.points]
    body = {"version": VERSION, "tool": f"coldkv {__version__}", **meta, "steps": steps, "curves": curves}
    raw = save(tensors, metadata={METADATA_KEY: json.dumps(body)})
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(raw)


def hot_page_bytes(plane: TunedPlane) -> int:
    return FORMATS[plane.fmt].bytes(plane.geometry)
