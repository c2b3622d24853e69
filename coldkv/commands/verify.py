"""`coldkv verify`: find damage in a pool file, or differences from its dump."""

import json
import os

import click

from coldkv.errors import GateFailure
from coldkv.options import backend_option


@click.command("verify")
@click.argument("pool", metavar="POOL")
@click.option("--against", metavar="DUMP", help="Encode this dump again and compare every slot bit by bit.")
@backend_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(pool, against, backend, as_json) -> None:
    """Check POOL: checksums, slot headers, block tables.

    Every problem is named with layer, plane, page and head; exit code 1 if there is any. --backend matters for
    --against only.
    """
    from coldkv.pool.verify import verify
    from coldkv.progress import progress

    size = os.path.getsize(pool) if os.path.isfile(pool) else 0
    with progress("verifying", size * 2) as advance:
        report = verify(pool, advance=advance)
    compared = None
    if against and report.ok:
        compared = _compare(pool, against, backend)
        report.problems += compared.problems
    elif against:
        click.echo(f"note: {pool}: damaged, so it was not compared with {against}", err=True)
    for line in compared.warnings if compared else ():
        click.echo(f"note: {line}", err=True)
    click.echo(json.dumps(_document(report, compared, against), indent=1) if as_json else _text(report, compared))
    if report.problems:
        raise GateFailure(f"pool {pool}: {len(report.problems)} problems, first: {report.problems[0]}")


def _compare(pool, against, backend):
    from coldkv.backends import get_backend
    from coldkv.dumps import open_dump
    from coldkv.pool.against import compare
    from coldkv.pool.file import PoolFile
    from coldkv.progress import progress

    with PoolFile(pool) as opened, open_dump(against) as dump:
        dump.page_tokens = opened.layers[0].geometry.page_tokens
        chosen = {layout.index for layout in opened.layers}
        total = sum(s.nbytes for layer in dump.layers if layer.index in chosen for s in layer.planes.values())
        with progress("comparing", total) as advance:
            return compare(opened, dump, get_backend(backend), advance=advance)


def _document(report, compared, against) -> dict:
    document = {
        "schema": "coldkv.verify/1",
        "pool": report.path,
        "ok": report.ok,
        "file_bytes": report.file_bytes,
        "tensors": report.tensors,
        "slot_records": report.slot_records,
        "hot_records": report.hot_records,
        "problems": [problem.to_json() for problem in report.problems],
    }
    if compared:
        document["against"] = {
            "dump": against,
            "same_file": not compared.warnings,
            "slot_records": compared.slot_records,
            "hot_records": compared.hot_records,
            "layers": compared.layers,
        }
    return document


def _text(report, compared) -> str:
    lines = [str(problem) for problem in report.problems]
    if compared:
        lines.append(f"{'layer':>6} {'tier':<6} {'cold':>6}  " + "  ".join(f"{p} nmse_hot  {p} nmse_ref" for p in "kv"))
        lines += [_layer_line(layer) for layer in compared.layers]
    done = f"{report.tensors} tensors, {report.slot_records} slot records, {report.hot_records} hot head-pages"
    verdict = "ok" if report.ok else f"{len(report.problems)} problems"
    same = ", every slot as encoded from the dump" if compared and report.ok else ""
    lines.append(f"{report.path}: {verdict} ({done}{same})")
    return "\n".join(lines)


def _layer_line(layer: dict) -> str:
    figures = [
        "-" if plane[key] is None or not layer["cold_pages"] else f"{plane[key]:.6f}"
        for plane in layer["planes"].values()
        for key in ("nmse_hot", "nmse_ref")
    ]
    return f"{layer['layer']:>6} {layer['tier']:<6} {layer['cold_pages']:>6}  " + "  ".join(f"{f:>10}" for f in figures)
