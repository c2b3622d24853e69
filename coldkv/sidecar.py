"""Geometry files: a small JSON of our own or a Hugging Face `config.json`, for dumps that carry no shapes."""

import json
from pathlib import Path

from coldkv.errors import InputError
from coldkv.geometry import Geometry


def read_geometry(path: str) -> Geometry:
    """`{"head_dim", "kv_heads", "page_tokens"}` or a config.json (also one with a nested `text_config`) -> Geometry.

    page_tokens defaults to 64. Raises InputError naming the file and the key.
    """
    where = f"geometry {path}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{where}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{where}: expected a JSON object, found {type(content).__name__}")
    content = content.get("text_config", content)

    def number(*keys: str) -> int | None:
        for key in keys:
            value = content.get(key)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise InputError(f"{where}: {key}: expected a whole number, found {value!r}")
                return value
        return None

    heads = number("kv_heads", "num_key_value_heads", "num_attention_heads")
    head_dim = number("head_dim")
    if head_dim is None:
        hidden, attention_heads = number("hidden_size"), number("num_attention_heads")
        head_dim = hidden // attention_heads if hidden and attention_heads else None
    if heads is None or head_dim is None:
        missing = "kv_heads or num_key_value_heads" if heads is None else "head_dim"
        raise InputError(f"{where}: expected {missing}, found keys {', '.join(sorted(map(str, content))[:8])}")
    try:
        return Geometry(head_dim, number("page_tokens") or 64, heads)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
