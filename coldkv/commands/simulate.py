"""`coldkv simulate`: a request trace through the live pool."""

import os
import tempfile
from contextlib import ExitStack

import click

from coldkv.atomic import atomic_path, check_output
from coldkv.options import (
    SLOT_CODEC,
    backend_option,
    policy_options,
    resolve_codecs,
    resolve_table,
    slot_codec_option,
    tier_options,
)

POLICIES = ("none", "window", "host")


@click.command("simulate")
@click.option("--trace", required=True, metavar="FILE", help="Mooncake JSONL, Azure CSV or our own JSONL.")
@tier_options
@slot_codec_option
@click.option("--device-bytes", required=True, metavar="N[k|m|g]", help="Device memory for pages and slots.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(POLICIES),
    help="Policy to compare with none; repeatable. [default: window]",
)
@policy_options
@click.option(
    "--max-cold-pages",
    type=click.IntRange(min=0),
    help="Slots, whatever they take of the device bytes. [default: by --cold-share]",
)
@click.option(
    "--cold-share",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.8,
    show_default=True,
    help="Share of the device bytes for slots.",
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Width of speculative decoding; the window must keep as many.",
)
@click.option(
    "--attention-layers",
    type=click.IntRange(1, 4096),
    help="Layers with KV, where the table does not say. [default: 16]",
)
@click.option("--kv-heads", type=click.IntRange(1, 1024), default=4, show_default=True, help="KV heads per layer.")
@click.option("--head-dim", type=click.IntRange(2, 1024), default=256, show_default=True, help="Channels of one head.")
@click.option("--page-tokens", type=click.IntRange(1, 4096), default=64, show_default=True, help="Tokens of one page.")
@click.option(
    "--prefill-rate",
    type=click.FloatRange(0, 1e9, min_open=True),
    default=8000.0,
    show_default=True,
    help="Prompt tokens per second of one sequence.",
)
@click.option(
    "--decode-rate",
    type=click.FloatRange(0, 1e6, min_open=True),
    default=20.0,
    show_default=True,
    help="Decode steps per second.",
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(1, 1 << 20),
    default=4096,
    show_default=True,
    help="Prompt tokens between two passes.",
)
@click.option(
    "--retain",
    is_flag=True,
    help="Finished sequences stay until their pages are needed, for prompts that start like theirs.",
)
@click.option(
    "--max-sequences",
    type=click.IntRange(1, 1 << 16),
    default=512,
    show_default=True,
    help="Rows of the block table, retained sequences included.",
)
@click.option(
    "--max-context",
    type=click.IntRange(1, 1 << 24),
    default=262144,
    show_default=True,
    help="Tokens of a sequence at most; longer requests are refused.",
)
@click.option("--requests", type=click.IntRange(min=1), help="Only the first N requests of the trace.")
@click.option(
    "--payload",
    default="none",
    show_default=True,
    metavar="none|synthetic|DUMP",
    help="Real bytes through real kernels, verified; with a DUMP its layers are the model.",
)
@backend_option
@click.option("--sweep", metavar="NAME=V,V,...", help="A run per value of keep, sink, cold-share or device-bytes.")
@click.option(
    "--sample-seconds",
    type=click.FloatRange(0, 1e9, min_open=True),
    default=10.0,
    show_default=True,
    help="Step of the time series, in seconds of the trace.",
)
@click.option("--csv", "series", metavar="FILE", help="Write the time series of all runs.")
@click.option("--plot", metavar="FILE", help="Draw them (.png or .svg); needs matplotlib.")
@click.option("--results", metavar="FILE", help="Write the JSON document to FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(**given) -> None:
    """Replay a request trace through the pool, without and with cold pages.

    Sequences are admitted in order of arrival when their pages are free, prefill in chunks and decode at the given
    rates; old pages go cold at every page of decode and every chunk of prefill. The first run has policy none and the
    same device bytes. Only memory is simulated: a sequence is as fast among many as alone.
    """
    from coldkv.pool.policy import Policy, parse_bytes
    from coldkv.simulation import runs
    from coldkv.simulation.engine import Rates
    from coldkv.simulation.series import check_plot
    from coldkv.simulation.traces import read_trace

    chosen_table = resolve_table(given["table"], given["tier"])
    codecs = resolve_codecs(given["codecs"], None, (SLOT_CODEC,))
    policy = Policy(
        "window", given["cold_keep_tokens"], given["cold_sink_tokens"], parse_bytes(given["cold_host_bytes"])
    )
    base = runs.Setup(
        policy, parse_bytes(given["device_bytes"]), given["cold_share"], given["max_cold_pages"],
        given["max_sequences"], -(-given["max_context"] // given["page_tokens"]), given["draft_tokens"],
    )  # fmt: skip
    sweep = runs.parse_sweep(given["sweep"]) if given["sweep"] else None
    chosen = runs.setups(base, given["policies"] or ("window",), sweep)
    for path in filter(None, (given["series"], given["plot"], given["results"])):
        check_output(path, given["trace"], given["table"], given["payload"])
    if given["plot"]:
        check_plot(given["plot"])
    rates = Rates(given["prefill_rate"], given["decode_rate"], given["chunk_tokens"], given["retain"])
    total = sum(1 for _ in read_trace(given["trace"], limit=given["requests"]))  # also finds what is wrong before
    model = _model(given, chosen_table, codecs)
    rows = _run(given, model, chosen, rates, total)
    run = {
        "trace": os.path.basename(given["trace"]), "requests": total, "table": chosen_table.name,
        "codecs": [codec.label for codec in model.codecs], "payload": _payload_name(given["payload"]),
        "backend": model.backend, "prefill_rate": rates.prefill, "decode_rate": rates.decode,
        "chunk_tokens": rates.chunk_tokens, "retain": rates.retain, "draft_tokens": base.draft_tokens,
        "layers": len(model.shape.layers), "kv_heads": model.shape.layers[0].geometry.kv_heads,
        "head_dim": model.shape.layers[0].geometry.head_dim, "page_tokens": model.shape.tokens_per_page,
        "strides": model.strides, "notes": model.notes,
    }  # fmt: skip
    document = runs.document(run, rows)
    _report(given, document)


def _payload_name(payload: str) -> str:
    return payload if payload in ("none", "synthetic") else os.path.basename(payload)


def _model(given, table, codecs):
    from coldkv.simulation.model import build_model

    return build_model(
        payload=given["payload"], table=table, codecs=codecs, default=SLOT_CODEC, backend=given["backend"],
        attention_layers=given["attention_layers"], kv_heads=given["kv_heads"], head_dim=given["head_dim"],
        page_tokens=given["page_tokens"],
    )  # fmt: skip


def _run(given, model, chosen, rates, total) -> list[dict]:
    from coldkv.progress import progress
    from coldkv.simulation import runs
    from coldkv.simulation.series import SeriesWriter, draw
    from coldkv.simulation.traces import read_trace

    with ExitStack() as stack:
        series = given["series"] and str(stack.enter_context(atomic_path(given["series"])))
        if given["plot"] and not series:
            series = os.path.join(stack.enter_context(tempfile.TemporaryDirectory()), "series.csv")
        on_sample = lambda number, sample: None  # noqa: E731
        file = None
        if series:
            file = stack.enter_context(open(series, "w", encoding="utf-8", newline=""))
            on_sample = SeriesWriter(file, [setup.policy.name for setup in chosen])
        advance = stack.enter_context(progress("simulating", total * len(chosen), unit="requests"))
        done = runs.run_all(
            chosen, model.shape, lambda: read_trace(given["trace"], limit=given["requests"]), total, rates,
            sample_s=given["sample_seconds"], on_sample=on_sample, make_content=model.make_content, advance=advance,
        )  # fmt: skip
        rows = [runs.row(setup, size, outcome, model.shape) for setup, size, outcome in done]
        if file:
            file.flush()
        if given["plot"]:
            draw(series, given["plot"], [runs.label(row, rows) for row in rows])
    return rows


def _report(given, document) -> None:
    from coldkv.bench import dumps
    from coldkv.simulation import runs

    text = dumps(document)
    if given["results"]:
        with atomic_path(given["results"]) as temporary:
            temporary.write_text(text, encoding="utf-8")
    for line in document["run"]["notes"]:
        click.echo(f"note: {line}", err=True)
    if given["as_json"]:
        click.echo(text, nl=False)
    else:
        click.echo("\n".join(runs.lines(document)))
