"""Codec registry: built-in codecs are the modules of this package, others come by the entry point `coldkv.codecs`.

Importing this module does not import torch; a codec's torch code is imported when it runs.
"""

import importlib
import pkgutil
import sys
from functools import cache
from importlib.metadata import entry_points

from coldkv.codecs.base import Codec
from coldkv.errors import InputError, ToolError

__all__ = ["Codec", "all_codecs", "codec_ids", "get_codec", "parse_codec"]

ENTRY_POINT_GROUP = "coldkv.codecs"
NOT_CODECS = {"base", "centered", "ecqoracle", "ecqslot", "entropyslot", "rawslot", "sized"}
broken_entry_points: dict[str, str] = {}  # name -> what is wrong, filled when the codecs are first listed


@cache
def _codec_classes() -> dict[str, type[Codec]]:
    classes: dict[str, type[Codec]] = {}
    for info in pkgutil.iter_modules(__path__):
        if info.name not in NOT_CODECS:
            _add(classes, importlib.import_module(f"{__name__}.{info.name}").CODEC, info.name)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            _add(classes, entry.load(), entry.value)
        except Exception as error:  # somebody else's package: it must not take the built-in codecs with it
            reason = error if isinstance(error, ToolError) else f"could not be loaded: {error!r}"
            broken_entry_points[entry.name] = f"codec entry point {entry.name} ({entry.value}): {reason}"
    for line in broken_entry_points.values():
        print(f"coldkv: warning: {' '.join(line.split())}; skipped", file=sys.stderr)
    return classes


def _add(classes: dict[str, type[Codec]], codec: type[Codec], where: str) -> None:
    if not (isinstance(codec, type) and issubclass(codec, Codec)):
        raise ToolError(f"codec {where}: expected a subclass of coldkv.codecs.Codec, found {codec!r}")
    for name in ("id", "version", "formats"):
        if not hasattr(codec, name):
            raise ToolError(f"codec {where}: the class sets no {name!r}")
    if codec.id in classes:
        raise ToolError(f"codec {where}: id {codec.id!r} is already taken by {classes[codec.id].__module__}")
    classes[codec.id] = codec


def codec_ids() -> list[str]:
    """Ids of all codecs found, sorted."""
    return sorted(_codec_classes())


def get_codec(codec_id: str, config: dict | None = None) -> Codec:
    """The codec `codec_id` with `config` (its `config` property round-trips through JSON).

    Raises InputError for an unknown id or option.
    """
    classes = _codec_classes()
    if codec_id not in classes:
        raise InputError(f"codec: expected one of {', '.join(codec_ids())}, found {codec_id!r}")
    options = dict(config or {})
    center = {key: options.pop(key) for key in ("center_k", "center_k_sha256") if key in options}
    try:
        codec = classes[codec_id](**options)
        if not center:
            return codec
        from coldkv.codecs.centered import Centered

        return Centered(codec, **center)
    except TypeError as error:
        raise InputError(f"codec {codec_id}: {error}") from error


def parse_codec(text: str) -> Codec:
    """`id` or `id:key=value,key=value` -> codec. Values are JSON where they parse as JSON, else strings."""
    import json

    codec_id, _, options = text.partition(":")
    config = {}
    for part in filter(None, options.split(",")):
        key, sep, value = part.partition("=")
        if not sep:
            raise InputError(f"codec {codec_id}: expected key=value, found {part!r}")
        try:
            config[key.strip()] = json.loads(value)
        except ValueError:
            config[key.strip()] = value
    return get_codec(codec_id.strip(), config)


def all_codecs() -> list[Codec]:
    """Every codec in its default configuration, by id."""
    return [get_codec(codec_id) for codec_id in codec_ids()]
