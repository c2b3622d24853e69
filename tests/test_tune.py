"""Tuning: what the channels say, the allocation, the calibration file, the command."""

import json

import numpy as np
import pytest
import torch
from clirun import ROOT, in_process
from poolkit import make_dump

from coldkv.backends import TorchBackend
from coldkv.calibration import METADATA_KEY, open_calibration
from coldkv.codecs import parse_codec
from coldkv.errors import InputError
from coldkv.geometry import Geometry
from coldkv.tiers import dequantize, quantize
from coldkv.tuning.allocation import Point, allocate, lower_hull
from coldkv.tuning.channels import key_channels

SAMPLE = ROOT / "coldkv" / "data" / "sample.safetensors"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """The sample tuned for two budgets: (path for 3x, path for 6x, what the command printed)."""
    from click.testing import CliRunner

    from coldkv.commands.tune import command

    folder = tmp_path_factory.mktemp("tune")
    done = CliRunner().invoke(
        command,
        [str(SAMPLE), "-o", str(folder / "c.safetensors"), "--ratio", "3", "--ratio", "6", "--layers", "2,5", "--json"],
    )
    assert done.exit_code == 0, done.output
    return folder / "c-3.safetensors", folder / "c-6.safetensors", json.loads(done.stdout)


def test_weights_follow_the_queries_and_means_leave_the_sink_out():
    values = torch.ones(8, 2, 4)
    values[:2] = 100
    queries = torch.tensor([1.0, 2.0, 4.0, 8.0]).expand(3, 4, 4).clone()
    queries[:, 2:] = 5.0  # the second head's group
    found = key_channels(values, queries, skip=2)
    assert torch.equal(found.mean, torch.ones(2, 4))
    assert torch.allclose(found.weight[0] * torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.full((4,), 8**0.5))
    assert torch.allclose(found.weight[1], torch.ones(4))
    assert key_channels(values, None, skip=99).mean.max() > 1


def test_a_channel_that_no_query_reads_keeps_a_finite_step():
    queries = torch.ones(4, 1, 8)
    queries[..., 3] = 0
    weight = key_channels(torch.randn(16, 1, 8), queries, skip=0).weight
    assert weight.isfinite().all() and weight[0, 3] == weight.max()


def test_allocation_spends_where_a_byte_buys_most():
    steep = [Point(10, 100, 0), Point(20, 10, 1), Point(30, 9, 2)]
    flat = [Point(10, 5, 0), Point(20, 4, 1)]
    chosen = allocate({"a": steep, "b": flat}, 30)
    assert (chosen["a"].step, chosen["b"].step) == (1, 0)
    chosen = allocate({"a": steep, "b": flat}, 50)
    assert (chosen["a"].step, chosen["b"].step) == (2, 1)
    with pytest.raises(InputError, match="at least 20 bytes"):
        allocate({"a": steep, "b": flat}, 19)


def test_allocation_is_the_best_on_small_hulls_and_never_over_budget():
    from itertools import product

    rng = np.random.default_rng(3)
    for _ in range(50):
        curves = {
            key: lower_hull(
                [
                    Point(float(c), float(e), i)
                    for i, (c, e) in enumerate(zip(*rng.integers(1, 99, (2, 6)), strict=True))
                ]
            )
            for key in "abc"
        }
        budget = float(rng.integers(sum(h[0].cost for h in curves.values()), 250))
        chosen = allocate(curves, budget)
        spent = sum(p.cost for p in chosen.values())
        assert spent <= budget
        error = sum(p.error for p in chosen.values())
        # nothing that costs as little is better
        assert not any(
            sum(p.cost for p in other) <= spent and sum(p.error for p in other) < error - 1e-9
            for other in product(*curves.values())
        )


def test_the_file_says_what_was_asked_and_meets_the_budget(calibrated):
    three, six, printed = calibrated
    for path, ratio, report in ((three, 3, printed[0]), (six, 6, printed[1])):
        meta = open_calibration(path).meta
        assert (
            meta["ratio"] == ratio and set(meta["steps"]) == {"2", "5"} and meta["tiers"] == {"2": "int8", "5": "int8"}
        )
        assert report["ratio"] >= ratio and report["hot_bytes"] == 2 * 2 * 10 * 16896
    finer, coarser = (open_calibration(p).meta["steps"] for p in (three, six))
    assert sum(s for layer in finer.values() for s in layer.values()) < sum(
        s for layer in coarser.values() for s in layer.values()
    )


def test_a_calibrated_codec_measures_at_its_budget_and_beats_an_uncalibrated_one(calibrated, capsys):
    _, six, _ = calibrated
    done = in_process(
        capsys, "measure", SAMPLE, "--layers", "2,5", "--json", "--codec", f"ecq:calib={six}", "--codec", "ecq:step=14"
    )
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    k = {row["codec"].split(":")[1][:5]: row for row in rows if row["plane"] == "k" and row["layer"] == 5}
    assert k["calib"]["invalid_pages"] == 0
    per_byte = {name: row["logit_rmse"] ** 2 * row["cold_bytes"] for name, row in k.items()}
    assert per_byte["calib"] < 0.7 * per_byte["step="]
    total = {}
    for row in rows:
        hot, cold = total.get(row["codec"], (0, 0))
        total[row["codec"]] = hot + row["hot_bytes"], cold + row["cold_bytes"]
    assert total[f"ecq:calib={six}"][0] / total[f"ecq:calib={six}"][1] >= 6


def test_slots_of_another_calibration_are_refused(calibrated):
    three, six, _ = calibrated
    geometry, backend = Geometry(256, 64, 1), TorchBackend()
    hot = quantize("int8", torch.randn(2, 64, 256))
    writer, reader = (
        parse_codec(f"ecq:slot_bytes=8192,calib={p}").bind(2, "k", "int8", geometry) for p in (three, six)
    )
    slots, valid = backend.encode(writer, hot, geometry)
    assert valid.all() and backend.decode(writer, slots, geometry, "int8").isfinite().all()
    with pytest.raises(InputError, match="calibration byte"):
        backend.decode(reader, slots, geometry, "int8")


def test_bad_calibration_files_are_one_line(tmp_path, calibrated, capsys):
    three = calibrated[0]
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(three.read_bytes()[:100])
    for path, words in (
        (tmp_path / "none.safetensors", "cannot be read"),
        (broken, "expected a file written by coldkv tune"),
        (SAMPLE, "expected a file written by coldkv tune"),
    ):
        done = in_process(capsys, "measure", "--sample", "--codec", f"ecq:calib={path}")
        assert done.code == 2 and words in done.err and str(path) in done.err and len(done.err.splitlines()) <= 2
    done = in_process(capsys, "measure", "--sample", "--codec", f"ecq:calib={three}")  # has two layers only
    assert done.code == 2 and "layers." in done.err
    with pytest.raises(InputError, match="expected sha256"):
        open_calibration(three, "0" * 64)


def test_calibration_tensors_are_checked(tmp_path, calibrated):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(calibrated[0])
    meta = {METADATA_KEY: json.dumps(open_calibration(calibrated[0]).meta)}
    geometry = Geometry(256, 64, 1)
    for name, change, words in (
        ("layers.2.k.mean", lambda a: a[:, :-1].copy(), "expected float32"),
        ("layers.2.k.weight", lambda a: -a, "above 0"),
        ("layers.2.k.mean", lambda a: a * np.nan, "finite"),
        ("layers.2.k.prior", lambda a: a.astype(np.float32), "expected int16"),
    ):
        path = tmp_path / "c.safetensors"
        path.unlink(missing_ok=True)
        save_file({**tensors, name: change(tensors[name])}, path, metadata=meta)
        with pytest.raises(InputError, match=words):
            open_calibration(path).plane(2, "k", geometry)


def test_a_dump_without_queries_is_refused(tmp_path, capsys):

    path = tmp_path / "d.safetensors"
    make_dump(path, {0: {"tokens": 128, "heads": 1, "head_dim": 64, "queries": False}}, page_tokens=64)
    done = in_process(capsys, "tune", path, "-o", tmp_path / "c.safetensors")
    assert done.code == 2 and "layers.0.q" in done.err and not (tmp_path / "c.safetensors").exists()


def test_centring_takes_a_bias_out_of_every_raw_codec(calibrated, capsys):
    three = calibrated[0]
    common = ("measure", SAMPLE, "--layers", "2,5", "--json")
    plain = in_process(capsys, *common, "--codec", "e2m1-g64", "--codec", "e2m1-g16")
    centred = in_process(capsys, *common, "--center-k", three)
    assert plain.code == centred.code == 0, centred.err
    rows = {(r["codec"].split(":")[0], r["layer"], r["plane"]): r for r in json.loads(plain.out)["rows"]}
    found = {(r["codec"].split(":")[0], r["layer"], r["plane"]): r for r in json.loads(centred.out)["rows"]}
    assert set(rows) == set(found)
    for key, row in found.items():
        assert row["cold_bytes"] == rows[key]["cold_bytes"]
        if key[2] == "v":
            assert row["nmse_hot"] == rows[key]["nmse_hot"]
        else:
            assert row["nmse_hot"] < rows[key]["nmse_hot"] and "center_k=" in row["codec"]


def test_centred_pools_come_back(tmp_path, calibrated, capsys):
    pool, out = tmp_path / "p.ckv", tmp_path / "r.safetensors"
    for args in (
        ("pack", SAMPLE, "-o", pool, "--layers", "2,5", "--center-k", calibrated[0], "--codec", "e2m1-g64"),
        ("verify", pool, "--against", SAMPLE),
        ("restore", pool, "-o", out),
    ):
        done = in_process(capsys, *args)
        assert done.code == 0, done.err


def test_backends_agree_on_centred_slots(calibrated):
    from coldkv.backends import get_backend

    geometry = Geometry(256, 64, 1)
    hot = quantize("int8", torch.randn(3, 64, 256) + 4 * torch.randn(256))
    codec = parse_codec(f"e2m1-g16:center_k={calibrated[0]}").bind(2, "k", "int8", geometry)
    results = []
    for name in ("torch", "cpu"):
        backend = get_backend(name)
        slots, _ = backend.encode(codec, hot, geometry)
        restored = backend.restore(codec, slots, geometry, "int8")
        values = backend.decode(codec, slots, geometry, "int8")
        assert torch.equal(dequantize(restored), values)
        results.append((slots, values))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
