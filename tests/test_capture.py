"""Captured K and V are the model's own cache, bit for bit; captured queries reproduce its attention.

Every model is a tiny configuration with random weights: no downloads, no real models.
"""

import hashlib
import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from click.testing import CliRunner
from tinymodels import deepseek_v3, gemma2, gemma3, gpt_oss, llama, qwen2, qwen3_next, save_folder

from coldkv import models
from coldkv.capture import record, sample_positions, write_recording
from coldkv.commands.capture import command
from coldkv.dumps import open_dump
from coldkv.errors import InputError, ToolError

TOKENS = 21


def tokens(count=TOKENS):
    return torch.randint(3, 64, (1, count), generator=torch.Generator().manual_seed(1))


def plain_run(model, input_ids):
    """The model's cache and, per layer, what its output projection was given `[tokens, q_heads * head_dim]`."""
    seen, hooks = {}, []
    for name, module in model.named_modules():
        if name.endswith("self_attn.o_proj"):
            index = int(name.split("layers.")[1].split(".")[0])
            hooks.append(module.register_forward_pre_hook(lambda m, args, i=index: seen.__setitem__(i, args[0][0])))
    with torch.inference_mode():
        output = model(input_ids, use_cache=True)
    for hook in hooks:
        hook.remove()
    return output.past_key_values, seen


def attention_output(layer, q_pos):
    """`[samples, q_heads * head_dim]` from captured K, V, q and metadata alone."""
    heads = layer.q.shape[1]
    k = layer.k.repeat_interleave(heads // layer.k.shape[1], dim=1)
    v = layer.v.repeat_interleave(heads // layer.v.shape[1], dim=1)
    logits = torch.einsum("shd,thd->sht", layer.q, k) * layer.scaling
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    at = torch.arange(k.shape[0])
    allowed = at <= q_pos[:, None]
    if layer.window is not None:
        allowed &= at > q_pos[:, None] - layer.window
    logits = logits.masked_fill(~allowed[:, None], float("-inf"))
    if "sinks" in layer.extra:
        sink = torch.tensor(layer.extra["sinks"])[None, :, None].expand(len(q_pos), -1, 1)
        logits = torch.cat([logits, sink], dim=-1)
    p = torch.softmax(logits, dim=-1)[..., : k.shape[0]]
    return torch.einsum("sht,thd->shd", p, v).reshape(len(q_pos), -1)


MODELS = {
    "gemma3": (gemma3, [("sliding", 6), ("full", None)] * 2),
    "gemma2": (gemma2, [("sliding", 6), ("full", None)]),
    "llama": (llama, [("full", None)] * 2),
    "qwen2": (qwen2, [("full", None)] * 2),
    "gpt_oss": (gpt_oss, [("sliding", 6), ("full", None)]),
}


@pytest.mark.parametrize("name", MODELS)
def test_capture_is_what_attention_reads(name):
    make, kinds = MODELS[name]
    model, input_ids = make(), tokens()
    implementation = model.config._attn_implementation
    found = record(model, input_ids, samples=5, dtype="fp32")
    assert model.config._attn_implementation == implementation
    assert [(layer.kind, layer.window) for layer in found.layers] == kinds
    assert [layer.index for layer in found.layers] == list(range(len(kinds)))
    assert found.q_pos.tolist() == [3, 7, 11, 15, 20]
    cache, projected = plain_run(model, input_ids)
    for layer in found.layers:
        stored = cache.layers[layer.index]
        kept = stored.keys.shape[2]
        assert kept == (TOKENS if layer.window is None else layer.window - 1)
        assert torch.equal(layer.k[-kept:], stored.keys[0].transpose(0, 1))
        assert torch.equal(layer.v[-kept:], stored.values[0].transpose(0, 1))
        assert layer.k.shape == (TOKENS, 2, stored.keys.shape[3])
        expected = projected[layer.index][found.q_pos]
        torch.testing.assert_close(attention_output(layer, found.q_pos), expected, rtol=1e-4, atol=1e-5)


def test_gemma_metadata_tells_the_two_ropes_apart():
    found = record(gemma3(), tokens(), samples=0, dtype="bf16")
    assert found.layers[0].q is None and found.layers[0].scaling == pytest.approx(10**-0.5)
    assert found.rope == {"theta": 1_000_000.0, "dim": 16, "interleaved": False, "applied": True}
    assert found.layers[0].extra["rope"]["theta"] == 10_000.0
    assert "rope" not in found.layers[1].extra
    assert found.layers[0].k.dtype == torch.bfloat16


def test_softcap_and_sinks_are_noted():
    assert record(gemma2(), tokens()).layers[0].softcap == 2.0
    sinks = record(gpt_oss(), tokens()).layers[1].extra["sinks"]
    assert len(sinks) == 4


def test_a_hybrid_has_kv_in_its_attention_layers_only():
    model, input_ids = qwen3_next(), tokens()
    found = record(model, input_ids, samples=4, dtype="fp32")
    assert [layer.index for layer in found.layers] == [3]
    layer = found.layers[0]
    gates = []
    hook = model.model.layers[3].self_attn.q_proj.register_forward_hook(lambda m, args, out: gates.append(out[0]))
    cache, projected = plain_run(model, input_ids)
    hook.remove()
    assert torch.equal(layer.k, cache.layers[3].keys[0].transpose(0, 1))
    assert torch.equal(layer.v, cache.layers[3].values[0].transpose(0, 1))
    gate = gates[0].view(TOKENS, 4, 16)[:, :, 8:].reshape(TOKENS, 32)[found.q_pos]  # this model gates its output
    expected = projected[3][found.q_pos]
    torch.testing.assert_close(
        attention_output(layer, found.q_pos) * torch.sigmoid(gate), expected, rtol=1e-4, atol=1e-5
    )
    with pytest.raises(InputError, match="no KV in layer 0-2; layers with KV: 3"):
        record(model, input_ids, layers=[0, 1, 2, 3])


def test_an_mla_layer_is_one_latent_plane(tmp_path):
    model, input_ids = deepseek_v3(), tokens()
    found = record(model, input_ids, samples=4, dtype="fp32")
    cache, _ = plain_run(model, input_ids)
    for layer in found.layers:
        assert layer.kind == "mla" and layer.v is None and layer.q is None
        assert layer.k.shape == (TOKENS, 1, 24)
        stored = cache.layers[layer.index]
        assert torch.equal(layer.k[:, 0], torch.cat([stored.keys, stored.values], -1)[0, 0])
    write_recording(tmp_path / "a.safetensors", found, dtype="fp32")
    with open_dump(tmp_path / "a.safetensors") as dump:
        assert [list(layer.planes) for layer in dump.layers] == [["k"], ["k"]]
        assert dump.layers[0].extra["latent"] == {"kv_lora_rank": 16, "qk_rope_head_dim": 8}


def test_an_mla_cache_without_latents_is_refused(monkeypatch):
    model = deepseek_v3()
    forward = type(model.model).forward

    def without_cache(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output["past_key_values"] = None
        return output

    monkeypatch.setattr(type(model.model), "forward", without_cache)
    with pytest.raises(InputError, match="layer 0: an MLA model whose cache does not hold the latent"):
        record(model, tokens())


def test_layers_are_selected_and_values_must_fit_the_dtype():
    model = llama()
    assert [layer.index for layer in record(model, tokens(), layers=[1]).layers] == [1]
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1e6)
    with pytest.raises(InputError, match="layer 0: v is not finite in float16"):
        record(model, tokens(), dtype="fp16")
    assert model.config._attn_implementation == "sdpa"


def test_a_mask_that_metadata_cannot_describe_is_refused():
    model = gemma3()
    for layer in model.model.layers:  # the mask still uses the configuration's window of 6
        if layer.self_attn.sliding_window:
            layer.self_attn.sliding_window = 5
    with pytest.raises(InputError, match="layer 0: its attention mask is neither causal nor a sliding window of 5"):
        record(model, tokens())


def test_a_model_outside_the_attention_interface_is_refused():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = transformers.MambaForCausalLM(config)
    with pytest.raises(ToolError, match="MambaForCausalLM has no attention layer"):
        record(model, tokens())


@pytest.mark.parametrize("count,samples", [(1, 1), (5, 9), (672, 32), (10, 3)])
def test_sample_positions_are_spread_and_end_at_the_last_token(count, samples):
    at = sample_positions(count, samples)
    assert len(at) == min(count, samples) and at == sorted(set(at)) and at[0] >= 0 and at[-1] == count - 1
    gaps = [b - a for a, b in zip(at, at[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("tiny"))


def invoke(*args):
    return CliRunner().invoke(command, [str(a) for a in args])


def test_the_command_writes_a_complete_dump(tmp_path, folder):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{1 + i * 7 % 60}" for i in range(50)))
    out = tmp_path / "out.safetensors"
    done = invoke("--model", folder, "--text", text, "--tokens", 40, "--samples", 6, "--layers", "1", "-o", out,
                  "--dtype", "fp32", "--page-tokens", 16)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "1 layers (1 full), 40 tokens" in done.stderr and done.stdout == ""
    with open_dump(out) as dump:
        assert dump.page_tokens == 16 and dump.meta["text_sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
        provenance = dump.meta["provenance"]
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        assert provenance["weights_sha256"] == hashlib.sha256(f"{digest}  model.safetensors\n".encode()).hexdigest()
        assert provenance["model_type"] == "llama" and provenance["text"] == "text.txt" and provenance["tokens"] == 40
        assert str(tmp_path) not in json.dumps(dump.meta)
        layer = dump.layers[0]
        assert (layer.index, layer.tokens, layer.scaling) == (1, 40, 8**-0.5)
        ids = torch.tensor([[1 + i * 7 % 60 for i in range(40)]])
        expected = record(models.load_model(folder).model, ids, samples=6, dtype="fp32").layers[1]
        assert torch.equal(layer.planes["k"].read(0, 40), expected.k)
        assert torch.equal(layer.planes["v"].read(0, 40), expected.v)
        assert torch.equal(layer.queries()[0], expected.q)


def refused(*args):
    done = invoke(*args)
    assert isinstance(done.exception, InputError | ToolError), done.output
    assert "\n" not in done.exception.one_line()
    return done.exception.one_line()


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, folder):
    text, out = tmp_path / "text.txt", tmp_path / "out.safetensors"
    text.write_text(" ".join(["w5"] * 80))
    base = ("--text", text, "-o", out, "--model")
    assert "80 tokens, but the context of" in refused(*base, folder) and "--tokens 64" in refused(*base, folder)
    assert "no KV in layer 7; layers with KV: 0-1" in refused(*base, folder, "--tokens", 9, "--layers", "0,7")
    assert "no such file or folder" in refused(*base, tmp_path / "none")
    assert "expected config.json" in refused(*base, tmp_path)
    assert "found a file starting with b'w5 w'" in refused(*base, text)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    assert "no .safetensors or .bin weights" in refused(*base, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"x")
    assert "transformers cannot load it" in refused(*base, tmp_path / "broken")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    os.environ["COLDKV_CACHE_DIR"] = str(tmp_path / "cache")
    try:
        assert "model" in refused(*base, tmp_path / "bad.gguf")
    finally:
        del os.environ["COLDKV_CACHE_DIR"]
    assert "expected a name ending in .safetensors" in refused("--text", text, "-o", tmp_path / "x", "--model", folder)
    assert "does not exist; create it first" in refused(
        "--text", text, "-o", tmp_path / "no" / "x.safetensors", "--model", folder
    )
    other = ("-o", out, "--model", folder, "--text")
    assert "cannot be read: No such file" in refused(*other, tmp_path / "none")
    (tmp_path / "empty").write_bytes(b"")
    assert "the file is empty" in refused(*other, tmp_path / "empty")
    (tmp_path / "latin").write_bytes(b"abc\xe9")
    assert "expected UTF-8, found byte 0xe9 at 3" in refused(*other, tmp_path / "latin")
    assert not out.exists() and not [p for p in tmp_path.iterdir() if p.suffix == ".tmp"]


def test_transformers_missing_is_one_clear_line(tmp_path, folder, monkeypatch):
    (tmp_path / "t").write_text("w1 w2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    line = refused("--model", folder, "--text", tmp_path / "t", "-o", tmp_path / "o.safetensors")
    assert line.endswith("; pip install 'coldkv[capture]'")


def test_dequantized_weights_are_cached(tmp_path, folder, monkeypatch):
    """The GGUF reader is stood in for by a folder; saving, naming and re-reading the cache are real."""
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF and so on")
    monkeypatch.setenv("COLDKV_CACHE_DIR", str(tmp_path / "cache"))
    calls, load = [], models._load

    def counted(path, source, **options):
        calls.append(options)
        return load(path, folder if options else source)

    monkeypatch.setattr(models, "_load", counted)
    lines = []
    first = models.load_model(gguf, message=lines.append)
    second = models.load_model(gguf, message=lines.append)
    assert calls == [{"gguf_file": "m.gguf"}, {}] and len(lines) == 1
    assert first.name == second.name == "m"
    assert first.weights_sha256 == second.weights_sha256 == hashlib.sha256(gguf.read_bytes()).hexdigest()
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [p.name[:32] for p in (tmp_path / "cache" / "models").iterdir()] == [first.weights_sha256[:32]]


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("COLDKV_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert models.cache_dir() == tmp_path / "x" / "coldkv"
    monkeypatch.setenv("COLDKV_CACHE_DIR", str(tmp_path / "y"))
    assert models.cache_dir() == tmp_path / "y"


def test_a_tokenizer_that_makes_nothing_of_the_text_is_refused():
    from types import SimpleNamespace

    from coldkv.models import encode_text

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=64))
    loaded = SimpleNamespace(
        name="notok", model=SimpleNamespace(config=config), tokenizer=lambda text, **_: {"input_ids": [1]}
    )
    with pytest.raises(InputError, match="3000 characters gave 1 tokens; expected the tokenizer of notok"):
        encode_text(loaded, "abc " * 750)
