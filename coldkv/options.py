"""Command-line options that several commands share, and what they resolve to. Imports click only at module level."""

from contextlib import contextmanager
from pathlib import Path

import click

from coldkv.errors import InputError

BACKENDS = ("auto", "cuda", "cpu", "torch")


def _stack(*options):
    def decorate(function):
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


tier_options = _stack(
    click.option("--table", help="Layer dtype table: a preset, 0-3:fp8,4-35:nvfp4, or a .toml/.json file."),
    click.option("--tier", help="One tier for every layer (bf16, fp16, int8, fp8, nvfp4, iso3). [default: int8]"),
)
backend_option = click.option(
    "--backend", type=click.Choice(BACKENDS), default="auto", show_default=True, help="Where the codecs run."
)
SLOT_CODEC = "e2m1-g16"  # what goes into slots where no codec is named
slot_codec_option = click.option(
    "--codec",
    "codecs",
    multiple=True,
    metavar="ID",
    help=f"Codec; repeatable: each plane takes the first that fits. [default: {SLOT_CODEC}]",
)
policy_options = _stack(
    click.option(
        "--cold-keep-tokens",
        type=click.IntRange(min=0),
        default=128,
        show_default=True,
        help="The last tokens that stay hot.",
    ),
    click.option(
        "--cold-sink-tokens",
        type=click.IntRange(min=0),
        default=64,
        show_default=True,
        help="The first tokens that stay hot, rounded up to whole pages.",
    ),
    click.option(
        "--cold-host-bytes",
        default="4g",
        show_default=True,
        metavar="N[k|m|g]",
        help="Budget of replicas (policy host).",
    ),
)
dump_options = _stack(
    click.option("--sample", is_flag=True, help="Use the bundled sample dump."),
    click.option("--layers", help="Only these layers, e.g. 0,3-7."),
    click.option("--geometry", metavar="FILE", help="Head sizes for the dump: JSON or a config.json."),
    click.option("--page-tokens", type=click.IntRange(1, 4096), help="Tokens per page. [default: the dump's, or 64]"),
    click.option(
        "--nan",
        type=click.Choice(("reject", "zero")),
        default="reject",
        show_default=True,
        help="What to do with NaN and Inf.",
    ),
)


def resolve_table(table: str | None, tier: str | None):
    """`--table` or `--tier`, not both; int8 everywhere by default."""
    from coldkv.table import parse_table, uniform_table

    if table and tier:
        raise InputError("--table and --tier: expected one of them, found both")
    return parse_table(table) if table else uniform_table(tier or "int8")


center_option = click.option(
    "--center-k", metavar="FILE", help="Calibration whose K means the raw codecs take out (coldkv tune)."
)


def resolve_codecs(texts: tuple[str, ...], center_k: str | None = None, default: tuple[str, ...] = ()):
    """Codecs named by `--codec` (else `default`), in that order and without repetition; None if there are none.

    With `--center-k` those with raw slots take the means of that calibration out of K; without any codec named, every
    codec that can.
    """
    from coldkv.codecs import all_codecs, parse_codec

    if center_k is not None and not texts:
        texts = default or tuple(codec.id for codec in all_codecs() if codec.raw_slot and codec.fits("bf16"))
    codecs = {}
    for text in texts:
        codec = parse_codec(text)
        if center_k is not None and codec.raw_slot and codec.fits("bf16") and codec.inner is None:
            codec = parse_codec(f"{text}{',' if ':' in text else ':'}center_k={center_k}")
        if codec.label in codecs:
            raise InputError(f"--codec {text}: codec {codec.label} is named twice")
        codecs[codec.label] = codec
    return list(codecs.values()) or None


@contextmanager
def opened_dump(path: str, geometry: str | None, page_tokens: int | None):
    """A dump with the page size from `--page-tokens`, else the geometry file's, else its own."""
    from coldkv.dumps import open_dump
    from coldkv.sidecar import read_geometry

    sizes = read_geometry(geometry) if geometry else None
    with open_dump(path, geometry=sizes) as dump:
        if page_tokens:
            dump.page_tokens = page_tokens
        yield dump


def dump_paths(paths: tuple[str, ...], sample: bool) -> dict[str, str]:
    """Name in the results -> path: file names, or whole paths where two files have the same name."""
    from coldkv.dumps.sample import sample_path

    if sample and paths:
        raise InputError("--sample: expected no DUMP beside it")
    if sample:
        return {"sample": str(sample_path())}
    if not paths:
        raise InputError("no dump given", hint="name a file, or use --sample")
    if len(set(paths)) != len(paths):
        raise InputError(f"dump {next(p for p in paths if paths.count(p) > 1)}: named twice")
    names = [Path(path).name for path in paths]
    return {(name if names.count(name) == 1 else path): path for name, path in zip(names, paths, strict=True)}
