"""`coldkv restore`: a pool file into a dump."""

import json

import click

from coldkv.atomic import check_output
from coldkv.options import backend_option


@click.command("restore")
@click.argument("pool", metavar="POOL")
@click.option("-o", "--output", required=True, metavar="DUMP", help="File to write (.safetensors).")
@click.option(
    "--dtype",
    type=click.Choice(("fp32", "bf16", "fp16")),
    default="fp32",
    show_default=True,
    help="Number format of the dump; fp32 holds every value exactly.",
)
@backend_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(pool, output, dtype, backend, as_json) -> None:
    """Restore POOL into a dump.

    The values are those that attention reads and `measure` evaluates: decoded slots for cold pages (the exact replica
    where the pool has one), the hot tier's values elsewhere. A damaged slot ends it, and nothing is written.
    """
    from coldkv.pool.file import PoolFile

    check_output(output, pool)
    with PoolFile(pool) as opened:
        from coldkv.backends import get_backend
        from coldkv.pool.restore import restore
        from coldkv.progress import progress

        total = sum(layout.pages * layout.hot_page_bytes() for layout in opened.layers)
        chosen = get_backend(backend)
        with progress("restoring", total) as advance:
            report = restore(opened, output, chosen, dtype=dtype, advance=advance)
    for line in report.warnings:
        click.echo(f"note: {line}", err=True)
    pages = {"slots": report.from_slots, "replicas": report.from_replicas, "hot": report.from_hot}
    if as_json:
        document = {
            "schema": "coldkv.restore/1",
            "pool": pool,
            "dump": output,
            "dtype": dtype,
            "backend": chosen.name,
            "layers": report.layers,
            "pages": pages,
            "inexact_values": report.inexact,
        }
        click.echo(json.dumps(document, indent=1))
    else:
        counts = ", ".join(f"{count} from {source}" for source, count in pages.items())
        click.echo(f"{output}: {report.layers} layers as {dtype}, pages: {counts}")
