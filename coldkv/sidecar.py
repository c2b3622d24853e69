"""Geometry files: a small JSON of our own or a Hugging Face `config.json`, for dumps that carry no shapes."""

from coldkv.errors import InputError
from coldkv.geometry import Geometry
from coldkv.jsontext import parse_json, read_small_file


def read_geometry(path: str) -> Geometry:
    """`{"head_dim", "kv_heads", "page_tokens"}` or a config.json (also one with a nested `text_config`) -> Geometry.

    page_tokens defaults to 64. Raises InputError naming the file and the key.
    """
    where = f"geometry {path}"
    content = parse_json(read_small_file(path, "geometry"), where)
    if not isinstance(content, dict):
        raise InputError(f"{where}: expected a JSON object, found {type(content).__name__}")
    nested = content.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise InputError(f"{where}: text_config: expected an object, found {type(nested).__name__}")
    content = nested or content

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
    page_tokens = 64 if (page := number("page_tokens")) is None else page
    try:
        return Geometry(head_dim, page_tokens, heads)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
