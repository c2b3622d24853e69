"""coldkv capture: record the KV of a model on a text."""

import os

import click


@click.command("capture")
@click.option("--model", "model_path", required=True, metavar="DIR|GGUF", help="Local model folder or GGUF file.")
@click.option("--text", "text_path", required=True, metavar="FILE", help="UTF-8 text to run the model on.")
@click.option("--tokens", type=click.IntRange(min=1), help="Stop after this many tokens.  [default: the whole text]")
@click.option("--samples", type=click.IntRange(min=0), default=64, show_default=True,
              help="Queries to record per layer.")  # fmt: skip
@click.option("--layers", metavar="LIST", help="Layers to record, such as 0,3-7.  [default: all with KV]")
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True,
              help="Number format of the dump.")  # fmt: skip
@click.option("--page-tokens", type=click.IntRange(1, 4096), default=64, show_default=True,
              help="Page size noted in the dump.")  # fmt: skip
@click.option("-o", "--output", required=True, metavar="DUMP", help="File to write (.safetensors).")
def command(model_path, text_path, tokens, samples, layers, dtype, page_tokens, output):
    """Record K, V and some queries of every attention layer.

    Runs the model once over the text, on the CPU, and writes what its attention read: keys after RoPE, values, and
    sampled queries with their positions. Layers without KV (linear, recurrent) are left out. Nothing is downloaded.
    Needs the extra: pip install 'coldkv[capture]'.
    """
    # Set before transformers is imported: even a look for an optional file must not go to a network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from coldkv.capture_run import run_capture
    from coldkv.layers import parse_layers

    run_capture(
        model_path,
        text_path,
        output,
        tokens=tokens,
        samples=samples,
        layers=parse_layers(layers) if layers else None,
        dtype=dtype,
        page_tokens=page_tokens,
    )
