"""Codecs whose slot size follows from the data, and codecs that know their layer: through measure, pool and bench."""

import zlib

import numpy as np
import pytest
import torch
from poolkit import EVERYTHING_COLD, make_dump, pack_dump, restored_tensors

from coldkv import codecs
from coldkv.backends import TorchBackend
from coldkv.bench import run_bench
from coldkv.codecs.sized import NEVER, SizedCodec
from coldkv.dumps import open_dump
from coldkv.errors import InputError, ToolError
from coldkv.geometry import Geometry
from coldkv.measure import choose_codecs, measure, plan
from coldkv.pool.against import compare
from coldkv.pool.file import PoolFile
from coldkv.pool.policy import Policy
from coldkv.pool.verify import verify
from coldkv.table import assign, uniform_table
from coldkv.tiers import HotPlane

GEOMETRY = Geometry(32, 16)


class Deflate(SizedCodec):
    """u32 length and the deflated bf16 words of a head-page. Negative values are not taken, for the sake of the test.
    Each slot begins with the layer and plane it was bound to, and a reader bound elsewhere refuses it."""

    id, version, formats, exact = "deflate", 1, ("bf16",), True

    def __init__(self, slot_bytes=None, place=None):
        super().__init__(slot_bytes)
        self.place = place

    @property
    def config(self):
        return super().config | ({} if self.place is None else {"place": self.place})

    def bind(self, layer, plane, fmt, geometry):
        assert fmt == "bf16" and geometry.kv_heads == 2
        return Deflate(self._stride, [layer, plane])

    def _packed(self, plane):
        pages = plane.codes.view(torch.int16).flatten(1).numpy()
        return [b"" if (page < 0).any() else zlib.compress(page.tobytes()) for page in pages]

    def lengths_torch(self, plane, geometry):
        return torch.tensor([6 + len(p) if p else NEVER for p in self._packed(plane)], dtype=torch.int32)

    def encode_torch(self, plane, geometry):
        packed, stride = self._packed(plane), self.slot_bytes(geometry, plane.format)
        valid = torch.tensor([int(bool(p) and 6 + len(p) <= stride) for p in packed], dtype=torch.int32)
        slots = torch.zeros((len(packed), stride), dtype=torch.uint8)
        for slot, data, ok in zip(slots, packed, valid, strict=True):
            if ok:
                record = self._mark() + len(data).to_bytes(4, "little") + data
                slot[: len(record)] = torch.tensor(list(record), dtype=torch.uint8)
        return slots, valid

    def _mark(self):
        layer, plane = self.place
        return bytes([layer, ord(plane)])

    def restored_format(self, fmt):
        return fmt

    def restore_torch(self, slots, geometry, fmt):
        pages = []
        for slot in slots.numpy():
            size = int.from_bytes(slot[2:6].tobytes(), "little")
            words = np.frombuffer(zlib.decompress(slot[6 : 6 + size].tobytes()), "<i2").copy()
            pages.append(torch.from_numpy(words).view(torch.bfloat16).reshape(geometry.page_tokens, geometry.head_dim))
        return HotPlane(fmt, torch.stack(pages), None, geometry.head_dim)

    def decode_torch(self, slots, geometry, fmt):
        return self.restore_torch(slots, geometry, fmt).codes.float()

    def check_slots(self, slots, geometry, fmt):
        bad = (slots[:, :2] != np.frombuffer(self._mark(), np.uint8)).any(axis=1)
        return [(int(i), f"mark: expected {self.place}") for i in np.flatnonzero(bad)]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(codecs._codec_classes(), "deflate", Deflate)


def dump(tmp_path, noisy=(), negative=(), pages=9):
    """Two layers, two heads; pages of few values deflate well, `noisy` ones (layer, plane, page, head) badly."""

    def change(tensors):
        g = torch.Generator().manual_seed(3)
        for name in list(tensors):
            levels = torch.randint(0, 4, tensors[name].shape, generator=g)
            tensors[name] = levels.to(torch.bfloat16)
        for group, make in ((noisy, lambda t: torch.rand(t.shape, generator=g)), (negative, lambda t: t - 9)):
            for layer, plane, page, head in group:
                part = tensors[f"layers.{layer}.{plane}"][16 * page : 16 * page + 16, head]
                part.copy_(make(part))

    shape = {"tokens": 16 * pages + 5}
    return make_dump(tmp_path / "d.safetensors", {0: shape, 1: shape}, change=change)


def rows_of(path, *texts):
    with open_dump(path) as opened:
        assignment = assign(uniform_table("bf16"), [0, 1])
        chosen = choose_codecs([codecs.parse_codec(text) for text in texts], [assignment])
        return measure(plan(opened, "d", assignment, chosen), TorchBackend())[0]


def test_measure_chooses_a_stride_per_plane_and_counts_the_rest_as_hot(tmp_path):
    dump(tmp_path, noisy=[(0, "v", 4, 1)], negative=[(1, "k", 2, 0)])
    rows = rows_of(tmp_path / "d.safetensors", "deflate")
    assert {row["codec"] for row in rows} == {"deflate"}  # one label, whatever was chosen and bound
    hot = 16 * 32 * 2
    with open_dump(tmp_path / "d.safetensors") as opened:
        for row in rows:
            words = opened.layer(row["layer"]).planes[row["plane"]].read(0, 144).view(torch.int16)
            pages = words.reshape(9, 16, 2, 32).transpose(1, 2)
            packed = {(p, h): 6 + len(zlib.compress(pages[p, h].numpy().tobytes())) for p in range(9) for h in (0, 1)}
            refused = {("v", 0): {(4, 1)}, ("k", 1): {(2, 0)}}.get((row["plane"], row["layer"]), set())
            stride = -(-max(size for page, size in packed.items() if page not in refused) // 16) * 16
            bad = sum(head == row["head"] for _, head in refused)
            assert row["invalid_pages"] == bad
            assert row["cold_bytes"] == (9 - bad) * stride + bad * hot, row
            assert row["nmse_hot"] == 0


def test_a_size_that_the_user_fixed_is_kept_and_named(tmp_path):
    dump(tmp_path)
    rows = rows_of(tmp_path / "d.safetensors", "deflate:slot_bytes=480", "deflate")
    assert {row["codec"] for row in rows} == {"deflate:slot_bytes=480", "deflate"}
    assert {row["cold_bytes"] for row in rows if row["codec"] != "deflate"} == {9 * 480}


def test_a_codec_without_lengths_is_read_once(tmp_path, monkeypatch):
    dump(tmp_path)
    from coldkv import measure as module

    passes = []
    real = module.plane_chunks
    monkeypatch.setattr(module, "plane_chunks", lambda *a, **k: passes.append(1) or real(*a, **k))
    rows_of(tmp_path / "d.safetensors", "e2m1-g64", "deflate:slot_bytes=480")
    assert len(passes) == 4
    rows_of(tmp_path / "d.safetensors", "e2m1-g64", "deflate")
    assert len(passes) == 4 + 8


def test_a_pool_records_strides_and_binding_and_reads_back(tmp_path):
    tensors = dump(tmp_path, negative=[(1, "k", 2, 0)])
    pool = tmp_path / "p.ckv"
    report = pack_dump(tmp_path / "d.safetensors", pool, table="0-9:bf16", codecs=["deflate"])
    assert report.counts["invalid"] == 2 and report.counts["cold"] == 16
    assert any("1 pages" in line and "layer 1, plane k, page 2, head 0" in line for line in report.warnings)
    with PoolFile(pool) as opened:
        strides = {(layer.index, n): p.stride for layer in opened.layers for n, p in layer.planes.items()}
        assert len(set(strides.values())) > 1 and all(stride < 480 for stride in strides.values())
        for layer in opened.layers:
            for name, plane in layer.planes.items():
                assert plane.codec.config == {"slot_bytes": plane.stride, "place": [layer.index, name]}
            assert layer.pitch == 2 * sum(plane.stride for plane in layer.planes.values())
    assert verify(str(pool)).problems == []
    found, _ = restored_tensors(pool, tmp_path / "r.safetensors")
    for name, dense in tensors.items():
        assert torch.equal(found[name], dense.float()), name
    with PoolFile(pool) as opened, open_dump(tmp_path / "d.safetensors") as source:
        assert compare(opened, source, TorchBackend()).problems == []


def test_a_pool_prefers_larger_slots_to_a_page_that_stays_hot_everywhere(tmp_path):
    """One record more than doubles the stride of its plane; hot it would cost the page in both layers and planes."""
    dump(tmp_path, noisy=[(0, "v", 4, 1)], pages=6)
    pool = tmp_path / "p.ckv"
    report = pack_dump(tmp_path / "d.safetensors", pool, table="0-9:bf16", codecs=["deflate"])
    assert report.counts["cold"] == 12 and "invalid" not in report.counts
    assert [r["invalid_pages"] for r in rows_of(tmp_path / "d.safetensors", "deflate")] == [0, 0, 0, 1, 0, 0, 0, 0]


def test_a_plan_without_cold_pages_packs(tmp_path):
    dump(tmp_path)
    pool = tmp_path / "p.ckv"
    policy = Policy(keep_tokens=10_000)
    report = pack_dump(tmp_path / "d.safetensors", pool, table="0-9:bf16", codecs=["deflate"], policy=policy)
    assert report.counts["cold"] == 0 and verify(str(pool)).ok


def test_a_slot_as_large_as_what_it_replaces_is_said(tmp_path):
    dump(tmp_path)
    for size, word in ((1024, "as large as"), (2048, "larger than")):
        report = pack_dump(
            tmp_path / "d.safetensors", tmp_path / "p.ckv", table="0-9:bf16", codecs=[f"deflate:slot_bytes={size}"],
            policy=EVERYTHING_COLD,
        )  # fmt: skip
        assert f"layers 0-1: a deflate slot of {size} bytes is {word} the 1024 bytes in bf16 it replaces" in (
            report.warnings
        )


@pytest.mark.parametrize(
    "lengths,cost,expected",
    [
        ([100] * 9 + [900], None, 112),  # one page hot is cheaper than nine slots eight times as large
        ([100] * 9 + [900], 99_999, 912),  # not if it costs that much
        ([100] * 9 + [NEVER], 99_999, 112),  # what can never fit has no say
        ([1000, 1000], None, 1008),
        ([1024, 2000], None, 16),  # a slot saves nothing over 1,024 hot bytes: refuse all
        ([], None, 16),
        ([NEVER], None, 16),
    ],
)
def test_the_stride_is_the_cheapest_in_all(lengths, cost, expected):
    codec = Deflate()
    found = codec.choose_stride(np.array(lengths, dtype=np.int32), GEOMETRY, "bf16", overflow_bytes=cost)
    assert found == expected


def test_sizes_that_cannot_be_are_errors():
    for size in (0, -16, 100, 1.5, True, "x"):
        with pytest.raises(InputError, match="slot_bytes: expected a positive multiple of 16"):
            Deflate(size)
    with pytest.raises(ToolError, match="not chosen yet"):
        Deflate().slot_bytes(GEOMETRY, "bf16")
    assert Deflate().with_stride(64).label == "deflate" and Deflate(64).with_stride(80).label == "deflate:slot_bytes=64"


def test_bench_times_lengths_too(monkeypatch):
    monkeypatch.setattr(Deflate, "bind", lambda self, *_: self)
    monkeypatch.setattr(Deflate, "_mark", lambda self: b"xx")
    monkeypatch.setattr(
        Deflate, "_packed", lambda self, p: [zlib.compress(x.numpy().tobytes()) for x in p.codes.view(torch.int16)]
    )
    document = run_bench(
        codec_ids=["deflate"], tier="bf16", backend="torch", head_dim=32, page_tokens=16, head_pages=8, repeat=1
    )
    rows = {row["op"]: row for row in document["rows"] if row["codec"] == "deflate"}
    assert set(rows) == {"lengths", "encode", "decode", "restore"}
    assert rows["lengths"]["bytes"] == 8 * (16 * 32 * 2 + 4)
