"""`coldkv bench`: throughput of tiers and codecs beside a copy of the same bytes in the same run."""

import click

from coldkv.atomic import atomic_path, check_output


@click.command()
@click.option(
    "--codec", "codec_ids", multiple=True, metavar="ID[:KEY=VALUE,...]", help="Codec to time; repeatable. Default: all."
)
@click.option("--tier", default="int8", show_default=True, help="Hot tier of the pages.")
@click.option("--backend", default="auto", show_default=True, help="auto, cuda, cpu or torch.")
@click.option(
    "--threads",
    type=click.IntRange(0, 4096),
    default=1,
    show_default=True,
    help="Threads of the cpu backend, and of its memcpy; 0 = all.",
)
@click.option("--head-dim", default=256, show_default=True, help="Channels of one head.")
@click.option("--page-tokens", default=64, show_default=True, help="Tokens of one page.")
@click.option(
    "--head-pages",
    type=click.IntRange(1, 1 << 24),
    default=4096,
    show_default=True,
    help="Head-pages per call, past the caches.",
)
@click.option(
    "--repeat", type=click.IntRange(1, 10_000), default=7, show_default=True, help="Timed rounds; figures are medians."
)
@click.option("--entropy", is_flag=True, help="The coder of ecq against zstd -1 instead; needs the package zstandard.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--results", type=click.Path(dir_okay=False), help="Write the JSON document to FILE.")
def command(codec_ids, tier, backend, threads, head_dim, page_tokens, head_pages, repeat, entropy, as_json, results):
    """Time every operation of a tier and its codecs against memcpy, or on a GPU against the device's own copy.

    Bytes are those read plus those written, for the operation and for the copy alike. Operations and their copy take
    turns within a round, so that a busy machine slows both. On a GPU events on the stream are the clock, and several
    sets of buffers take turns, so that its cache does not hold what comes next. --entropy: one
    thread of the cpu backend, the same integers through the coder of ecq and through zstd level 1; at most 256
    head-pages.
    """
    if results:
        check_output(results)
    from coldkv.bench import dumps, print_table, run_bench, run_entropy_bench

    if entropy:
        document = run_entropy_bench(
            head_dim=head_dim, page_tokens=page_tokens, head_pages=min(head_pages, 256), repeat=repeat
        )
    else:
        document = run_bench(
            codec_ids=codec_ids, tier=tier, backend=backend, threads=threads, head_dim=head_dim,
            page_tokens=page_tokens, head_pages=head_pages, repeat=repeat,
        )  # fmt: skip
    if results:
        with atomic_path(results) as temporary:
            temporary.write_text(dumps(document), encoding="utf-8")
    if as_json:
        click.echo(dumps(document), nl=False)
    elif entropy:
        from coldkv.entropy_bench import print_rows

        print_rows(document["rows"])
    else:
        print_table(document)
