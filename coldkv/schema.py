"""What the schemas of result files share: reading JSON strictly, checking keys and types, writing one row per line.

Imports neither torch nor numpy.
"""

import json
import math
import os
from pathlib import Path

from coldkv.errors import InputError

_KIND_NAMES = {str: "a string", int: "an integer", float: "a finite number", list: "a list", dict: "an object"}
INT_LIMIT = 2**63  # beyond it no count is real, and float arithmetic overflows


def read_json(path: str | os.PathLike) -> dict:
    """A JSON object from a file; InputError for anything else, also for NaN and Infinity."""

    def reject(token: str):
        raise InputError(f"{path}: found {token}, expected finite numbers or null; write the file again")

    raw = Path(path).read_bytes()
    if not raw.strip():
        raise InputError(f"{path}: the file is empty, expected a JSON document")
    try:
        doc = json.loads(raw.decode("utf-8"), parse_constant=reject)
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a JSON text file", hint="report reads the files of --results") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise InputError(f"{path}: not valid JSON at {where}: {error.msg}; the file may be cut off") from None
    except RecursionError:
        raise InputError(f"{path}: not a result file: nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"{path}: not a result file: {str(error)[:80]}") from None
    if not isinstance(doc, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(doc).__name__}")
    return doc


def check_keys(obj: dict, types: dict[str, tuple[type, bool]], at: str) -> None:
    """InputError unless `obj` has exactly the keys of `types`: key -> (type, may be None). `at` says where it is."""
    for key, (kind, optional) in types.items():
        if key not in obj:
            raise InputError(f"{at}: {key!r} is missing")
        value = obj[key]
        if value is None and optional:
            continue
        if not is_kind(value, kind):
            raise InputError(f"{at}: {key}: expected {_KIND_NAMES[kind]}, found {_found(value)}")
    extra = sorted(set(obj) - set(types))
    if extra:
        raise InputError(f"{at}: unknown key {extra[0]!r}", hint="was it written by another version of coldkv?")


def is_kind(value, kind: type) -> bool:
    """Whether `value` is of `kind`: a bool is no number, an int also serves as float, floats are finite."""
    if isinstance(value, bool):
        return False
    if kind is float:
        kind = int if isinstance(value, int) else float
    if kind is float:
        return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, kind) and (kind is not int or abs(value) < INT_LIMIT)


def _found(value) -> str:
    if value is None:
        return "null"
    return repr(value)[:60] if isinstance(value, (str, int, float)) else type(value).__name__


def plain(value):
    """Python's own types: numpy scalars unwrapped, NaN and infinities to None, tuples to lists."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def json_lines(items: list[dict]) -> str:
    """A JSON list with one item per line, so that two files diff well."""
    if not items:
        return "[]"
    return "[\n  " + ",\n  ".join(json.dumps(item, allow_nan=False) for item in items) + "\n ]"
