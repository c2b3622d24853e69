"""pack -> restore against the oracle, bit for bit: shapes, tiers, codecs, policies, sources."""

import dataclasses

import pytest
import torch
from poolkit import (
    EVERYTHING_COLD,
    check_restored,
    cold_pages,
    expected_plane,
    make_dump,
    pack_dump,
    reseal,
    restored_tensors,
    same_bits,
    values,
)

from coldkv.backends import CpuBackend, TorchBackend
from coldkv.codecs import get_codec
from coldkv.dumps import open_dump
from coldkv.errors import InputError, ToolError
from coldkv.formats import tier_formats
from coldkv.measure import measure, plan
from coldkv.metrics import PairSums
from coldkv.pool.file import PoolFile
from coldkv.pool.policy import Policy
from coldkv.pool.verify import verify
from coldkv.table import assign, uniform_table
from coldkv.tiers import dequantize, quantize

SHAPES = [  # head_dim, heads, page_tokens, tokens
    (64, 1, 16, 16 * 5 + 3),
    (80, 2, 16, 16 * 4),
    (96, 4, 32, 32 * 4 + 31),
    (128, 8, 16, 16 * 3 + 1),
    (192, 2, 64, 64 * 3 + 7),
    (256, 4, 64, 64 * 3),
    (512, 1, 16, 16 * 4 + 9),
    (576, 2, 256, 256 * 2 + 135),
    (34, 3, 16, 50),
]


@pytest.mark.parametrize(
    "head_dim,heads,page_tokens,tokens,codec_id",
    [(*shape, "e2m1-g64") for shape in SHAPES] + [(*shape, "e2m1-g16") for shape in (SHAPES[0], SHAPES[2], SHAPES[-1])],
)
def test_restore_gives_what_the_oracle_gives(tmp_path, head_dim, heads, page_tokens, tokens, codec_id):
    shape = {"tokens": tokens, "heads": heads, "head_dim": head_dim}
    tensors = make_dump(tmp_path / "d.safetensors", {0: shape, 3: shape}, page_tokens=page_tokens)
    pool = tmp_path / "p.ckv"
    policy = Policy(keep_tokens=page_tokens // 2, sink_tokens=1)
    pack_dump(tmp_path / "d.safetensors", pool, codecs=[codec_id], policy=policy)
    assert verify(str(pool)).problems == []
    pages = list(range(1, (tokens - page_tokens // 2) // page_tokens))
    assert pages and cold_pages(pool, 0) == cold_pages(pool, 3) == pages
    found, report = restored_tensors(pool, tmp_path / "r.safetensors")
    codec = get_codec(codec_id)
    check_restored(
        tensors, found, pool, table_tiers={0: "int8", 3: "int8"}, codec_of=lambda fmt: codec, page_tokens=page_tokens
    )
    assert report.from_slots == 2 * len(pages) and report.inexact == 0


@pytest.mark.parametrize("tier", ["bf16", "fp16", "int8", "fp8", "nvfp4", "iso3"])
@pytest.mark.parametrize("codec_id", ["e2m1-g16", "e2m1-g64", "native"])
def test_every_tier_with_every_codec(tmp_path, tier, codec_id):
    codec = get_codec(codec_id)
    make = {0: {"dtype": torch.float32}, 2: {"dtype": torch.float16}}
    tensors = make_dump(tmp_path / "d.safetensors", make)
    pool = tmp_path / "p.ckv"
    pack_dump(tmp_path / "d.safetensors", pool, table=f"0,2:{tier}", codecs=[codec_id], explicit=False)
    fits = all(codec.fits(fmt) for fmt in tier_formats(tier).values())
    assert bool(cold_pages(pool, 0)) == bool(cold_pages(pool, 2)) == fits
    found, _ = restored_tensors(pool, tmp_path / "r.safetensors")
    check_restored(tensors, found, pool, table_tiers={0: tier, 2: tier}, codec_of=lambda fmt: codec)
    assert verify(str(pool)).ok


def test_a_mixed_table_takes_the_first_codec_that_fits_each_plane(tmp_path):
    tensors = make_dump(tmp_path / "d.safetensors", {0: {}, 1: {}, 2: {}, 5: {}})
    pool = tmp_path / "p.ckv"
    table = {0: "int8", 1: "nvfp4", 2: "iso3", 5: "fp8"}
    text = ",".join(f"{layer}:{tier}" for layer, tier in table.items())
    report = pack_dump(tmp_path / "d.safetensors", pool, table=text, codecs=["e2m1-g16", "native"])
    with PoolFile(pool) as opened:
        ids = {x.index: [p.codec.id for p in x.planes.values()] for x in opened.layers}
    assert ids == {0: ["e2m1-g16"] * 2, 1: ["native"] * 2, 2: ["native"] * 2, 5: ["e2m1-g16"] * 2}
    assert report.counts == {"cold": 24, "recent": 4}
    found, _ = restored_tensors(pool, tmp_path / "r.safetensors")
    pick = {"nvfp4": "native", "iso3": "native"}
    check_restored(tensors, found, pool, table_tiers=table, codec_of=lambda fmt: get_codec(pick.get(fmt, "e2m1-g16")))


def test_layers_that_no_codec_fits_stay_hot_and_are_named(tmp_path):
    make_dump(tmp_path / "d.safetensors", {0: {}, 1: {}, 2: {}})
    pool = tmp_path / "p.ckv"
    report = pack_dump(tmp_path / "d.safetensors", pool, table="0:int8,1-2:nvfp4")
    assert report.counts == {"cold": 6, "no_codec": 14, "recent": 1}
    assert any(line.startswith("layers 1-2 stay hot: tier nvfp4") for line in report.warnings)
    assert cold_pages(pool, 1) == [] and verify(str(pool)).ok
    with pytest.raises(InputError, match="codec native: fits planes of nvfp4, iso3, but the layers have int8"):
        pack_dump(tmp_path / "d.safetensors", pool, table="0-2:int8", codecs=["native"])


def test_restored_values_have_the_errors_that_measure_reports(tmp_path):
    make_dump(tmp_path / "d.safetensors", {0: {"tokens": 96}, 1: {"tokens": 96}})
    pack_dump(tmp_path / "d.safetensors", tmp_path / "p.ckv")
    found, _ = restored_tensors(tmp_path / "p.ckv", tmp_path / "r.safetensors")
    backend = TorchBackend()
    with open_dump(tmp_path / "d.safetensors") as dump:
        tasks = plan(dump, "d", assign(uniform_table("int8"), [0, 1]), [get_codec("e2m1-g16")])
        rows, _ = measure(tasks, backend)
        for row in rows:
            dense = dump.layer(row["layer"]).planes[row["plane"]].read(0, 96).float()
            ours = found[f"layers.{row['layer']}.{row['plane']}"]
            pages = [x[:, row["head"]].reshape(6, 16, 32) for x in (dense, ours)]
            sums = PairSums(1, 32)
            sums.add(backend, *pages)
            assert sums.nmse(0) == pytest.approx(row["nmse_ref"], rel=1e-12) and row["nmse_ref"] > 0


def test_layers_of_the_same_length_go_cold_together_or_not_at_all(tmp_path):
    # lengths 100 and 60; page 2 of layer 3 holds a value that e2m1-g16 refuses
    def spoil(tensors):
        tensors["layers.3.v"][2 * 16 + 5, 1, 7] = 2.0**121

    layers = {0: {"tokens": 100}, 1: {"tokens": 60}, 3: {"tokens": 100}}
    tensors = make_dump(tmp_path / "d.safetensors", layers, change=spoil)
    pool = tmp_path / "p.ckv"
    report = pack_dump(tmp_path / "d.safetensors", pool, table="0-3:bf16")
    assert cold_pages(pool, 0) == cold_pages(pool, 3) == [0, 1, 3, 4, 5]
    assert cold_pages(pool, 1) == [0, 1, 2]
    assert report.counts == {"cold": 13, "invalid": 2, "recent": 3}
    (warning,) = [line for line in report.warnings if "cannot hold" in line]
    assert "layer 3, plane v, page 2, head 1" in warning and "100 tokens" in warning
    assert verify(str(pool)).ok
    found, _ = restored_tensors(pool, tmp_path / "r.safetensors")
    codec = get_codec("e2m1-g16")
    check_restored(tensors, found, pool, table_tiers=dict.fromkeys(layers, "bf16"), codec_of=lambda fmt: codec)
    # the freed slot went to the next page: slots are dense
    with PoolFile(pool) as opened:
        assert opened.rows("layers.0.block_table", 0, 7).tolist() == [-2, -3, 0, -4, -5, -6, 1]


def test_sliding_and_short_layers_count_their_own_tokens(tmp_path):
    layers = {
        0: {"tokens": 160},
        1: {"tokens": 64, "kind": "sliding", "window": 64},  # kept only its last tokens: no sinks in it
        2: {"tokens": 40},
        3: {"tokens": 7},  # less than a page
        4: {"tokens": 160, "kind": "mla", "head_dim": 576, "heads": 1},
    }
    tensors = make_dump(tmp_path / "d.safetensors", layers)
    pool = tmp_path / "p.ckv"
    policy = Policy(keep_tokens=24, sink_tokens=17)
    pack_dump(tmp_path / "d.safetensors", pool, table="0-4:int8", policy=policy)
    assert cold_pages(pool, 0) == cold_pages(pool, 4) == list(range(2, 8))
    assert cold_pages(pool, 1) == [0, 1]
    assert cold_pages(pool, 2) == cold_pages(pool, 3) == []
    found, _ = restored_tensors(pool, tmp_path / "r.safetensors")
    codec = get_codec("e2m1-g16")
    check_restored(tensors, found, pool, table_tiers=dict.fromkeys(layers, "int8"), codec_of=lambda fmt: codec)
    assert "layers.4.v" not in found
    with open_dump(tmp_path / "d.safetensors") as before, open_dump(tmp_path / "r.safetensors") as after:
        for old, new in zip(before.layers, after.layers, strict=True):
            assert (old.kind, old.window, old.scaling, old.tokens) == (new.kind, new.window, new.scaling, new.tokens)
            assert torch.equal(old.positions(), new.positions())


def test_queries_positions_and_metadata_are_carried_over(tmp_path):
    positions = torch.arange(100) * 3 + 7
    layers = {0: {"queries": True, "positions": positions}, 1: {"queries": True}, 2: {}}
    make_dump(tmp_path / "d.safetensors", layers, meta={"rope": {"theta": 1e4}, "text_sha256": "ab", "note": "é"})
    pack_dump(tmp_path / "d.safetensors", tmp_path / "p.ckv")
    restored_tensors(tmp_path / "p.ckv", tmp_path / "r.safetensors", dtype="bf16")
    with open_dump(tmp_path / "d.safetensors") as before, open_dump(tmp_path / "r.safetensors") as after:
        for key in ("model", "rope", "text_sha256", "note", "page_tokens"):
            assert before.meta[key] == after.meta[key]
        assert after.meta["restored"]["dump_sha256"] == before.sha256()
        for old, new in zip(before.layers, after.layers, strict=True):
            assert (old.queries() is None) == (new.queries() is None) == (old.index == 2)
            if old.queries():
                assert all(torch.equal(a, b) for a, b in zip(old.queries(), new.queries(), strict=True))
            assert torch.equal(old.positions(), new.positions())


def test_a_dump_of_hot_planes_keeps_its_codes(tmp_path):
    dense = {name: values(50, 2, 32, seed) for seed, name in enumerate("kv")}
    hot = {name: quantize("int8", plane.float().reshape(100, 1, 32)) for name, plane in dense.items()}
    tensors = {}

    def as_codes(found):
        found.clear()
        for name, plane in hot.items():
            found[f"layers.0.{name}.codes"] = plane.codes.reshape(50, 2, 32)
            found[f"layers.0.{name}.scales"] = plane.scales.reshape(50, 2, 1)

    make_dump(tmp_path / "d.safetensors", {0: {}}, change=as_codes, meta={"formats": {"0": {"k": "int8", "v": "int8"}}})
    pack_dump(tmp_path / "d.safetensors", tmp_path / "p.ckv", policy=Policy(name="none"))
    found, report = restored_tensors(tmp_path / "p.ckv", tmp_path / "r.safetensors")
    assert report.from_slots == 0 and report.from_hot == 4
    for name, plane in hot.items():
        tensors[name] = dequantize(plane).reshape(50, 2, 32)
        assert same_bits(found[f"layers.0.{name}"], tensors[name])
    with pytest.raises(InputError, match="expected values or a plane in format nvfp4"):
        pack_dump(tmp_path / "d.safetensors", tmp_path / "q.ckv", table="0:nvfp4", codecs=["native"])


def test_host_replicas_win_and_their_budget_holds(tmp_path):
    layers = {0: {"tokens": 100}, 1: {"tokens": 100}, 2: {"tokens": 64, "heads": 1}}
    tensors = make_dump(tmp_path / "d.safetensors", layers)
    page_bytes = 2 * 2 * 2 * 16 * (32 + 2)  # layers 0 and 1, planes, heads, tokens, int8 codes and one fp16 scale
    small = 2 * 16 * (32 + 2)
    pool = tmp_path / "p.ckv"
    policy = Policy("host", keep_tokens=0, sink_tokens=16, host_bytes=3 * page_bytes + 2 * small)
    report = pack_dump(tmp_path / "d.safetensors", pool, policy=policy)
    # pages 1..5 of the long layers: 3 fit; the rest of the budget holds 2 of pages 1..3 of the short one
    assert [report.plans[i].replicas for i in (0, 1, 2)] == [[1, 2, 3], [1, 2, 3], [1, 2]]
    assert report.replicas_missed == 2 * 2 + 1 and report.replica_bytes <= policy.host_bytes
    assert verify(str(pool)).ok
    found, counts = restored_tensors(pool, tmp_path / "r.safetensors")
    assert (counts.from_slots, counts.from_replicas) == (5, 8)
    codec = get_codec("e2m1-g16")
    for name, dense in tensors.items():
        layer = int(name.split(".")[1])
        without = [page for page in cold_pages(pool, layer) if page not in report.plans[layer].replicas]
        assert same_bits(found[name], expected_plane(dense, "int8", codec, 16, without))


def test_policy_none_keeps_everything_exact(tmp_path):
    tensors = make_dump(tmp_path / "d.safetensors", {0: {}, 1: {}})
    report = pack_dump(tmp_path / "d.safetensors", tmp_path / "p.ckv", table="0-1:bf16", policy=Policy("none"))
    assert report.counts == {"cold": 0, "policy_none": 14}
    found, counts = restored_tensors(tmp_path / "p.ckv", tmp_path / "r.safetensors", dtype="bf16")
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in tensors.items())
    assert counts.inexact == 0 and verify(str(tmp_path / "p.ckv")).ok


def test_rounding_to_a_dtype_is_counted_and_overflow_refused(tmp_path):
    def spoil(tensors):
        tensors["layers.0.k"][33, 1, 3] = 1e6

    make_dump(tmp_path / "d.safetensors", {0: {"dtype": torch.float32}}, change=spoil)
    pack_dump(tmp_path / "d.safetensors", tmp_path / "p.ckv", policy=Policy("none"))
    exact, _ = restored_tensors(tmp_path / "p.ckv", tmp_path / "exact.safetensors")
    rounded, report = restored_tensors(tmp_path / "p.ckv", tmp_path / "r.safetensors", dtype="bf16")
    differing = sum(int((exact[name] != rounded[name]).sum()) for name in exact)
    assert report.inexact == differing > 0 and "--dtype fp32 is exact" in report.warnings[0]
    with pytest.raises(InputError, match="layer 0, plane k, page 2, head 1: a value is too large for fp16"):
        restored_tensors(tmp_path / "p.ckv", tmp_path / "no.safetensors", dtype="fp16")
    assert not (tmp_path / "no.safetensors").exists()


def test_the_pool_is_the_same_file_on_every_backend_and_every_time(tmp_path):
    make_dump(tmp_path / "d.safetensors", {0: {"head_dim": 80}, 1: {"head_dim": 256, "queries": True}})
    backends = [TorchBackend(), TorchBackend()]
    try:
        backends.append(CpuBackend())
    except ToolError:
        pass  # no compiler here: two runs of the oracle must still agree
    files = []
    for number, backend in enumerate(backends):
        path = tmp_path / f"{number}.ckv"
        pack_dump(tmp_path / "d.safetensors", path, table="0:int8,1:nvfp4", codecs=["e2m1-g64"], backend=backend)
        files.append(path.read_bytes())
    assert all(content == files[0] for content in files)


def test_nan_is_named_or_read_as_zero(tmp_path):
    def spoil(tensors):
        tensors["layers.0.v"][40, 1, 3] = float("nan")

    make_dump(tmp_path / "d.safetensors", {0: {}}, change=spoil)
    with pytest.raises(InputError, match=r"layers\.0\.v: expected finite values, found nan at token 40, head 1"):
        pack_dump(tmp_path / "d.safetensors", tmp_path / "p.ckv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.safetensors"]
    pack_dump(tmp_path / "d.safetensors", tmp_path / "p.ckv", nan="zero")
    found, _ = restored_tensors(tmp_path / "p.ckv", tmp_path / "r.safetensors")
    assert found["layers.0.v"][40, 1, 3] == 0


def test_an_unmapped_page_cannot_be_restored(tmp_path):
    make_dump(tmp_path / "d.safetensors", {0: {"tokens": 64}})
    pack_dump(tmp_path / "d.safetensors", tmp_path / "p.ckv", policy=EVERYTHING_COLD)

    def unmap(tensors):
        tensors["layers.0.block_table"][3] = -1
        for name in ("slots", "valid", "slot_crc"):
            tensors[f"layers.0.{name}"] = tensors[f"layers.0.{name}"][:3]

    reseal(tmp_path / "p.ckv", tmp_path / "u.ckv", unmap, relayout=lambda layer: dataclasses.replace(layer, slots=3))
    assert verify(str(tmp_path / "u.ckv")).ok
    with pytest.raises(InputError, match="layer 0, page 3: the page is unmapped"):
        restored_tensors(tmp_path / "u.ckv", tmp_path / "r.safetensors")
