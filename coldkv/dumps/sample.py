"""The bundled sample: KV of a real model, small enough to ship."""

from pathlib import Path


def sample_path() -> Path:
    """Path of the sample dump that the package ships (its provenance is in its metadata)."""
    return Path(__file__).resolve().parent.parent / "data" / "sample.safetensors"
