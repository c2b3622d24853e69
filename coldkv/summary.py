"""From rows to one line per codec, and the seed's claims beside what was measured. Pure Python, no I/O.

How layers are weighted follows from the table's mode. "layers" and "uniform": every layer and plane in run.layers
counts once, with its real bytes. "tiers" (a preset made for another number of layers): each tier was measured over all
of the dump's layers, and counts as often as the table has layers of that tier. A plane without a row for a codec stays
hot: its hot bytes count on both sides of the aggregate, and it adds nothing to the error.
"""

from collections import defaultdict

SEED_TABLE = "seed-10-6"
SEED_CODEC = "e2m1-g64"

# What the seed says of its raw slot, and what arithmetic gives for 64 x 256 head-pages.
NMSE_CLAIM = "0.012-0.014"
NMSE_LIMIT = 0.014
PAGE_RATIO_CLAIM = "1.85-1.99x"
PAGE_RATIO_LIMIT = 1.85
PAGE_RATIO_ARITHMETIC = "16,896 / 9,232 = 1.830x"
AGGREGATE_CLAIM = "~1.66x"
AGGREGATE_LIMIT = 1.655
AGGREGATE_ARITHMETIC = "193,536 / (6 x 9,232 + 10 x 9,216) = 1.312x"

_MEANS = ("nmse_hot", "nmse_ref", "nmse_centered")


def build_summary(rows: list[dict], run: dict) -> dict:
    """{"codecs": [...], "tiers": [...], "claims": [...]}, codecs in order of first appearance.

    `tiers` has the same figures as `codecs` for each codec and tier apart, without those that need the whole table.
    Bytes are rounded to whole bytes.
    """
    weight = layer_weights(run)
    codecs = [codec_summary(codec, rows, run) for codec in dict.fromkeys(row["codec"] for row in rows)]
    tiers = []
    for codec, tier in dict.fromkeys((row["codec"], row["tier"]) for row in rows):
        own = [row for row in rows if row["codec"] == codec and row["tier"] == tier]
        tiers.append({"codec": codec, "tier": tier} | _packed(own, weight))
    return {"codecs": codecs, "tiers": tiers, "claims": claims(codecs, rows, run)}


def layer_weights(run: dict) -> dict[str, float]:
    """How often one measured layer of a tier counts: 1, or the table's count over the layers measured."""
    measured = defaultdict(set)
    for entry in run["layers"]:
        measured[entry["tier"]].add((entry["dump"], entry["layer"]))
    if run["table"]["mode"] != "tiers":
        return dict.fromkeys(measured, 1.0)
    return {tier: run["table"]["tier_layers"][tier] / len(layers) for tier, layers in measured.items()}


def codec_summary(codec: str, rows: list[dict], run: dict) -> dict:
    """One codec over the whole table.

    pages: head-pages packed. hot_bytes, cold_bytes, aggregate_ratio: the whole table, planes left hot on both sides.
    page_ratio, bits_per_element: over packed planes alone. nmse_*: element-weighted means over packed planes;
    logit_rmse: the same kind of mean of squares over K planes, in nats. left_hot: "tier" or "tier:plane", sorted.
    """
    weight = layer_weights(run)
    own = [row for row in rows if row["codec"] == codec]
    packed: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for row in own:
        total = packed[row["dump"], row["layer"], row["tier"], row["plane"]]
        total[0] += row["hot_bytes"]
        total[1] += row["cold_bytes"]

    hot = cold = 0.0
    hot_planes: dict[str, set[str]] = defaultdict(set)
    all_planes: dict[str, set[str]] = defaultdict(set)
    for entry in run["layers"]:
        tier, plane = entry["tier"], entry["plane"]
        all_planes[tier].add(plane)
        key = (entry["dump"], entry["layer"], tier, plane)
        if key not in packed:
            hot_planes[tier].add(plane)
        row_hot, row_cold = packed.get(key, (0, 0))
        hot += weight[tier] * entry["hot_bytes"]
        cold += weight[tier] * (entry["hot_bytes"] - row_hot + row_cold)

    left_hot = [
        name
        for tier, planes in hot_planes.items()
        for name in ([tier] if planes == all_planes[tier] else [f"{tier}:{plane}" for plane in planes])
    ]
    return {
        "codec": codec,
        "hot_bytes": round(hot),
        "cold_bytes": round(cold),
        "aggregate_ratio": _divide(hot, cold),
        "left_hot": sorted(left_hot),
    } | _packed(own, weight)


def _packed(own: list[dict], weight: dict[str, float]) -> dict:
    """The figures of rows that were packed: counts, bytes per page, errors."""
    out = {
        "pages": sum(row["pages"] for row in own),
        "invalid_pages": sum(row["invalid_pages"] for row in own),
        "page_ratio": _divide(_total(own, "hot_bytes", weight), _total(own, "cold_bytes", weight)),
        "bits_per_element": _divide(8 * _total(own, "cold_bytes", weight), _total(own, "elements", weight)),
    }
    for metric in _MEANS:
        for plane in ("k", "v"):
            out[f"{metric}_{plane}"] = _mean([row for row in own if row["plane"] == plane], metric, weight)
        out[metric] = _mean(own, metric, weight)
    squares = [row | {"logit_rmse": row["logit_rmse"] ** 2} for row in own if row["logit_rmse"] is not None]
    mean_square = _mean(squares, "logit_rmse", weight)
    out["logit_rmse"] = None if mean_square is None else mean_square**0.5
    out["attn_out_nmse"] = _mean(own, "attn_out_nmse", weight)
    return out


def claims(codecs: list[dict], rows: list[dict], run: dict) -> list[dict]:
    """The seed's figures beside the measured ones: [{claim, claimed, arithmetic, measured, codec, holds}], by claim.

    `holds` is None where this run cannot tell: no int8 planes for the first two, another table for the aggregate. The
    NMSE claim is read as "at most 0.014", the ratios as "at least the lower end".
    """
    weight = layer_weights(run)
    out = []

    def add(codec: str, claim: str, claimed: str, arithmetic: str | None, measured: float | None, holds: bool | None):
        names = ("claim", "claimed", "arithmetic", "measured", "codec", "holds")
        out.append(dict(zip(names, (claim, claimed, arithmetic, measured, codec, holds), strict=True)))

    for entry in codecs:
        codec = entry["codec"]
        own = [row for row in rows if row["codec"] == codec and row["tier"] == "int8"]
        for plane in ("k", "v"):
            # a plane all of whose pages stayed hot has no error, and shows nothing
            packed = [row for row in own if row["plane"] == plane and row["invalid_pages"] < row["pages"]]
            nmse = _mean(packed, "nmse_hot", weight)
            holds = None if nmse is None else nmse <= NMSE_LIMIT
            add(codec, f"NMSE of {plane.upper()}, int8 tier", NMSE_CLAIM, None, nmse, holds)
        ratio = _divide(_total(own, "hot_bytes", weight), _total(own, "cold_bytes", weight))
        holds = None if ratio is None else ratio >= PAGE_RATIO_LIMIT
        add(codec, "ratio per head-page, int8 tier", PAGE_RATIO_CLAIM, PAGE_RATIO_ARITHMETIC, ratio, holds)
        aggregate = entry["aggregate_ratio"] if run["table"]["name"] == SEED_TABLE else None
        holds = None if aggregate is None else aggregate >= AGGREGATE_LIMIT
        add(codec, f"aggregate on the {SEED_TABLE} table", AGGREGATE_CLAIM, AGGREGATE_ARITHMETIC, aggregate, holds)
    order = list(dict.fromkeys(entry["claim"] for entry in out))
    return sorted(out, key=lambda entry: (order.index(entry["claim"]), entry["codec"] != SEED_CODEC))


def _total(rows: list[dict], column: str, weight: dict[str, float]) -> float:
    return sum(weight[row["tier"]] * row[column] for row in rows)


def _mean(rows: list[dict], column: str, weight: dict[str, float]) -> float | None:
    """Mean of a column weighted by elements and by how often the row's tier counts; rows without a value stay out."""
    present = [row for row in rows if row[column] is not None]
    elements = _total(present, "elements", weight)
    return sum(weight[row["tier"]] * row["elements"] * row[column] for row in present) / elements if elements else None


def _divide(a: float, b: float) -> float | None:
    return a / b if b else None
