"""`coldkv simulate`: traces, what policies buy, time series, real bytes, and refusals in one line."""

import csv
import json
import random

import pytest
from clirun import ROOT, in_process
from poolkit import make_dump

from coldkv.errors import InputError
from coldkv.pool.faults import PoolFull
from coldkv.pool.invariants import violations
from coldkv.pool.kvpool import KvPool, PoolSize
from coldkv.pool.policy import Policy
from coldkv.simulation.engine import Engine, Rates
from coldkv.simulation.prefixes import PrefixIndex
from coldkv.simulation.traces import Request, read_trace


def own_trace(path, requests):
    keys = ("arrival_s", "input_tokens", "output_tokens", "prefix", "block_tokens")
    lines = [json.dumps({key: value for key, value in zip(keys, request, strict=False)}) for request in requests]
    path.write_text("\n".join(lines) + "\n")
    return path


def busy(count=120, seed=7):
    """Requests of two documents with shared beginnings and of none, close to each other."""
    generator, at, found = random.Random(seed), 0.0, []
    for number in range(count):
        at += generator.expovariate(4.0)
        document = generator.choice("ab-")
        blocks = [] if document == "-" else [f"{document}{i}" for i in range(generator.randint(1, 6))]
        found.append((round(at, 3), 96 * len(blocks) + generator.randint(40, 900), generator.randint(0, 200),
                      [*blocks, f"own{number}"], 96))  # fmt: skip
    return found


def simulate(capsys, trace, *more, code=0):
    size = ("--kv-heads", 2, "--head-dim", 64, "--page-tokens", 16, "--attention-layers", 2)
    done = in_process(capsys, "simulate", "--trace", trace, *size, *more)
    assert done.code == code, done.err
    return done


def rows_of(done):
    document = json.loads(done.out)
    assert document["schema"] == "coldkv.simulate/1"
    return document["rows"]


# traces


def test_the_three_kinds_of_trace(tmp_path):
    mooncake = tmp_path / "m.jsonl"
    mooncake.write_text('{"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]}\n\n')
    assert list(read_trace(str(mooncake))) == [Request(1.5, 700, 5, (0, 9))]
    azure = tmp_path / "a.csv"
    azure.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
        b"2023-11-16 18:15:50.9951690,396,109\r\n"
    )
    first, second = read_trace(str(azure))
    assert first == Request(0.0, 374, 44) and second.arrival == pytest.approx(4.314579) and second.output_tokens == 109
    own = own_trace(tmp_path / "o.jsonl", [(0, 10, 0), (2.5, 20, 3, ["x"], 8)])
    assert list(read_trace(str(own))) == [Request(0.0, 10, 0), Request(2.5, 20, 3, ("x",), 8)]
    assert len(list(read_trace(str(own), limit=1))) == 1


@pytest.mark.parametrize(
    "text,message",
    [
        ("", "expected JSON lines or a CSV"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "expected requests, found none"),
        ("time,tokens\n1,2\n", "expected JSON lines or a CSV file with TIMESTAMP"),
        ('{"arrival_s": 0, "input_tokens": 5, "output_tokens": 1}\n{oops\n', "line 2: not valid JSON"),
        ('{"arrival_s": 0, "input_tokens": 0, "output_tokens": 1}\n', "line 1: input tokens: expected 1 to"),
        ('{"arrival_s": 0, "input_tokens": 5, "output_tokens": true}\n', "line 1: output tokens"),
        ('{"arrival_s": "now", "input_tokens": 5, "output_tokens": 1}\n', "line 1: arrival"),
        ('{"arrival_s": NaN, "input_tokens": 5, "output_tokens": 1}\n', "line 1: arrival"),
        ('{"arrival_s": 0, "input_tokens": 5, "output_tokens": 1, "prefix": "a"}\n', "line 1: prefix"),
        ('{"arrival_s": 0, "input_tokens": 5, "outputs": 1}\n', "line 1: unknown key 'outputs'"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": []}\n', "line 1: output tokens"),
        ('{"arrival_s": 3, "input_tokens": 5, "output_tokens": 1}\n{"arrival_s": 2, "input_tokens": 5, '
         '"output_tokens": 1}\n', "line 2: arrival: expected at least 3 s, found 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2: TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,1\n", "line 2: expected 3 columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,1,-2\n", "line 2: GeneratedTokens"),
    ],
)  # fmt: skip
def test_bad_traces_name_the_line(tmp_path, capsys, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    done = simulate(capsys, path, "--device-bytes", "1m", code=2)
    assert message in done.err and str(path) in done.err and len(done.err.splitlines()) == 1 and not done.out


def test_a_shared_prefix_is_whole_blocks_and_never_the_whole_prompt():
    index = PrefixIndex(16)
    index.add(3, Request(0, 300, 1, ("a", "b", "c"), 96))
    assert index.find(Request(0, 500, 1, ("a", "b", "c", "d"), 96)) == (3, 288)
    assert index.find(Request(0, 288, 1, ("a", "b", "c"), 96)) == (3, 272)
    assert index.find(Request(0, 100, 1, ("a", "b"), 96)) == (3, 96)
    assert index.find(Request(0, 500, 1, ("x",), 96)) == (-1, 0)
    index.remove(3)
    assert index.find(Request(0, 500, 1, ("a",), 96)) == (-1, 0)


# runs


def test_cold_pages_admit_sooner_and_within_the_bytes(tmp_path, capsys):
    trace = own_trace(tmp_path / "t.jsonl", busy())
    common = ("--device-bytes", "1m", "--codec", "e2m1-g16", "--cold-keep-tokens", 32, "--cold-sink-tokens", 16,
              "--chunk-tokens", 64, "--cold-share", 0.75, "--policy", "window", "--policy", "host",
              "--json")  # fmt: skip
    rows = rows_of(simulate(capsys, trace, *common))
    none, window, host = rows
    assert [row["policy"] for row in rows] == ["none", "window", "host"]
    for row in rows:
        assert row["requests"] == row["finished"] + row["too_large"] == 120 and row["too_large"] == 0
        assert 0 < row["peak_device_bytes"] <= row["device_bytes"] == 1 << 20
        assert row["pages"] * row["page_bytes"] + row["slots"] * row["slot_bytes"] <= 1 << 20
        assert row["prompt_tokens"] == none["prompt_tokens"]
    assert none["delayed"] > 0 and none["retired"] == 0 and none["moved_bytes"] == 0
    assert window["wait_mean_s"] < none["wait_mean_s"] and window["mean_tokens"] > none["mean_tokens"]
    assert window["retired"] > 100
    assert window["moved_bytes"] == window["retired"] * (window["page_bytes"] + window["slot_bytes"])
    assert host["peak_host_bytes"] > 0 and host["host_moved_bytes"] >= host["peak_host_bytes"]
    again = rows_of(simulate(capsys, trace, *common))
    timing = {"wall_s", "page_events_per_s", "rss_quarter_bytes"}
    plain = [[{k: v for k, v in row.items() if k not in timing} for row in found] for found in (rows, again)]
    assert plain[0] == plain[1], "the same trace gives the same figures"


def test_retained_sequences_serve_later_prompts(tmp_path, capsys):
    turns = [(10.0 * turn, 96 * (turn + 1) + 10, 20, [f"a{i}" for i in range(turn + 1)], 96) for turn in range(5)]
    trace = own_trace(tmp_path / "t.jsonl", turns)
    common = ("--device-bytes", "4m", "--policy", "window", "--cold-keep-tokens", 16, "--json")
    forgetting, retaining = (rows_of(simulate(capsys, trace, *common, *more)) for more in ((), ("--retain",)))
    assert [row["reused_tokens"] for row in forgetting] == [0, 0]
    assert [row["reused_tokens"] for row in retaining] == [96 * (1 + 2 + 3 + 4)] * 2
    assert retaining[1]["retired"] > 0


def test_retained_sequences_make_room(tmp_path, capsys):
    trace = own_trace(tmp_path / "t.jsonl", [(i, 600, 10) for i in range(30)])
    rows = rows_of(simulate(capsys, trace, "--device-bytes", "700k", "--retain", "--json", "--chunk-tokens", 64))
    assert all(row["finished"] == 30 for row in rows)


def test_requests_that_never_fit_are_refused_and_counted(tmp_path, capsys):
    trace = own_trace(tmp_path / "t.jsonl", [(0, 100, 10), (1, 100_000, 10), (2, 100, 10), (3, 5000, 1)])
    rows = rows_of(simulate(capsys, trace, "--device-bytes", "500k", "--max-context", 50_000, "--json"))
    assert [(row["finished"], row["too_large"]) for row in rows] == [(2, 2), (2, 2)]


def test_pages_that_stay_hot_against_the_promise_stall_and_preempt():
    """Every page is refused by the codec: rows that were promised what their passes return run dry together."""
    from coldkv.pool.payload import KnownRefusals

    pool = KvPool(PoolSize(16, 40, 200, 8, 64), Policy("window", 16, 0), KnownRefusals(range(40)))
    engine = Engine(pool, Rates(prefill=1000.0, decode=10.0, chunk_tokens=32), 1, 1, check=True)
    outcome = engine.run([Request(0.0, 400, 50), Request(0.1, 400, 50)])
    assert outcome.finished == 2 and outcome.preempted >= 1 and outcome.stalls >= 1
    assert not violations(pool) and pool.pages.count == 0 and pool.promised_total == 0
    with pytest.raises(PoolFull):
        pool.open(41 * 16)


def test_the_time_series_and_its_picture(tmp_path, capsys):
    trace = own_trace(tmp_path / "t.jsonl", busy(60))
    series, plot, results = (tmp_path / name for name in ("s.csv", "p.svg", "r.json"))
    done = simulate(capsys, trace, "--device-bytes", "1m", "--csv", series, "--plot", plot, "--results", results,
                    "--sample-seconds", 2, "--sweep", "keep=16,64")  # fmt: skip
    with series.open(newline="") as file:
        samples = list(csv.DictReader(file))
    rows = json.loads(results.read_text())["rows"]
    assert [row["policy"] for row in rows] == ["none", "window", "window"]
    assert [row["keep_tokens"] for row in rows[1:]] == [16, 64]
    assert {sample["run"] for sample in samples} == {"0", "1", "2"}
    for number, row in enumerate(rows):
        mine = [sample for sample in samples if sample["run"] == str(number)]
        assert max(int(sample["device_bytes"]) for sample in mine) <= row["peak_device_bytes"]
        assert int(mine[-1]["retired"]) == row["retired"] and int(mine[-1]["sequences"]) == 0
        assert [float(s["time_s"]) for s in mine[:-1]] == [2.0 * i for i in range(len(mine) - 1)]
    text = plot.read_text()
    assert "<svg" in text and "tokens of running sequences" in text and "window, keep tokens 16" in text
    assert "delayed" in done.out and "page events" in done.out


@pytest.mark.parametrize("codec", ["e2m1-g64", "ecq"])
def test_real_bytes_are_what_the_codec_promises(tmp_path, capsys, codec):
    trace = own_trace(tmp_path / "t.jsonl", busy(12))
    done = simulate(capsys, trace, "--device-bytes", "1m", "--payload", "synthetic", "--codec", codec, "--json",
                    "--cold-keep-tokens", 32, "--chunk-tokens", 64, "--policy", "window",
                    "--policy", "host")  # fmt: skip
    none, window, host = rows_of(done)
    assert window["verified_pages"] == none["verified_pages"] > 100
    assert window["retired"] > 50 and host["retired"] > 50


def test_a_dumps_layers_are_the_model(tmp_path, capsys):
    make_dump(tmp_path / "d.safetensors", {0: {"tokens": 100}, 2: {"tokens": 100}})
    trace = own_trace(tmp_path / "t.jsonl", busy(10))
    done = in_process(capsys, "simulate", "--trace", trace, "--device-bytes", "1m", "--table", "0:int8,2:nvfp4",
                      "--payload", tmp_path / "d.safetensors", "--cold-keep-tokens", 32, "--json")  # fmt: skip
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["run"]["layers"] == 2 and document["run"]["head_dim"] == 32
    assert "carried" in document["run"]["notes"][0] and document["rows"][1]["verified_pages"] > 50


def test_wrong_content_is_noticed(tmp_path, capsys, monkeypatch):
    from coldkv.pool.regions import Regions

    right = Regions.pack

    def one_page_late(self, pages, slots):
        held = right(self, pages, slots)
        if len(pages) > 1:
            right(self, pages[:1], slots[1:2])
        return held

    monkeypatch.setattr(Regions, "pack", one_page_late)
    trace = own_trace(tmp_path / "t.jsonl", busy(12))
    done = simulate(capsys, trace, "--device-bytes", "1m", "--payload", "synthetic", "--codec", "e2m1-g64",
                    "--cold-keep-tokens", 32, "--chunk-tokens", 64, code=1)  # fmt: skip
    assert "layer 0, plane k: wrong content" in done.err and not done.out


@pytest.mark.parametrize(
    "options,message",
    [
        (("--sweep", "keep"), "expected NAME=VALUE"),
        (("--sweep", "speed=1"), "expected NAME=VALUE"),
        (("--sweep", "keep=a"), "expected numbers"),
        (("--sweep", "keep=1.5"), "expected whole numbers"),
        (("--sweep", "cold-share=1"), "between 0 and 1"),
        (("--device-bytes", "1k"), "expected room for a page at least"),
        (("--plot", "x.pdf"), "expected a name ending in .png or .svg"),
        (("--max-cold-pages", 10**7), "expected room for a page at least"),
        (("--draft-tokens", 300), "expected at least the draft width 300, found 128"),
        (("--tier", "nvfp4"), "takes no layer of tier nvfp4"),
        (("--payload", "nowhere.safetensors"), "nowhere.safetensors"),
        (("--table", "seed-10-6"), "--attention-layers 2: table seed-10-6 names 16 layers"),
    ],
)
def test_refusals_are_one_line(tmp_path, capsys, options, message):
    trace = own_trace(tmp_path / "t.jsonl", [(0, 100, 10)])
    done = simulate(capsys, trace, *(("--device-bytes", "1m") if "--device-bytes" not in options else ()), *options,
                    code=2)  # fmt: skip
    assert message in done.err and len(done.err.splitlines()) == 1 and not done.out


def test_bookkeeping_is_fast_and_its_memory_flat():
    """Four times the trace takes no more memory; the floor of speed is a quarter of what docs/simulate.md claims, for
    the machines that run tests."""
    import tracemalloc

    def peak(count):
        pool = KvPool(PoolSize(64, 2000, 6000, 64, 1024), Policy("window"))
        engine = Engine(pool, Rates(), 1, 1)
        stream = (Request(0.5 * i, 6000 + 64 * (i % 50), 300, (f"p{i % 9}", f"q{i}"), 512) for i in range(count))
        tracemalloc.start()
        outcome = engine.run(stream)
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert outcome.finished == count
        return highest

    peak(50)
    short, long = peak(300), peak(1200)
    assert long < short + 100_000

    pool = KvPool(PoolSize(64, 2000, 6000, 64, 1024), Policy("window"))
    outcome = Engine(pool, Rates(), 1, 1).run(Request(0.5 * i, 12_000, 300) for i in range(600))
    assert outcome.page_events_per_s > 50_000


def test_setups_refuse_what_is_no_policy():
    with pytest.raises(InputError):
        Policy("warm")


def measured_table(folder):
    """The rows of the committed runs as docs/simulate.md shows them."""
    lines = [
        "| trace | device | codec | policy | delayed | mean wait s | p99 wait s | resident tokens (mean) | "
        "peak bytes | pages retired | bytes moved | page events/s |",
        "| :-- | --: | :-- | :-- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        for row in document["rows"]:
            codec = "-" if row["policy"] == "none" else ", ".join(document["run"]["codecs"])
            lines.append(
                f"| {document['run']['trace']} | {row['device_bytes'] / 2**30:.2f} GiB | {codec} | {row['policy']} | "
                f"{row['delayed']:,} | {row['wait_mean_s']:.2f} | {row['wait_p99_s']:.2f} | "
                f"{row['mean_tokens']:,.0f} | {row['peak_device_bytes']:,} | {row['retired']:,} | "
                f"{row['moved_bytes'] / 1e9:,.0f} GB | "
                f"{row['page_events_per_s']:,.0f} |"
            )
    return "\n".join(lines) + "\n"


def test_the_measured_table_is_what_the_files_say():
    assert measured_table(ROOT / "results" / "simulate") in (ROOT / "docs" / "simulate.md").read_text()
