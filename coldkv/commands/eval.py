"""`coldkv eval`: a model's own predictions with cold pages in its cache, beside those without."""

import os
import sys
from pathlib import Path

import click

from coldkv.atomic import check_output
from coldkv.errors import InputError
from coldkv.options import backend_option, center_option, resolve_codecs, resolve_table, tier_options


@click.command("eval")
@click.option("--model", "model_path", required=True, metavar="DIR|GGUF", help="Local model folder or GGUF file.")
@click.option(
    "--text", "texts", required=True, multiple=True, metavar="FILE", help="UTF-8 text to predict; repeatable."
)
@click.option(
    "--codec", "codecs", multiple=True, metavar="ID[:KEY=VALUE,...]", help="Codec; repeatable. [default: all that fit]"
)
@center_option
@tier_options
@click.option(
    "--prefix", type=click.IntRange(1), default=2048, show_default=True, help="Tokens in the cache before the window."
)
@click.option("--window", type=click.IntRange(1), default=512, show_default=True, help="Tokens to predict after them.")
@click.option("--cold-keep-tokens", type=click.IntRange(0), default=128, show_default=True,
              help="Tokens at the end of the prefix that stay hot.")  # fmt: skip
@click.option("--cold-sink-tokens", type=click.IntRange(0), default=64, show_default=True,
              help="The first tokens that stay hot, rounded up to whole pages.")  # fmt: skip
@click.option("--layers", help="Only these layers go cold, e.g. 0,3-7. [default: all with KV]")
@click.option("--page-tokens", type=click.IntRange(1, 4096), default=64, show_default=True, help="Tokens per page.")
@click.option("--needle", is_flag=True, help="Also hide sentences in the cold pages and ask for them.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the needles.")
@click.option("--dtype", type=click.Choice(("fp32", "bf16")), default="fp32", show_default=True,
              help="What the model computes in.")  # fmt: skip
@backend_option
@click.option("--threads", type=click.IntRange(0, 4096), default=0, show_default=True, help="CPU threads; 0 = all.")
@click.option("--results", metavar="FILE", help="Write the result file here.")
@click.option("--json", "as_json", is_flag=True, help="Print the result document instead of the tables.")
def command(
    model_path, texts, codecs, center_k, table, tier, prefix, window, cold_keep_tokens, cold_sink_tokens, layers,
    page_tokens, needle, seed, dtype, backend, threads, results, as_json,
) -> None:  # fmt: skip
    """Evaluate codecs by what a model predicts once pages are cold.

    The model reads a prefix of each text once. Then, per codec, the cold pages of its cache - whole pages older than
    --cold-keep-tokens, after the sink, in every layer - go through hot tier, codec and real slots, and the window is
    predicted in one pass: perplexity, KL to the run without cold pages, top-1 agreement, and bits per element from
    the slots. Only cold pages are altered; hot pages and the window stay as the model computed them. The row "hot" is
    the hot tier alone. Sliding layers keep all tokens here, so that their old pages count too.

    Runs on the CPU. Nothing is downloaded. Needs the extra: pip install 'coldkv[capture]'.
    """
    # Set before transformers is imported: even a look for an optional file must not go to a network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from coldkv.layers import parse_layers
    from coldkv.pool.policy import Policy

    # Loading takes minutes: what can be refused is refused before.
    if results:
        check_output(results, model_path, table, *texts)
    chosen_table = resolve_table(table, tier)
    wanted = resolve_codecs(codecs, center_k)
    if layers:
        parse_layers(layers)
    policy = Policy("window", keep_tokens=cold_keep_tokens, sink_tokens=cold_sink_tokens)
    doc = _evaluate(
        model_path, _text_names(texts), chosen_table, wanted, backend, threads, dtype,
        {"prefix": prefix, "window": window, "page_tokens": page_tokens, "policy": policy, "layers": layers,
         "needle": needle, "seed": seed},
    )  # fmt: skip
    if results:
        from coldkv.evaluation.results import write_results

        write_results(results, doc)
    if as_json:
        from coldkv.evaluation.results import dumps

        click.echo(dumps(doc), nl=False)
    else:
        _show(doc, results or "eval")


def _text_names(paths: tuple[str, ...]) -> dict[str, str]:
    """Name in the results -> path: file names, or whole paths where two files have the same name."""
    if len(set(paths)) != len(paths):
        raise InputError(f"text {next(p for p in paths if paths.count(p) > 1)}: named twice")
    names = [Path(path).name for path in paths]
    return {(name if names.count(name) == 1 else path): path for name, path in zip(names, paths, strict=True)}


def _evaluate(model_path, texts, table, wanted, backend_name, threads, dtype, settings) -> dict:
    import torch

    from coldkv.backends import get_backend
    from coldkv.capture_run import read_text
    from coldkv.dumps.model import torch_dtype
    from coldkv.evaluation.results import document
    from coldkv.evaluation.run import Evaluation, Settings
    from coldkv.models import load_model, stderr_message

    read = {name: read_text(path) for name, path in texts.items()}
    same = {digest: name for name, (_, digest) in read.items()}
    for name, (_, digest) in read.items():
        if same[digest] != name:
            raise InputError(f"text {same[digest]}: has the same content as {name}; name it once")
    backend = get_backend(backend_name, threads=threads)
    threads_before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        loaded = load_model(model_path, message=stderr_message)
        loaded.model.to(torch_dtype(dtype))
        evaluation = Evaluation(loaded, table, wanted, Settings(**settings), backend, stderr_message)
        encoded = {name: evaluation.encode(name, text) for name, (text, _) in read.items()}
        rows = [row for name, ids in encoded.items() for row in evaluation.rows(name, ids)]
    finally:
        torch.set_num_threads(threads_before)
    return document(_run(loaded, read, backend, dtype, settings), rows)


def _run(loaded, read, backend, dtype, settings) -> dict:
    import time

    import torch
    import transformers

    from coldkv._version import __version__
    from coldkv.results import git_revision

    return {
        "version": __version__,
        "git": git_revision(),
        "backend": backend.name,
        "device": str(backend.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "compute_dtype": dtype,
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "argv": sys.argv[1:],
        "model_sha256": {loaded.name: loaded.weights_sha256},
        "text_sha256": {name: digest for name, (_, digest) in read.items()},
        "needle_seed": settings["seed"] if settings["needle"] else None,
    }


def _show(doc, name) -> None:
    from coldkv.report import render, sections
    from coldkv.report.load import ResultFile

    page = sections.page(ResultFile(name, "eval", doc), with_rows=True)
    if sys.stdout is not None and sys.stdout.isatty():
        render.rich_tables([page])
    else:
        click.echo(render.plain([page]))
