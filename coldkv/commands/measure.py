"""`coldkv measure`: dumps through hot tiers and codecs, into result rows and a summary."""

import sys
from contextlib import ExitStack

import click

from coldkv.atomic import check_output
from coldkv.errors import InputError
from coldkv.options import (
    backend_option,
    center_option,
    dump_options,
    dump_paths,
    opened_dump,
    resolve_codecs,
    resolve_table,
    tier_options,
)


@click.command("measure")
@click.argument("dumps", nargs=-1, metavar="DUMP...")
@tier_options
@click.option(
    "--codec", "codecs", multiple=True, metavar="ID[:KEY=VALUE,...]", help="Codec; repeatable. [default: all that fit]"
)
@center_option
@backend_option
@dump_options
@click.option("--results", metavar="FILE", help="Write the result file here.")
@click.option("--json", "as_json", is_flag=True, help="Print the result document instead of the tables.")
def command(
    dumps, table, tier, codecs, center_k, backend, sample, layers, geometry, page_tokens, nan, results, as_json
) -> None:
    """Measure codecs on KV dumps: real bytes and distortion.

    Every whole page of every layer goes through its hot tier, each codec and back. Tokens of a last partial page stay
    hot and are counted apart.
    """
    from coldkv.layers import select_layers
    from coldkv.table import assign

    paths = dump_paths(dumps, sample)
    if results:
        check_output(results, *paths.values(), table, geometry)
    chosen_table = resolve_table(table, tier)
    wanted = resolve_codecs(codecs, center_k)
    with ExitStack() as stack:
        opened = {name: stack.enter_context(opened_dump(path, geometry, page_tokens)) for name, path in paths.items()}
        assignments = {}
        for name, dump in opened.items():
            existing = [layer.index for layer in dump.layers]
            selected = select_layers(layers, existing, f"dump {dump.path}")
            assignments[name] = assign(chosen_table, existing, selected=selected)
        _check_one_mode(assignments)
        for note in dict.fromkeys(note for assignment in assignments.values() for note in assignment.notes):
            click.echo(f"note: {note}", err=True)
        doc = _measure(opened, assignments, wanted, backend, nan)
    if results:
        from coldkv.results import write_results

        write_results(results, doc)
    if as_json:
        from coldkv.results import dumps as as_text

        click.echo(as_text(doc), nl=False)
    else:
        _show(doc, results or "measure")


def _check_one_mode(assignments) -> None:
    modes = {assignment.mode for assignment in assignments.values()}
    if len(modes) > 1:
        raise InputError(
            "dumps: expected the table to apply to all of them alike, found "
            + ", ".join(f"{name}: by {assignment.mode}" for name, assignment in assignments.items()),
            hint="measure them one by one",
        )


def _measure(opened, assignments, wanted, backend_name, nan) -> dict:
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from coldkv import results
    from coldkv.backends import get_backend
    from coldkv.measure import choose_codecs, measure, plan
    from coldkv.progress import progress

    chosen = choose_codecs(wanted, list(assignments.values()))
    backend = get_backend(backend_name, threads=1)
    tasks = [task for name, dump in opened.items() for task in plan(dump, name, assignments[name], chosen)]
    with ThreadPoolExecutor(1) as hashing:
        digests = {name: hashing.submit(dump.sha256) for name, dump in opened.items()}
        with progress("measuring", sum(task.nbytes for task in tasks)) as advance:
            rows, layers = measure(tasks, backend, nan=nan, advance=advance)
        hashes = {name: digest.result() for name, digest in digests.items()}
    tier_layers: dict[str, int] = {}
    for assignment in assignments.values():
        for tier, count in assignment.tier_layers.items():
            repeat = assignment.mode == "tiers"
            tier_layers[tier] = count if repeat else tier_layers.get(tier, 0) + count
    first = next(iter(assignments.values()))
    run = results.run_header(
        backend=backend.name,
        device=str(backend.device),
        torch_version=torch.__version__,
        argv=sys.argv[1:],
        dump_sha256=hashes,
        table={"name": first.name, "mode": first.mode, "tier_layers": tier_layers},
        layers=layers,
    )
    return results.document(run, rows)


def _show(doc, name) -> None:
    from coldkv.report import render, sections
    from coldkv.report.load import ResultFile

    page = sections.page(ResultFile(name, "results", doc), with_rows=False)
    if sys.stdout is not None and sys.stdout.isatty():
        render.rich_tables([page])
    else:
        click.echo(render.plain([page]))
