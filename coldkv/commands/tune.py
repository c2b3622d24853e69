"""`coldkv tune`: from a dump with queries to a calibration file for codec ecq."""

import sys

import click

from coldkv.atomic import check_output
from coldkv.errors import InputError
from coldkv.options import backend_option, dump_options, dump_paths, opened_dump, resolve_table, tier_options


@click.command("tune")
@click.argument("dump", required=False, metavar="DUMP")
@click.option("-o", "--output", required=True, metavar="FILE", help="Calibration file (.safetensors).")
@click.option("--ratio", "ratios", type=click.FloatRange(1.0), multiple=True, default=(5.0,), show_default=True,
              help="Budget: hot bytes of all pages over slot bytes. Repeatable: one file for each.")  # fmt: skip
@tier_options
@click.option("--cold-keep-tokens", type=click.IntRange(0), default=128, show_default=True,
              help="Keys this close to a query count as hot.")  # fmt: skip
@click.option("--cold-sink-tokens", type=click.IntRange(0), default=64, show_default=True,
              help="The first tokens, which count as hot.")  # fmt: skip
@backend_option
@dump_options
@click.option("--json", "as_json", is_flag=True, help="Print one document instead of the table.")
def command(
    dump, output, ratios, table, tier, cold_keep_tokens, cold_sink_tokens, backend, sample, layers, geometry,
    page_tokens, nan, as_json,
) -> None:  # fmt: skip
    """Calibrate codec ecq on a dump and choose its quality per layer and plane.

    The dump must hold queries (coldkv capture). For every layer: K's channel means, weights from the queries' energy,
    and, over a range of steps, slot bytes and how much attention outputs move. The steps written are those with the
    least total movement within the byte budget. Use the file with --codec ecq:calib=FILE, on any text of that model.
    """
    from coldkv.layers import select_layers
    from coldkv.table import assign

    paths = dump_paths((dump,) if dump else (), sample)
    (name, path), *_ = paths.items()
    if not output.endswith(".safetensors"):
        raise InputError(f"output {output}: expected a name ending in .safetensors")
    outputs = {ratio: _file_name(output, ratio, len(set(ratios)) > 1) for ratio in ratios}
    for file in outputs.values():
        check_output(file, path, table, geometry)
    chosen_table = resolve_table(table, tier)
    with opened_dump(path, geometry, page_tokens) as opened:
        existing = [layer.index for layer in opened.layers]
        assignment = assign(chosen_table, existing, selected=select_layers(layers, existing, f"dump {opened.path}"))
        reports = _tune(opened, name, assignment, outputs, cold_keep_tokens, cold_sink_tokens, backend, nan)
    if as_json:
        import json

        click.echo(json.dumps(reports, indent=1))
    else:
        for report in reports:
            _show(report)


def _file_name(output: str, ratio: float, several: bool) -> str:
    """`output`, with the ratio before its suffix where there are several."""
    return f"{output.removesuffix('.safetensors')}-{ratio:g}.safetensors" if several else output


def _tune(dump, name, assignment, outputs, keep, sink, backend_name, nan) -> list[dict]:
    from coldkv.backends import get_backend
    from coldkv.codecs.ecq import Ecq
    from coldkv.progress import progress
    from coldkv.tuning.run import choose, tune, write_calibration

    backend = get_backend(backend_name)
    total = sum(plane.nbytes for index, _ in assignment.pairs for plane in dump.layer(index).planes.values())
    with progress("tuning", total) as advance:
        planes = tune(dump, assignment, backend, keep=keep, sink=sink, codec=Ecq(), nan=nan, advance=advance)
    meta = {
        "model": dump.meta.get("model"),
        "dump": name,
        "dump_sha256": dump.sha256(),
        "text_sha256": dump.meta.get("text_sha256"),
        "page_tokens": dump.page_tokens,
        "tiers": {str(index): tier for index, tier in assignment.pairs},
        "keep_tokens": keep,
        "sink_tokens": sink,
    }
    choices = {ratio: choose(planes, ratio) for ratio in outputs}  # a budget that is too small fails before any write
    for ratio, chosen in choices.items():
        write_calibration(outputs[ratio], planes, chosen, meta={**meta, "ratio": ratio})
    return [_report(outputs[ratio], planes, chosen) for ratio, chosen in choices.items()]


def _report(output: str, planes, chosen) -> dict:
    rows = [
        {
            "layer": layer,
            "plane": plane,
            "step": point.step,
            "slot_bytes": point.cost / planes[layer, plane].head_pages,
            "ratio": planes[layer, plane].hot_bytes / point.cost,
            "attn_out_nmse": point.error,
        }
        for (layer, plane), point in chosen.items()
    ]
    hot = sum(planes[key].hot_bytes for key in chosen)
    cold = sum(point.cost for point in chosen.values())
    return {"output": output, "ratio": hot / cold, "hot_bytes": hot, "slot_bytes": cold, "rows": rows}


def _show(report: dict) -> None:
    click.echo(f"{'layer':>5} {'plane':>5} {'step':>5} {'slot B':>9} {'ratio':>7} {'attn out NMSE':>14}")
    for row in report["rows"]:
        click.echo(
            f"{row['layer']:>5} {row['plane']:>5} {row['step']:>5} {row['slot_bytes']:>9.0f} {row['ratio']:>7.3f} "
            f"{row['attn_out_nmse']:>14.3g}"
        )
    click.echo(
        f"ratio {report['ratio']:.3f} over {report['hot_bytes']} hot bytes; use: --codec ecq:calib={report['output']}"
    )
    if report["ratio"] < 1:
        print("coldkv: warning: the slots are larger than the hot planes", file=sys.stderr)
