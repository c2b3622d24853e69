"""`coldkv inspect`: what a dump, a pool or one slot holds, without torch."""

import json

import click

from coldkv.errors import InputError
from coldkv.geometry import Geometry


@click.command("inspect")
@click.argument("file", metavar="FILE", required=False)
@click.option("--sample", is_flag=True, help="The bundled sample dump.")
@click.option("--slot", "slot_name", metavar="LAYER:PLANE:PAGE:HEAD", help="One slot of a pool, e.g. 3:k:17:0.")
@click.option("--page-tokens", type=int, default=64, show_default=True, help="Tokens per page of a raw slot file.")
@click.option("--head-dim", type=int, default=256, show_default=True, help="Channels per head of a raw slot file.")
@click.option("--codec", metavar="ID", help="Codec of a raw slot file.  [default: by its header]")
@click.option("--plane-format", metavar="FORMAT", help="Hot format it was packed from: iso3 has its own alphabet.")
@click.option("--hex", "as_hex", is_flag=True, help="Every byte of a slot with its token and channels.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(file, sample, slot_name, page_tokens, head_dim, codec, plane_format, as_hex, as_json) -> None:
    """Show what is in FILE.

    A dump: layers, shapes, dtypes, metadata. A pool (.ckv): codecs, strides, counts, policy; with --slot one slot.
    One slot (a file that starts with its magic): header fields, codes and scales, byte by byte.
    """
    if bool(file) == sample:
        raise InputError("inspect: expected a FILE or --sample, found " + ("both" if file else "neither"))
    if sample:
        from coldkv.dumps.sample import sample_path

        file = str(sample_path())
    from coldkv.safetensors_stream import open_regular

    with open(open_regular(file, "file")[0], "rb") as stream:
        start = stream.read(4)
    from coldkv.inspection.slot import begins_slot, read_slot_file

    if begins_slot(start) or file.endswith(".slot"):
        geometry = Geometry(head_dim, page_tokens)
        from coldkv.codecs import parse_codec

        named = parse_codec(codec) if codec else None
        return _show_slot(read_slot_file(file, geometry), geometry, named, plane_format, as_hex, as_json)
    if not start:
        raise InputError(f"{file}: the file is empty")
    from coldkv.pool.file import looks_like_pool

    if file.endswith(".ckv") or looks_like_pool(file):
        return _show_pool(file, slot_name, as_hex, as_json)
    from coldkv.dumps import open_dump
    from coldkv.inspection import dump

    if slot_name or as_hex:
        raise InputError(f"{file}: --slot and --hex look into pools and raw slots, this is a dump")
    with open_dump(file) as opened:
        found = dump.describe(opened)
    click.echo(json.dumps(found, indent=1) if as_json else dump.render(found))


def _show_pool(file, slot_name, as_hex, as_json) -> None:
    from coldkv.inspection import pool
    from coldkv.pool.info import read_pool_info, read_slot_record

    if slot_name:
        found = read_slot_record(file, *_parse_slot_name(slot_name))
        for problem in found.problems:
            click.echo(f"warning: slot {slot_name}: {problem}", err=True)
        return _show_slot(found.record, found.geometry, found.codec, found.plane_format, as_hex, as_json)
    if as_hex:
        raise InputError(f"{file}: --hex shows one slot; name it with --slot")
    found = read_pool_info(file)
    click.echo(json.dumps(found, indent=1) if as_json else pool.render(found))


def _parse_slot_name(text: str) -> tuple[int, str, int, int]:
    parts = text.split(":")
    if len(parts) != 4 or not all(parts[i].isascii() and parts[i].isdigit() and len(parts[i]) < 10 for i in (0, 2, 3)):
        raise InputError(f"--slot {text}: expected LAYER:PLANE:PAGE:HEAD such as 3:k:17:0")
    return int(parts[0]), parts[1], int(parts[2]), int(parts[3])


def _show_slot(record, geometry, codec, plane_format, as_hex, as_json) -> None:
    from coldkv.inspection import slot

    found = slot.describe(record, geometry, codec=codec, fmt=plane_format)
    if as_json:
        click.echo(json.dumps(found, indent=1, allow_nan=False))
    else:
        click.echo(slot.hex_dump(record, geometry, places="codes" in found) if as_hex else slot.render(found))
