"""What a KV dump holds, from its header alone."""

from coldkv.dumps import Dump


def describe(dump: Dump) -> dict:
    """Layers, shapes, dtypes and metadata as JSON types; no values are read. `bytes` counts K and V as stored."""
    layers = []
    for layer in dump.layers:
        planes = {
            name: {"tensor": plane.name, "dtype": plane.dtype, "bytes": plane.nbytes}
            for name, plane in layer.planes.items()
        }
        layers.append(
            {
                "layer": layer.index,
                "kind": layer.kind,
                "window": layer.window,
                "tokens": layer.tokens,
                "pages": layer.tokens // dump.page_tokens,
                "partial_tokens": layer.tokens % dump.page_tokens,
                "kv_heads": layer.kv_heads,
                "head_dim": layer.head_dim,
                "queries": layer.has_queries,
                "planes": planes,
            }
        )
    return {
        "kind": "dump",
        "path": dump.path,
        "format": dump.format,
        "page_tokens": dump.page_tokens,
        "bytes": sum(plane["bytes"] for layer in layers for plane in layer["planes"].values()),
        "layers": layers,
        "metadata": dump.meta,
    }


def render(dump: dict) -> str:
    """`describe`'s result as text; layers of equal shape share a line."""
    from coldkv.layers import format_layers

    lines = [
        f"{dump['path']}: KV dump ({dump['format']}), {len(dump['layers'])} layers with KV, {dump['bytes']:,} bytes",
        f"pages of {dump['page_tokens']} tokens",
        "",
        "  layers            kind      tokens  pages  partial  heads  head_dim  queries  dtype",
    ]
    groups: dict[tuple, list[int]] = {}
    for layer in dump["layers"]:
        kind = f"{layer['kind']} {layer['window']}" if layer["window"] else layer["kind"]
        dtype = " ".join(f"{name}:{plane['dtype']}" for name, plane in layer["planes"].items())
        shape = [layer[key] for key in ("tokens", "pages", "partial_tokens", "kv_heads", "head_dim")]
        queries = "yes" if layer["queries"] else "no"
        groups.setdefault((kind, *shape, queries, dtype), []).append(layer["layer"])
    for (kind, tokens, pages, partial, heads, head_dim, queries, dtype), members in groups.items():
        names = format_layers(members)
        lines.append(
            f"  {names:<16}  {kind:<8}  {tokens:>6}  {pages:>5}  {partial:>7}  {heads:>5}  {head_dim:>8}  {queries:>7}"
            f"  {dtype}"
        )
    shown = {key: value for key, value in dump["metadata"].items() if key != "attention"}  # its gist is in the table
    if shown:
        lines += ["", "metadata", *_flat(shown, "  ")]
    return "\n".join(lines)


def _flat(value: dict, indent: str) -> list[str]:
    lines = []
    for key, item in value.items():
        if isinstance(item, dict) and item:
            lines += [f"{indent}{key}:", *_flat(item, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {item}")
    return lines
