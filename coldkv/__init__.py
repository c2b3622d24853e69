"""coldkv: compress the cold part of an LLM's KV cache, measured in real bytes."""

from coldkv._version import __version__

__all__ = ["__version__"]
