"""Calibration files: what `coldkv tune` learned about a model's K and V channels, for codecs that use it."""

import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from coldkv.errors import InputError
from coldkv.geometry import Geometry

METADATA_KEY = "coldkv.calibration"
VERSION = 1


@dataclass
class PlaneCalibration:
    """One plane of one layer. mean, weight fp32 `[heads, D]` (weight > 0); prior int16 `[heads, D]`: sixteenths of an
    octave of a channel's mean residual at step 1; step: nominal step in sixteenths of an octave."""

    mean: np.ndarray
    weight: np.ndarray
    prior: np.ndarray
    step: int
    on_device: dict = field(default_factory=dict, compare=False, repr=False)  # copies kept by the native backends

    @property
    def gain(self) -> np.ndarray:
        """1 / weight in fp32 `[heads, D]`: what encoders multiply by."""
        return np.float32(1) / self.weight


class Calibration:
    """An open calibration file; planes are read once and kept."""

    def __init__(self, path: Path, raw: bytes):
        from safetensors import SafetensorError
        from safetensors.numpy import load

        self.path, self.sha256 = path, hashlib.sha256(raw).hexdigest()
        try:
            self._tensors = load(raw)
            length = int.from_bytes(raw[:8], "little")
            self.meta = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"][METADATA_KEY])
            version, self._steps = self.meta["version"], self.meta["steps"]
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"calibration {path}: expected a file written by coldkv tune: {type(error).__name__}",
                hint="write one with coldkv tune",
            ) from None
        if version != VERSION:
            raise InputError(f"calibration {path}: expected version {VERSION}, found {version!r}")
        self._planes: dict[tuple[int, str], PlaneCalibration] = {}

    def _tensor(self, name: str, dtype, shape: tuple[int, int]) -> np.ndarray:
        found = self._tensors.get(name)
        if found is None:
            raise InputError(f"calibration {self.path}: tensor {name}: expected {dtype} {list(shape)}, found none")
        if found.dtype != dtype or found.shape != shape:
            raise InputError(
                f"calibration {self.path}: tensor {name}: expected {np.dtype(dtype)} {list(shape)}, "
                f"found {found.dtype} {list(found.shape)}"
            )
        if not np.isfinite(found).all():
            raise InputError(f"calibration {self.path}: tensor {name}: expected finite values")
        return np.ascontiguousarray(found)

    def plane(self, layer: int, plane: str, geometry: Geometry) -> PlaneCalibration:
        """Raises InputError where the file has nothing, or something of another shape, for this plane."""
        key = (layer, plane)
        if key not in self._planes:
            base, shape = f"layers.{layer}.{plane}", (geometry.kv_heads, geometry.head_dim)
            weight = self._tensor(f"{base}.weight", np.float32, shape)
            if not (weight > 0).all():
                raise InputError(f"calibration {self.path}: tensor {base}.weight: expected values above 0")
            step = self._steps.get(str(layer), {}).get(plane)
            if type(step) is not int or abs(step) > 300:
                raise InputError(
                    f"calibration {self.path}: steps, layer {layer}, plane {plane}: expected an integer from -300 to "
                    f"300, found {step!r}"
                )
            mean = self._tensor(f"{base}.mean", np.float32, shape)
            self._planes[key] = PlaneCalibration(mean, weight, self._tensor(f"{base}.prior", np.int16, shape), step)
        found = self._planes[key]
        if found.mean.shape != (geometry.kv_heads, geometry.head_dim):
            want, shape = [geometry.kv_heads, geometry.head_dim], list(found.mean.shape)
            raise InputError(f"calibration {self.path}: layer {layer}, plane {plane}: expected {want}, found {shape}")
        return found


def open_calibration(path: str | Path, sha256: str | None = None) -> Calibration:
    """The calibration file at `path`, kept for later calls. InputError: unreadable, or not the one with `sha256`."""
    path = Path(path)
    try:
        stat = path.stat()
        found = _open(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise InputError(f"calibration {path}: cannot be read: {error.strerror}") from None
    if sha256 is not None and found.sha256 != sha256:
        raise InputError(f"calibration {path}: expected sha256 {sha256[:16]}..., found {found.sha256[:16]}...")
    return found


@lru_cache(maxsize=8)
def _open(path: Path, mtime_ns: int, size: int) -> Calibration:
    return Calibration(path, path.read_bytes())
