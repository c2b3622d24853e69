"""What a pool file holds, as text; the facts come from `coldkv.pool.info`."""


def render(pool: dict) -> str:
    """`read_pool_info`'s result as text; layers that are alike share a line."""
    from coldkv.layers import format_layers

    sizes, policy = pool["bytes"], pool["policy"] or {}
    used = ", ".join(f"{name} {count:,}" for name, count in sizes.items() if count)
    lines = [
        f"{pool['path']}: pool version {pool['version']}, {len(pool['layers'])} layers, {pool['file_bytes']:,} bytes",
        f"bytes: {used}",
    ]
    if sizes["slots"]:
        ratio = pool["hot_bytes_replaced"] / sizes["slots"]
        lines.append(f"slots replace {pool['hot_bytes_replaced']:,} hot bytes ({ratio:.3f}x)")
    lines += [
        "policy: " + ", ".join(f"{key} {value}" for key, value in policy.items()),
        "pages of single layers: " + ", ".join(f"{reason} {count}" for reason, count in (pool["pages"] or {}).items()),
        "",
        "  layers            tier    tokens  pages   cold    hot  replicas  heads  head_dim  slots",
    ]
    groups: dict[tuple, list[int]] = {}
    for layer in pool["layers"]:
        slots = " ".join(
            f"{name}:{plane['codec']['id']}/{plane['slot_bytes']}" if plane["codec"] else f"{name}:{plane['format']}"
            for name, plane in layer["planes"].items()
        )
        keys = ("tier", "tokens", "pages", "slots", "hot_pages", "replica_pages", "kv_heads", "head_dim")
        groups.setdefault((*(layer[key] for key in keys), slots), []).append(layer["layer"])
    for (tier, tokens, pages, cold, hot, replicas, heads, head_dim, slots), members in groups.items():
        lines.append(
            f"  {format_layers(members):<16}  {tier:<6}  {tokens:>6}  {pages:>5}  {cold:>5}  {hot:>5}  {replicas:>8}  "
            f"{heads:>5}  {head_dim:>8}  {slots}"
        )
    dump = pool["dump"]
    model = dump["meta"].get("model")
    lines += ["", f"packed from {dump.get('name')}" + (f", model {model}" if model else "")]
    return "\n".join(lines) + f"\n  sha256 {dump.get('sha256')}"
