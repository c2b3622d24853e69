"""`coldkv eval`: only cold pages change, real bytes, exact figures where the codec is exact, honest ones elsewhere.

Every model is a tiny configuration with random weights.
"""

import csv
import io
import json
import math

import pytest
import torch
import transformers
from clirun import in_process
from tinymodels import (
    byte_tokenizer,
    deepseek_v3,
    gemma2,
    gemma3,
    gpt_oss,
    jamba,
    llama,
    qwen3_next,
    recurrent_gemma,
    save_folder,
    word_tokenizer,
)

from coldkv import tiers
from coldkv.backends import TorchBackend
from coldkv.codecs import Codec, all_codecs, get_codec
from coldkv.errors import InputError, ToolError
from coldkv.evaluation import divergence, needle
from coldkv.evaluation.coldcache import ColdPages, cold_pages, kv_layers
from coldkv.evaluation.model_run import ModelRun, copy_cache
from coldkv.evaluation.results import ROW_COLUMNS
from coldkv.evaluation.run import Evaluation, Settings
from coldkv.geometry import Geometry
from coldkv.models import LoadedModel
from coldkv.pool.policy import Policy
from coldkv.table import parse_table, uniform_table
from coldkv.tiers import HotPlane

PREFIX, WINDOW, PAGE = 44, 12, 8
POLICY = Policy(keep_tokens=10, sink_tokens=5)
COLD = [1, 2, 3]  # of five whole pages: the first is the sink, 44 - 10 tokens hold four pages
SETTINGS = Settings(prefix=PREFIX, window=WINDOW, page_tokens=PAGE, policy=POLICY)
MODELS = {"llama": llama, "gemma2": gemma2, "gemma3": gemma3, "qwen3_next": qwen3_next, "gpt_oss": gpt_oss}


class Keep(Codec):
    """Keeps bf16 values as they are, 32 bytes of header; `refuse`: every so many head-pages, 0 for none."""

    id, version, formats, exact = "test-keep", 1, ("bf16",), True

    def __init__(self, refuse=0):
        self.refuse = refuse

    def slot_bytes(self, geometry, fmt):
        return 32 + 2 * geometry.elements

    def encode_torch(self, plane, geometry):
        n = plane.head_pages
        head = torch.zeros((n, 32), dtype=torch.uint8)
        slots = torch.cat([head, plane.codes.contiguous().view(torch.uint8).reshape(n, -1)], dim=1)
        valid = torch.ones(n, dtype=torch.int32)
        if self.refuse:
            valid[:: self.refuse] = 0
            slots[valid == 0] = 0
        return slots, valid

    def decode_torch(self, slots, geometry, fmt):
        return self.restore_torch(slots, geometry, fmt).codes.float()

    def restored_format(self, fmt):
        return fmt

    def restore_torch(self, slots, geometry, fmt):
        rows = (slots.shape[0], geometry.page_tokens, geometry.head_dim)
        codes = slots[:, -2 * geometry.elements :].contiguous().view(torch.bfloat16).reshape(rows)
        return HotPlane(fmt, codes, None, geometry.head_dim)

    def check_slots(self, slots, geometry, fmt):
        return []


class Destroy(Keep):
    """Gives every value back with the wrong sign and twice as large."""

    id = "test-destroy"

    def decode_torch(self, slots, geometry, fmt):
        return -2 * super().decode_torch(slots, geometry, fmt)


class Sized(Keep):
    """Learns its stride from the pages and where it stands from `bind`; both must be used before it encodes."""

    id, sized = "test-sized", True

    def __init__(self, place=None, stride=None):
        super().__init__()
        self.place, self.stride = place, stride

    @property
    def needs_stride(self):
        return self.stride is None

    def bind(self, layer, plane, fmt, geometry):
        assert self.stride is None and fmt == "bf16" and isinstance(geometry, Geometry)
        return Sized((layer, plane))

    def choose_stride(self, lengths, geometry, fmt):
        return 32 + int(lengths.max()) + (16 if self.place[1] == "k" else 0)

    def with_stride(self, stride):
        return Sized(self.place, stride)

    def slot_bytes(self, geometry, fmt):
        return self.stride

    def encode_torch(self, plane, geometry):
        slots, valid = super().encode_torch(plane, geometry)
        return torch.nn.functional.pad(slots, (self.stride - slots.shape[1], 0)), valid


class Lengths(TorchBackend):
    def lengths(self, codec, hot, geometry):
        return torch.full((hot.head_pages,), 2 * geometry.elements, dtype=torch.int32)


def ids(count=PREFIX + WINDOW + 1):
    return torch.randint(3, 64, (1, count), generator=torch.Generator().manual_seed(1))


def loaded(model, tokenizer=None):
    return LoadedModel("tiny", model, tokenizer or word_tokenizer(), "ab" * 32)


def evaluate(model, codecs, tier="int8", backend=None, **changes):
    settings = Settings(**(SETTINGS.__dict__ | changes))
    backend = backend or TorchBackend()
    return Evaluation(loaded(model), uniform_table(tier), codecs, settings, backend).rows("t", ids())


def states(cache):
    """(layer, plane) -> `[heads, tokens, head_dim]` of a cache's layers with KV."""
    found = {}
    for index, layer in enumerate(cache.layers):
        for plane, tensor in (("k", getattr(layer, "keys", None)), ("v", getattr(layer, "values", None))):
            if isinstance(tensor, torch.Tensor):
                found[index, plane] = tensor[0]
    return found


@pytest.mark.parametrize("name", [*MODELS, "deepseek_v3", "jamba"])
def test_prefix_then_window_is_the_model_itself(name):
    """Sliding layers keep all tokens here; the masks must still let each query see only its window."""
    model = {**MODELS, "deepseek_v3": deepseek_v3, "jamba": jamba}[name]()
    run, tokens = ModelRun(model, name), ids()
    cache = run.prefill(tokens[:, :PREFIX])
    layers = kv_layers(cache, PREFIX, run.config)
    with_kv = {"qwen3_next": [3], "jamba": [1, 3]}.get(name, list(range(len(cache.layers))))
    assert [layer.index for layer in layers] == with_kv
    assert {layer.tokens for layer in layers} == {PREFIX}
    run.check_continuation(cache, tokens[:, :PREFIX], tokens[:, PREFIX:])
    assert run.stepwise == (name == "jamba")
    before = {key: value.clone() for key, value in states(cache).items()}
    found = run.logits(copy_cache(cache), tokens[:, PREFIX:-1])[0]
    with torch.inference_mode():
        expected = model(input_ids=tokens[:, :-1], use_cache=False).logits[0, PREFIX:]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(before[key], value) for key, value in states(cache).items()), "the copy alone grew"
    again = run.logits(copy_cache(cache), tokens[:, PREFIX:-1])[0]
    assert torch.equal(found, again), "recurrent states belong to the copy, too"


def test_a_hybrid_that_forgets_is_read_token_by_token():
    hot, row = evaluate(jamba(), [get_codec("e2m1-g16")])
    model, tokens = jamba(), ids()
    with torch.inference_mode():
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[0, PREFIX:]
    loss = torch.nn.functional.cross_entropy(logits.double(), tokens[0, PREFIX + 1 :])
    assert row["ppl_base"] == pytest.approx(math.exp(loss), rel=1e-3)
    assert row["layers"] == "1,3" and 0 < hot["kl_mean"] < row["kl_mean"]


def test_a_model_whose_state_is_not_in_its_cache_is_refused():
    with pytest.raises(ToolError, match="model tiny: does not go on from its cache as it does without one: KL "):
        evaluate(recurrent_gemma(), [get_codec("e2m1-g16")])


def test_a_model_without_kv_is_refused():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(InputError, match="the model has no layer with KV in its cache"):
        evaluate(transformers.MambaForCausalLM(config), [get_codec("e2m1-g16")])


@pytest.mark.parametrize(
    "policy,tokens,pages",
    [
        (POLICY, PREFIX, COLD),
        (Policy(), 2048, list(range(1, 30))),
        (Policy(sink_tokens=0), 2048, list(range(30))),
        (Policy(sink_tokens=65, keep_tokens=0), 2048, list(range(2, 32))),
        (Policy(keep_tokens=2048), 2048, []),
        (Policy(sink_tokens=10**9), 2048, []),
    ],
)
def test_which_pages_are_cold(policy, tokens, pages):
    assert cold_pages(policy, tokens, 64 if tokens > PREFIX else PAGE) == pages


@pytest.mark.parametrize("name", MODELS)
def test_only_cold_pages_of_chosen_layers_change_and_hold_the_restored_values(name):
    run = ModelRun(MODELS[name](), name)
    cache = run.prefill(ids()[:, :PREFIX])
    layers = kv_layers(cache, PREFIX, run.config)
    chosen = layers[-1]
    codec, span = get_codec("e2m1-g16"), slice(COLD[0] * PAGE, (COLD[-1] + 1) * PAGE)
    cold = ColdPages(cache, [(chosen, "int8")], COLD, PAGE, TorchBackend())
    for used in (None, codec):
        altered = copy_cache(cache)
        cost = cold.through(altered, used)
        for (index, plane), found in states(altered).items():
            original = states(cache)[index, plane]
            changed = (found != original).any(dim=-1).any(dim=0)
            if index != chosen.index:
                assert not changed.any()
                continue
            assert changed[span].all() and changed.sum() == len(COLD) * PAGE
            for number, page in enumerate(COLD):
                for head in range(chosen.kv_heads):
                    values = original[head, page * PAGE : (page + 1) * PAGE].float()[None]
                    hot = tiers.quantize("int8", values)
                    geometry = chosen.geometry(PAGE)
                    expected = (
                        tiers.dequantize(hot)
                        if used is None
                        else codec.decode_torch(codec.encode_torch(hot, geometry)[0], geometry, "int8")
                    )
                    assert torch.equal(found[head, page * PAGE : (page + 1) * PAGE], expected[0]), (number, head)
        assert cost.pages == 2 * chosen.kv_heads * len(COLD)


def test_an_mla_latent_is_one_plane_and_goes_back_into_its_two_tensors():
    run = ModelRun(deepseek_v3(), "mla")
    cache = run.prefill(ids()[:, :PREFIX])
    (layer, _) = kv_layers(cache, PREFIX, run.config)
    assert (layer.planes, layer.kv_heads, layer.head_dim) == (("k",), 1, 24)
    altered = copy_cache(cache)
    cost = ColdPages(cache, [(layer, "bf16")], COLD, PAGE, TorchBackend()).through(altered, Keep())
    span = slice(COLD[0] * PAGE, (COLD[-1] + 1) * PAGE)
    for name in ("keys", "values"):
        expected = getattr(cache.layers[0], name).clone()
        expected[:, :, span] = expected[:, :, span].bfloat16().float()
        assert torch.equal(getattr(altered.layers[0], name), expected)
    assert cost.cold_bytes == len(COLD) * (32 + 2 * PAGE * 24)
    rows = evaluate(deepseek_v3(), [get_codec("e2m1-g16")])
    assert rows[1]["pages"] == 2 * len(COLD) and 0 < rows[0]["kl_mean"] < rows[1]["kl_mean"]


@pytest.mark.parametrize("name", MODELS)
def test_an_exact_codec_changes_nothing_at_all(name):
    model = MODELS[name]().to(torch.bfloat16)
    hot, keep = evaluate(model, [Keep()], tier="bf16")
    for row in (hot, keep):
        assert row["kl_mean"] == 0 and row["kl_p99"] == 0 and row["top1"] == 1
        assert row["ppl"] == row["ppl_base"]
    assert (hot["codec"], keep["codec"]) == ("hot", "test-keep")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_codec_that_destroys_the_values_is_seen(name):
    hot, keep, destroy = evaluate(MODELS[name](), [Keep(), Destroy()], tier="bf16")
    assert hot["kl_mean"] == keep["kl_mean"] < 1e-3
    assert destroy["kl_mean"] > 100 * hot["kl_mean"] and destroy["kl_mean"] > 0.05
    assert destroy["top1"] < 1 and destroy["kl_p99"] > destroy["kl_mean"]
    assert destroy["ppl"] != destroy["ppl_base"] == hot["ppl_base"]


def test_old_pages_beyond_a_sliding_window_are_counted_but_not_read():
    """gemma3 here: a window of 6 tokens in layers 0 and 2, so pages 34 and more tokens back cannot be seen there."""
    rows = evaluate(gemma3(), [Destroy()], tier="bf16", layers="0,2")
    assert [row["kl_mean"] for row in rows] == [0, 0]
    assert rows[1]["pages"] == 2 * 2 * 2 * len(COLD)
    assert evaluate(gemma3(), [Destroy()], tier="bf16", layers="1")[1]["kl_mean"] > 0


def test_bytes_are_those_of_slots_and_refused_pages_stay_hot():
    # 2 layers, 2 planes, 3 pages, 2 heads of 8 x 8 values in int8: 8 codes and one fp16 scale per row
    hot, row = evaluate(llama(), [get_codec("e2m1-g16")])
    assert row["pages"] == hot["pages"] == 24 and row["elements"] == 24 * 64
    assert hot["hot_bytes"] == hot["cold_bytes"] == row["hot_bytes"] == 24 * 8 * 10
    assert (hot["ratio"], hot["bits_per_element"]) == (1, 10)
    assert row["cold_bytes"] == 24 * 64  # 16 header + 32 nibbles + 8 scales, rounded up to 16
    assert row["ratio"] == 80 / 64 and row["bits_per_element"] == 8
    assert (row["tokens"], row["prefix"], row["cold_tokens"]) == (WINDOW, PREFIX, 24)

    hot, all_held, some = evaluate(llama(), [Keep(), Keep(refuse=3)], tier="bf16")
    assert all_held["cold_bytes"] == 24 * (32 + 128) and all_held["invalid_pages"] == 0
    # each plane has 6 head-pages, of which 0 and 3 are refused
    assert some["invalid_pages"] == 8 and some["cold_bytes"] == 16 * (32 + 128) + 8 * 128
    assert some["kl_mean"] == hot["kl_mean"] > 0, "a refused page reads its hot values"


def test_a_layer_with_a_plane_the_codec_does_not_take_stays_hot():
    table = parse_table("0:nvfp4,1:int8")
    evaluation = Evaluation(loaded(llama()), table, [get_codec("e2m1-g16")], SETTINGS, TorchBackend())
    hot, row = evaluation.rows("t", ids())
    nvfp4 = 12 * 8 * (4 + 1)
    assert row["left_hot"] == "0" and hot["left_hot"] == ""
    assert row["hot_bytes"] == hot["hot_bytes"] == nvfp4 + 12 * 80
    assert row["cold_bytes"] == nvfp4 + 12 * 64
    assert row["tier"] == "0:nvfp4,1:int8" and row["layers"] == "0-1"


def test_a_codec_is_bound_to_its_plane_and_sized_by_it():
    hot, row = evaluate(llama(), [Sized()], tier="bf16", backend=Lengths())
    assert row["cold_bytes"] == 12 * (32 + 128 + 16) + 12 * (32 + 128)
    assert row["kl_mean"] == hot["kl_mean"] and row["invalid_pages"] == 0


def test_figures_are_those_of_the_definitions(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn((7, 50), generator=generator) * 3 for _ in range(2))
    targets = torch.randint(0, 50, (7,), generator=generator)
    monkeypatch.setattr(divergence, "CHUNK_ELEMENTS", 100)  # two tokens at a time
    base = divergence.reference(a, targets)
    found = divergence.compare(base, b, targets)
    p, q = torch.log_softmax(a.double(), -1), torch.log_softmax(b.double(), -1)
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(found.kl, kl)
    figures = found.figures(base)
    assert figures["kl_mean"] == pytest.approx(float(kl.mean()), rel=1e-12)
    # linear interpolation between the order statistics: 0.99 * 6 = 5.94
    low, high = kl.sort().values[5:].tolist()
    assert figures["kl_p99"] == pytest.approx(low + 0.94 * (high - low), rel=1e-12)
    for name, logits in (("ppl", b), ("ppl_base", a)):
        loss = torch.nn.functional.cross_entropy(logits.double(), targets)
        assert figures[name] == pytest.approx(math.exp(loss), rel=1e-12)
    assert figures["top1"] == float((a.argmax(-1) == b.argmax(-1)).double().mean())
    assert float(divergence.compare(base, a.clone(), targets).kl.max()) == 0


def test_logits_that_forbid_a_token_give_no_nan():
    logits = torch.zeros((2, 8))
    logits[:, 3] = -1e30  # as models mask a token out
    base = divergence.reference(logits, torch.tensor([0, 1]))
    shifted = logits.clone()
    shifted[:, 4] += 1
    found = divergence.compare(base, shifted, torch.tensor([0, 1]))
    assert bool(torch.isfinite(found.kl).all()) and float(found.kl.min()) > 0


def planted(seed, prefix=900, cold=range(64, 768)):
    return needle.place_needles(byte_tokenizer(), list(range(3, 203)) * 5, prefix, list(cold), seed)


def test_needles_lie_in_cold_pages_spread_out_and_do_not_depend_on_anything_but_the_seed():
    tokenizer = byte_tokenizer()
    tokens, found = planted("0 x")
    assert tokens.shape == (1, 900) and 1 < len(found) <= 8
    text, others = tokens[0].tolist(), iter(list(range(3, 203)) * 5)
    inside = set()
    for item in found:
        span = range(item.start, item.start + len(item.ids))
        assert span.start >= 64 and span.stop <= 768 and not inside & set(span)
        inside |= set(span)
        assert tokenizer.decode(text[span.start : span.stop]) == tokenizer.decode(item.question) + f" {item.value}.\n"
        assert len(item.value) == 5 and item.value.isdigit()
    assert all(token == next(others) for at, token in enumerate(text) if at not in inside), "the text goes on around"
    starts = [item.start for item in found]
    assert max(b - a for a, b in zip(starts, starts[1:], strict=False)) < 1.2 * 704 / len(found)
    assert torch.equal(tokens, planted("0 x")[0]) and not torch.equal(tokens, planted("1 x")[0])
    with pytest.raises(InputError, match="needle: expected [0-9]+ or more cold tokens for a needle, found 64"):
        planted("0 x", cold=range(64, 128))


@pytest.mark.parametrize("make", [llama, qwen3_next])
def test_answers_are_what_the_model_says_one_question_at_a_time(make):
    model = make(vocab_size=256, max_position_embeddings=2048)
    tokens, found = planted("0 x", prefix=300, cold=range(16, 280))
    run = ModelRun(model, "m")
    cache = run.prefill(tokens)
    kept = {key: value.clone() for key, value in states(cache).items()}
    said = needle.answers(run, cache, found)
    assert len(found) >= 2 and all(torch.equal(kept[key], value) for key, value in states(cache).items())
    for item, answer in zip(found, said, strict=True):
        whole = [*tokens[0].tolist(), *item.question]
        for _ in range(item.answer_tokens):
            with torch.inference_mode():
                whole.append(int(model(input_ids=torch.tensor([whole]), use_cache=False).logits[0, -1].argmax()))
        assert answer == whole[-item.answer_tokens :]


def test_a_model_that_copies_finds_its_needles_and_one_without_them_does_not():
    """The score itself: a tokenizer and needles are real, the answers are put in by hand."""
    tokenizer, (_, found) = byte_tokenizer(), planted("0 x")
    right = [tokenizer(f" {item.value}.\n")["input_ids"] for item in found]
    scores = []
    for wrong in (0, 1, len(found)):
        said = [[40] * 5] * wrong + right[wrong:]
        scores.append(needle.score(tokenizer, found, said))
    assert scores == [1, (len(found) - 1) / len(found), 0]


def test_needles_in_a_row():
    model = llama(vocab_size=256, max_position_embeddings=2048)
    settings = Settings(prefix=300, window=8, page_tokens=16, policy=Policy(keep_tokens=16, sink_tokens=16),
                        needle=True)  # fmt: skip
    evaluation = Evaluation(loaded(model, byte_tokenizer()), uniform_table("int8"), [get_codec("e2m1-g64")], settings,
                            TorchBackend())  # fmt: skip
    tokens = torch.randint(3, 256, (1, 309), generator=torch.Generator().manual_seed(1))
    rows = evaluation.rows("t", tokens)
    assert all(row["needles"] >= 2 and 0 <= row["needle"] <= 1 and row["needle_base"] == 0 for row in rows)


# The command

TEXT = " ".join(f"w{3 + i * i * 7 % 60}" for i in range(60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(capsys, folder, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(" ".join(reversed(TEXT.split())))

    def run(*args, texts=("a.txt",), model=folder):
        named = [part for text in texts for part in ("--text", tmp_path / text)]
        sizes = ("--prefix", PREFIX, "--window", WINDOW, "--page-tokens", PAGE, "--cold-keep-tokens", 10,
                 "--cold-sink-tokens", 5)  # fmt: skip
        return in_process(capsys, "eval", "--model", model, *named, *sizes, "--backend", "torch", *args)

    return run


def test_the_command_writes_rows_that_report_shows_and_gates_on(run, capsys, tmp_path):
    out, svg, png = tmp_path / "r.json", tmp_path / "r.svg", tmp_path / "r.png"
    done = run("--codec", "e2m1-g64", "--codec", "e2m1-g16", "--results", out, texts=("a.txt", "b.txt"))
    assert done.code == 0, done.err
    assert "a.txt: e2m1-g16: 8.000 bits per element, KL" in done.err and "All texts" in done.out
    doc = json.loads(out.read_text())
    assert [(row["text"], row["codec"]) for row in doc["rows"]] == [
        (text, codec) for text in ("a.txt", "b.txt") for codec in ("hot", "e2m1-g64", "e2m1-g16")
    ]
    assert all(tuple(row) == ROW_COLUMNS for row in doc["rows"])
    expected = evaluate_text(TEXT)
    for row, other in zip(doc["rows"][:3], expected, strict=True):
        assert row | {"model": ""} == other | {"model": "", "text": "a.txt"}
    (line,) = [line for line in doc["summary"]["codecs"] if line["codec"] == "e2m1-g16"]
    kls = [row["kl_mean"] for row in doc["rows"] if row["codec"] == "e2m1-g16"]
    assert line["kl_mean"] == pytest.approx(sum(kls) / 2) and line["texts"] == 2 and line["pages"] == 48

    table = in_process(capsys, "report", out)
    assert table.code == 0 and "e2m1-g16" in table.out and "1.250x" in table.out
    rows = list(csv.DictReader(io.StringIO(in_process(capsys, "report", out, "--format", "csv").out)))
    assert list(rows[0]) == [*ROW_COLUMNS, "file"] and float(rows[1]["kl_mean"]) == doc["rows"][1]["kl_mean"]
    shown = json.loads(in_process(capsys, "report", out, "--json").out)
    assert shown["files"][0]["rows"] == doc["rows"] and shown["files"][0]["summary"] == doc["summary"]
    assert in_process(capsys, "report", out, "--baseline", out).code == 0
    assert in_process(capsys, "report", out, "--fail-on", "kl_mean > 1e-9").code == 1
    assert in_process(capsys, "report", out, "--fail-on", "codec == 'hot' and kl_mean > 0.5").code == 0
    failed = in_process(capsys, "report", out, "--fail-on", "summary:codec == 'e2m1-g64' and kl_mean > 0")
    assert failed.code == 1 and "codec e2m1-g64" in failed.err
    for path in (svg, png):
        assert in_process(capsys, "report", out, "--plot", path).code == 0
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert {"e2m1-g64", "e2m1-g16", "hot", "a.txt", "b.txt"} <= set(svg_words(svg))


def svg_words(path):
    import xml.etree.ElementTree as tree

    texts = [node.text for node in tree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    return [word.strip(",") for text in texts for word in text.split()] + texts


def evaluate_text(text):
    tokenizer = word_tokenizer()
    tokens = torch.tensor([tokenizer(text)["input_ids"][: PREFIX + WINDOW + 1]])
    codecs = [get_codec("e2m1-g64"), get_codec("e2m1-g16")]
    return Evaluation(loaded(llama()), uniform_table("int8"), codecs, SETTINGS, TorchBackend()).rows("t", tokens)


def test_json_is_one_document_and_every_fitting_codec_runs_by_default(run):
    done = run("--json", "--layers", "1", "--dtype", "bf16", "--tier", "nvfp4", "--threads", 1)
    doc = json.loads(done.out)
    fitting = [codec.id for codec in all_codecs() if codec.fits("nvfp4") or codec.fits("iso3")]
    assert [row["codec"] for row in doc["rows"]] == ["hot", *fitting] and {"e2m1-g64", "native"} <= set(fitting)
    rows = {row["codec"]: row for row in doc["rows"]}
    assert rows["native"]["kl_mean"] == rows["hot"]["kl_mean"] and rows["hot"]["layers"] == "1"
    assert doc["run"]["compute_dtype"] == "bf16"


@pytest.mark.parametrize(
    "args,words",
    [
        (("--prefix", 50), "text a.txt: expected at least 63 tokens (prefix 50, window 12, and one), found 60"),
        (("--prefix", 60), "prefix and window: 60 + 12 tokens do not fit the context of "),
        (("--cold-keep-tokens", 40), "expected at least one whole page of 8 tokens after the first 5 and before"),
        (("--layers", "0,7"), "has no layer 7; layers with KV: 0-1"),
        (("--layers", "x"), "expected numbers and ranges such as 0,3-7"),
        (("--table", "seed-10-6"), "is for another number of layers than model "),
        (("--table", "0:int8"), "layer 1 of the model is not in the table"),
        (("--table", "0:int8", "--tier", "int8"), "expected one of them, found both"),
        (("--codec", "native"), "codec native: fits planes of nvfp4, iso3, but the tiers in use (int8)"),
        (("--codec", "nothing"), "codec: expected one of"),
        (("--codec", "native", "--codec", "native"), "named twice"),
        (("--needle",), "needle: the tokenizer cannot write 'The secret number of "),
    ],
)
def test_bad_input_is_one_line(run, args, words):
    done = run(*args)
    assert done.code == 2 and done.out == "" and words in done.err.splitlines()[-1]
    assert not [line for line in done.err.splitlines()[:-1] if "Traceback" in line]


def test_bad_files_are_refused_before_the_model_is_loaded(run, tmp_path, folder):
    assert "named twice" in run(texts=("a.txt", "a.txt")).err
    assert "cannot be read" in run(texts=("none.txt",)).err
    (tmp_path / "c.txt").write_text(TEXT)
    assert "text c.txt: has the same content as a.txt" in run(texts=("a.txt", "c.txt")).err
    done = run("--results", tmp_path / "a.txt")
    assert done.code == 2 and "is the input" in done.err
    assert "expected config.json" in run(model=tmp_path).err
    assert (tmp_path / "a.txt").read_text() == TEXT


def test_two_texts_of_one_name_are_told_apart(run, tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.txt").write_text(f"{TEXT} {name}")
    doc = json.loads(run("--json", "--codec", "e2m1-g16", texts=("x/t.txt", "y/t.txt")).out)
    assert list(doc["run"]["text_sha256"]) == [str(tmp_path / name / "t.txt") for name in ("x", "y")]


def test_values_that_are_not_finite_are_refused():
    model = llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.fill_(float("inf"))
    with pytest.raises(InputError, match="layer 1: v: expected finite values, found NaN or Inf"):
        evaluate(model, [get_codec("e2m1-g16")])
