"""`coldkv pack`: a dump into a pool file."""

import json

import click

from coldkv.atomic import check_output
from coldkv.errors import InputError
from coldkv.options import (
    SLOT_CODEC,
    backend_option,
    center_option,
    dump_options,
    dump_paths,
    opened_dump,
    policy_options,
    resolve_codecs,
    resolve_table,
    slot_codec_option,
    tier_options,
)


@click.command("pack")
@click.argument("dump", required=False, metavar="DUMP")
@click.option("-o", "--output", required=True, metavar="POOL", help="File to write (.ckv).")
@tier_options
@slot_codec_option
@center_option
@backend_option
@click.option(
    "--cold-policy",
    type=click.Choice(("none", "window", "host")),
    default="window",
    show_default=True,
    help="none: all hot. window: old pages go cold. host: that, with exact replicas of cold pages.",
)
@policy_options
@dump_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    dump, output, table, tier, codecs, center_k, backend, cold_policy, cold_keep_tokens, cold_sink_tokens,
    cold_host_bytes, sample, layers, geometry, page_tokens, nan, as_json,
) -> None:  # fmt: skip
    """Pack DUMP into a pool file.

    Every layer goes through its hot tier; the pages that the policy retires are encoded into slots, the others are kept
    as they are in the tier. `restore` makes a dump of the pool again.
    """
    from coldkv.pool.layout import POOL_SUFFIX
    from coldkv.pool.policy import Policy, parse_bytes

    policy = Policy(cold_policy, cold_keep_tokens, cold_sink_tokens, parse_bytes(cold_host_bytes))
    chosen_table = resolve_table(table, tier)
    wanted = resolve_codecs(codecs, center_k, (SLOT_CODEC,))
    (path,) = dump_paths((dump,) if dump else (), sample).values()
    if not output.endswith(POOL_SUFFIX):
        raise InputError(f"output {output}: expected a name ending in {POOL_SUFFIX}")
    check_output(output, path, table, geometry)

    from coldkv.layers import select_layers
    from coldkv.table import assign

    with opened_dump(path, geometry, page_tokens) as opened:
        existing = [layer.index for layer in opened.layers]
        selected = select_layers(layers, existing, f"dump {opened.path}")
        assignment = assign(chosen_table, existing, selected=selected)
        report, backend_name = _pack(opened, output, assignment, wanted, policy, backend, nan)
    notes = [] if assignment.mode == "tiers" else assignment.notes
    for line in [*notes, *report.warnings]:
        click.echo(f"note: {line}", err=True)
    if as_json:
        click.echo(json.dumps(_document(report, output, backend_name, policy, assignment), indent=1, allow_nan=False))
    else:
        click.echo("\n".join(_lines(report, output)))


def _pack(opened, output, assignment, wanted, policy, backend_name, nan):
    from coldkv.backends import get_backend
    from coldkv.codecs import get_codec
    from coldkv.pool.pack import pack
    from coldkv.progress import progress

    backend = get_backend(backend_name)
    codecs = wanted or [get_codec(SLOT_CODEC)]
    chosen = {index for index, _ in assignment.pairs}
    total = sum(s.nbytes for layer in opened.layers if layer.index in chosen for s in layer.planes.values())
    total *= 2 if any(codec.needs_stride for codec in codecs) else 1  # lengths first, where a stride is to be chosen
    with progress("packing", total) as advance:
        report = pack(
            opened, output, assignment, codecs, policy, backend, explicit=wanted is not None, nan=nan, advance=advance
        )
    return report, backend.name


def _document(report, output, backend_name, policy, assignment) -> dict:
    return {
        "schema": "coldkv.pack/1",
        "pool": output,
        "backend": backend_name,
        "table": assignment.name,
        "policy": policy.to_json(),
        "pages": report.counts,
        "replicas_missed": report.replicas_missed,
        "hot_bytes": report.hot_bytes,
        "cold_hot_bytes": report.cold_hot_bytes,
        "slot_bytes": report.slot_bytes,
        "replica_bytes": report.replica_bytes,
        "file_bytes": report.file_bytes,
        "layers": [
            {"layer": x.index, "tier": x.tier, "tokens": x.tokens, "pages": report.plans[x.index].counts,
             "slots": x.slots, "replicas": x.replica_pages,
             "codecs": {name: plane.codec.id if plane.codec else None for name, plane in x.planes.items()}}
            for x in report.layers
        ],
        "notes": report.warnings,
    }  # fmt: skip


REASONS = {
    "cold": "cold",
    "sink": "hot: first tokens",
    "recent": "hot: last tokens",
    "invalid": "hot: refused by the codec",
    "no_codec": "hot: codec does not fit",
    "policy_none": "hot: policy none",
}


def _lines(report, output) -> list[str]:
    total = sum(report.counts.values())
    lines = [f"{output}: {len(report.layers)} layers, {total} pages (one page of one layer each)"]
    lines += [f"  {REASONS[reason]:<26}{count:>10,}" for reason, count in report.counts.items()]
    if report.slot_bytes:
        ratio = report.cold_hot_bytes / report.slot_bytes
        sizes = f"{report.cold_hot_bytes:,} bytes hot -> {report.slot_bytes:,} bytes in slots"
        lines.append(f"cold pages: {sizes} ({ratio:.3f}x)")
    if report.replica_bytes or report.replicas_missed:
        lines.append(f"replicas: {report.replica_bytes:,} bytes; cold pages without one: {report.replicas_missed}")
    lines.append(f"whole dump: {report.hot_bytes:,} bytes hot -> file of {report.file_bytes:,} bytes")
    return lines
