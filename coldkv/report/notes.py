"""What the figures do not say by themselves: how a table was applied, what stayed hot, where NMSE misleads."""

from collections import defaultdict
from dataclasses import dataclass

from coldkv.results import describe_row

BIASED_FACTOR = 4.0  # nmse_centered above this multiple of nmse_hot: most of the energy is the channels' mean
DESTROYED_NMSE = 0.1  # -10 dB: ten times what the coarsest codec here costs on sane data


@dataclass(frozen=True)
class Note:
    """`level` is "note" or "warning"; `text` one or two sentences."""

    level: str
    text: str


def notes(doc: dict) -> list[Note]:
    """All notes on one results document, in a fixed order."""
    rows, run = doc["rows"], doc["run"]
    found = [_table(run), *_left_hot(doc), _partial(run), *_larger_than_hot(rows), *_invalid(rows)]
    found += [_zeroed(run), *_destroyed(rows), *_biased(rows)]
    return [note for note in found if note]


def _table(run: dict) -> Note | None:
    table = run["table"]
    if table["mode"] != "tiers":
        return None
    layers = len({(entry["dump"], entry["layer"]) for entry in run["layers"]})
    counts = ", ".join(f"{tier} x{count}" for tier, count in table["tier_layers"].items())
    return Note(
        "note",
        f"table {table['name']} is for {sum(table['tier_layers'].values())} layers, measured were {layers}: each tier "
        f"was measured over all of them and weighted by the table's counts ({counts})",
    )


def _left_hot(doc: dict) -> list[Note]:
    counts = doc["run"]["table"]["tier_layers"]
    out = []
    for line in doc["summary"]["codecs"]:
        if not line["left_hot"]:
            continue
        names = []
        for name in line["left_hot"]:
            tier, _, plane = name.partition(":")
            layers = f"{counts[tier]} " if tier in counts else ""
            names.append(f"{plane.upper()} of {layers}{tier} layers" if plane else f"{layers}{tier} layers")
        text = f"{line['codec']} leaves {', '.join(names)} hot: they count with their hot bytes on both sides"
        out.append(Note("note", text))
    return out


def _partial(run: dict) -> Note | None:
    per_layer = {(entry["dump"], entry["layer"]): entry["partial_tokens"] for entry in run["layers"]}
    tokens = sorted(set(per_layer.values()) - {0})
    if not tokens:
        return None
    some = str(tokens[0]) if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]}"
    layers = sum(1 for value in per_layer.values() if value)
    return Note(
        "note", f"{some} tokens of a partial last page were not measured in {layers} layers: only whole pages go cold"
    )


def _larger_than_hot(rows: list[dict]) -> list[Note]:
    """Slots that are not smaller than what they replace; refused pages have none and are said apart."""
    totals: dict[tuple, list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in rows:
        total = totals[row["codec"], row["tier"], row["plane"]]
        hot_page = row["hot_bytes"] // row["pages"] if row["pages"] else 0
        total[0] += row["pages"] - row["invalid_pages"]
        total[1] += row["hot_bytes"] - row["invalid_pages"] * hot_page
        total[2] += row["cold_bytes"] - row["invalid_pages"] * hot_page
    planes: dict[tuple, list[str]] = defaultdict(list)
    for (codec, tier, plane), (pages, hot, cold) in totals.items():
        if pages and cold >= hot:
            planes[codec, tier, f"{cold / pages:,.0f}", f"{hot / pages:,.0f}"].append(plane.upper())
    return [
        Note(
            "warning",
            f"{codec} on {tier} {' and '.join(names)} takes {cold} bytes per head-page and replaces only {hot} "
            "hot bytes: leave these planes hot",
        )
        for (codec, tier, cold, hot), names in planes.items()
    ]


def _invalid(rows: list[dict]) -> list[Note]:
    found: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        found[row["codec"], row["tier"]].append(row)
    out = []
    for (codec, tier), own in found.items():
        bad = [row for row in own if row["invalid_pages"]]
        if bad:
            pages, total = (sum(row[column] for row in own) for column in ("invalid_pages", "pages"))
            text = f"{codec} on {tier}: {pages} of {total} head-pages could not be packed and stay hot"
            out.append(Note("warning", f"{text}, first in {describe_row(bad[0])}"))
    return out


def _zeroed(run: dict) -> Note | None:
    # several tiers read the same plane: count each plane once
    planes = {(e["dump"], e["layer"], e["plane"]): e.get("zeroed_values", 0) for e in run["layers"]}
    bad = [(name, count) for name, count in planes.items() if count]
    if not bad:
        return None
    dump, layer, plane = bad[0][0]
    total = sum(count for _, count in bad)
    return Note("warning", f"{total:,} NaN or Inf values were read as 0, first in {dump} layer {layer} plane {plane}")


def _destroyed(rows: list[dict]) -> list[Note]:
    out = []
    for metric, what in (("nmse_hot", "its hot tier"), ("nmse_ref", "the dump")):
        bad: dict[tuple, list[dict]] = defaultdict(list)
        for row in rows:
            worse_before = metric == "nmse_ref" and (row["nmse_hot"] or 0) > DESTROYED_NMSE
            if row[metric] is not None and row[metric] > DESTROYED_NMSE and not worse_before:
                bad[row["codec"], row["tier"], row["plane"]].append(row)
        for (codec, tier, plane), found in bad.items():
            worst = max(found, key=lambda row: row[metric])
            where = f"layer {worst['layer']} head {worst['head']}"
            text = (
                f"{codec} on {tier} {plane.upper()}: {metric} above {DESTROYED_NMSE} in {len(found)} heads (most in "
                f"{where}: {worst[metric]:.3g}): little of the plane is left against {what}"
            )
            out.append(Note("warning", text))
    return out


def _biased(rows: list[dict]) -> list[Note]:
    by_plane: dict[str, list[tuple[float, dict]]] = defaultdict(list)
    total: dict[str, set] = defaultdict(set)
    for row in rows:
        name = (row["dump"], row["layer"], row["head"])
        total[row["plane"]].add(name)
        hot, centered = row["nmse_hot"], row["nmse_centered"]
        if hot and centered is not None and centered > BIASED_FACTOR * hot:
            by_plane[row["plane"]].append((centered / hot, row))
    out = []
    for plane, found in sorted(by_plane.items()):
        factor, row = max(found, key=lambda pair: pair[0])
        heads = len({(row["dump"], row["layer"], row["head"]) for _, row in found})
        worst = f"layer {row['layer']} head {row['head']}"
        text = (
            f"biased {plane.upper()} in {heads} of {len(total[plane])} heads (most in {worst}: nmse_centered is "
            f"{factor:.3g}x nmse_hot): the channels' mean holds most of the energy and hides the error in nmse_hot; "
            "judge by nmse_centered and logit_rmse"
        )
        out.append(Note("warning", text))
    return out
