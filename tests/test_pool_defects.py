"""The sixteen defects seen in the code line that coldkv follows, a test each: the wrong formula collides."""

import re
import struct

import numpy as np
import pytest
import torch
from clirun import in_process
from poolbytes import RegionBytes, slot_layout
from poolkit import make_dump
from poolmodel import SIZES, TokenBytes

from coldkv import tiers
from coldkv.backends import TorchBackend, get_backend
from coldkv.codecs import get_codec
from coldkv.codecs.e2m1_g64 import E2m1G64
from coldkv.codecs.rawslot import HEADER, HEADER_BYTES, raw_layout, take_apart
from coldkv.errors import InputError
from coldkv.formats import FORMATS
from coldkv.geometry import Geometry
from coldkv.pool.faults import PoolError, PoolFull
from coldkv.pool.invariants import violations
from coldkv.pool.kvpool import KvPool, PoolSize
from coldkv.pool.layout import entry_slot
from coldkv.pool.policy import Policy
from coldkv.pool.regions import Regions

CODEC = "e2m1-g64"
SEED = slot_layout(3, Geometry(256, 64, 4), {"k": "int8", "v": "int8"}, get_codec(CODEC))
HEADS, STRIDE = 4, 9232


def filled(layers, pages, slots, seed=0, backend=None):
    """Regions whose hot pages hold different values everywhere."""
    regions = Regions(layers, pages, slots, backend or TorchBackend())
    generator = torch.Generator().manual_seed(seed)
    for number, layer in enumerate(regions.layers):
        for name, plane in layer.planes.items():
            n = pages * layer.geometry.kv_heads
            values = torch.randn((n, layer.geometry.page_tokens, layer.geometry.head_dim), generator=generator)
            regions.write(number, name, np.arange(pages), tiers.quantize(plane.format, values))
    return regions


def small(head_dim=32, heads=4, page_tokens=8, index=0, codec=None):
    codec = get_codec(CODEC) if codec is None else codec
    return slot_layout(index, Geometry(head_dim, page_tokens, heads), {"k": "int8", "v": "int8"}, codec)


def records_of(slots, heads=HEADS, planes=2):
    return [(slot, plane, head) for slot in range(slots) for plane in range(planes) for head in range(heads)]


def test_01_slots_are_two_planes_of_all_heads_apart():
    """compress_page wrote at slot*stride."""
    places = {key: SEED.record_offset(key[0], "kv"[key[1]], key[2]) for key in records_of(3)}
    assert places == {(s, p, h): s * 2 * HEADS * STRIDE + p * HEADS * STRIDE + h * STRIDE for s, p, h in places}
    assert len(set(places.values())) == 24 and SEED.pitch == 73_856 and SEED.plane_offset("v") == 36_928
    wrong = {(s, p, h): s * STRIDE + p * HEADS * STRIDE + h * STRIDE for s, p, h in places}
    assert wrong[0, 0, 1] == wrong[1, 0, 0], "head h + 1 of slot s and head h of slot s + 1 share their bytes"

    layer = small()
    regions = filled([layer], pages=3, slots=3)
    assert regions.pack(np.array([0, 1, 2]), np.array([0, 1, 2])).all()
    flat = regions.slots[0].reshape(-1)
    for slot, plane, head in records_of(3):
        hot = regions.hot[0]["kv"[plane]][slot * HEADS + head : slot * HEADS + head + 1]
        alone, _ = get_codec(CODEC).encode_torch(hot, layer.geometry)
        at = layer.record_offset(slot, "kv"[plane], head)
        assert torch.equal(flat[at : at + alone.shape[1]], alone[0])


def test_02_validity_is_indexed_by_slot_plane_and_head():
    """Decode looked at slot + head."""
    words = {key: SEED.word_index(key[0], "kv"[key[1]], key[2]) for key in records_of(4)}
    assert sorted(words.values()) == list(range(32))
    wrong = {(s, h): s + h for s in range(4) for h in range(HEADS)}
    assert wrong[0, 1] == wrong[1, 0]

    regions = filled([small()], pages=2, slots=2)
    regions.pack(np.array([0, 1]), np.array([0, 1]))
    regions.drop(np.array([1], dtype=np.int32))
    assert regions.valid[0].reshape(-1).tolist() == [1] * 8 + [0] * 8
    looked = [int(regions.valid[0].reshape(-1)[1 + head]) for head in range(HEADS)]
    assert looked == [1] * HEADS, "slot + head finds slot 0 valid and reads slot 1, which is not"
    with pytest.raises(PoolError, match="slot 1: expected validity 1, found 0"):
        regions.values(0, "k", np.array([-3], dtype=np.int32))


def test_03_the_validity_of_v_is_not_that_of_the_next_slots_k():
    """Prefill did the same, and later read V's word where the next slot's K has its own."""
    assert SEED.word_index(0, "v", 2) == 1 * HEADS + 2
    wrong_v = (0 + 1) * 2 * HEADS + 2
    assert wrong_v == SEED.word_index(1, "k", 2)

    regions = filled([small()], pages=2, slots=2)
    regions.pack(np.array([0, 1]), np.array([0, 1]))
    regions.valid[0][0, 1, 2] = 0  # V of slot 0, head 2
    assert int(regions.valid[0].reshape(-1)[wrong_v]) == 1
    with pytest.raises(PoolError, match="plane v, head 2: slot 0: expected validity 1, found 0"):
        regions.unpack(np.array([0], dtype=np.int32), np.array([1], dtype=np.int32))


def test_04_strides_count_bytes():
    """Byte strides were added to an int32 pointer: four times too far."""
    layer = small()
    regions = filled([layer], pages=2, slots=5)
    regions.pack(np.array([0]), np.array([1]))
    flat = regions.slots[0].reshape(-1)
    right = layer.record_offset(1, "k", 0)
    assert flat[right : right + 4].view(torch.int32).item() == 0x49384352
    words = flat.view(torch.int32)
    assert int(words[right // 4]) == 0x49384352
    assert int(words[right]) == 0, "the byte offset taken as an index of words ends in slot 4, which is empty"
    assert 4 * right == layer.record_offset(4, "k", 0)


def test_05_scales_of_v_are_pages_apart_not_records():
    """V's scales were scattered with the slot record's pitch as the pitch of a head."""
    layer = small(head_dim=128, page_tokens=16)
    regions = filled([layer], pages=2, slots=1)
    before = regions.hot[0]["v"].scales.clone()
    regions.pack(np.array([0]), np.array([0]))
    regions.unpack(np.array([0], dtype=np.int32), np.array([1], dtype=np.int32))
    restored = regions.hot[0]["v"].scales
    assert torch.equal(restored[:HEADS], before[:HEADS]), "page 0 is not touched"
    expected = get_codec(CODEC).restore_torch(regions.slots[0][0, layer.plane_offset("v") :].reshape(HEADS, -1),
                                              layer.geometry, "int8").scales  # fmt: skip
    assert torch.equal(restored[HEADS:], expected)
    head_bytes, record = restored[0].numel() * 2, layer.planes["v"].stride
    assert record != head_bytes
    at = [HEADS * head_bytes + head * record for head in range(HEADS)]
    assert at[1] >= restored.nbytes, "with the record's pitch head 1 is written past the end of the region"


def test_06_kernels_get_pages_of_the_device():
    """A page-id array on the host was handed to a kernel. Here no kernel takes page ids: what it gets is a batch that
    lies on the backend's device, whichever pages it came from."""
    seen = []

    class Watching(TorchBackend):
        def encode(self, codec, plane, geometry):
            seen.append(("encode", type(plane.codes), plane.codes.device))
            return super().encode(codec, plane, geometry)

        def restore(self, codec, slots, geometry, fmt):
            seen.append(("restore", type(slots), slots.device))
            return super().restore(codec, slots, geometry, fmt)

    backend = Watching()
    regions = filled([small()], pages=4, slots=4, backend=backend)
    regions.pack(np.array([2, 0]), np.array([3, 1]))
    regions.unpack(np.array([3, 1]), np.array([1, 3]))
    assert {what for what, _, _ in seen} == {"encode", "restore"}
    assert all(kind is torch.Tensor and device == backend.device for _, kind, device in seen)
    assert torch.equal(regions.values(0, "k", np.array([1, 3])), regions.values(0, "k", np.array([-5, -3])))


def test_07_restoring_twice_frees_once():
    """Restore called twice read a freed slot and freed it again."""
    pool, row = cold_row()
    slots = pool.slots.count
    assert pool.restore(row) == slots and pool.slots.count == 0
    assert pool.restore(row) == 0 and not violations(pool)
    with pytest.raises(PoolError, match="a slot of .* is freed twice"):
        pool.slots.give(np.array([0], dtype=np.int32))


def test_08_every_layers_validity_counts():
    """Only layer 0's words were looked at."""

    class Picky(E2m1G64):
        def encode_torch(self, plane, geometry):
            slots, valid = super().encode_torch(plane, geometry)
            valid[1] = 0  # head 1 of the first page
            return slots, valid

    layers = [small(index=0), small(index=1, codec=Picky())]
    regions = filled(layers, pages=4, slots=4)
    pool = KvPool(PoolSize(8, 4, 4, 2, 4), Policy("window", 0, 0), regions)
    row = pool.open()
    pool.append(row, 32)
    layer_0 = filled(layers[:1], pages=4, slots=4)
    assert layer_0.pack(np.arange(4), np.arange(4)).all(), "layer 0 finds nothing wrong with any page"
    assert pool.retire(row) == 3
    entries = pool.tables.entries[row]
    assert entries[0] >= 0 and (entries[1:] <= -2).all() and pool.counters.stayed_hot["invalid"] == 1
    assert not violations(pool)


def test_09_a_row_with_nothing_to_do_does_not_end_the_pass():
    """An early return disabled the pass without a word."""
    pool, young, old = KvPool(PoolSize(4, 32, 32, 4, 16), Policy("window", 4, 0)), None, None
    young, old = pool.open(), pool.open()
    pool.append(young, 4)
    pool.append(old, 32)

    def returning_early():
        retired = 0
        for row in (young, old):
            if pool.cold_limit(row) <= pool.frontier[row]:
                return retired
            retired += pool.cold_limit(row)
        return retired

    assert returning_early() == 0
    assert pool.retire(young, old) == 7
    full = KvPool(PoolSize(4, 32, 0, 4, 16), Policy("window", 4, 0))
    row = full.open()
    full.append(row, 32)
    assert full.retire(row) == 0 and full.counters.stayed_hot == {"pool_full": 7}, "and says why nothing went cold"


def test_10_options_mean_the_same_in_any_order(tmp_path, capsys):
    """--cold-policy overwrote --cold-keep-tokens if it came later."""
    make_dump(tmp_path / "d.safetensors", {0: {"tokens": 100}})
    options = [("--cold-policy", "window"), ("--cold-keep-tokens", "40"), ("--cold-sink-tokens", "0")]
    packed = []
    for number, order in enumerate((options, options[::-1])):
        out = tmp_path / f"{number}.ckv"
        flat = [word for option in order for word in option]
        done = in_process(capsys, "pack", tmp_path / "d.safetensors", "-o", out, "--backend", "torch", *flat)
        assert done.code == 0, done.err
        packed.append(out.read_bytes())
    assert packed[0] == packed[1]

    def overwriting(order):
        keep = 128
        for name, value in order:
            keep = 128 if name == "--cold-policy" else int(value) if name == "--cold-keep-tokens" else keep
        return keep

    assert overwriting(options) != overwriting(options[::-1])


def test_11_a_reused_row_starts_at_its_first_page():
    """Release cleared the slots but not the cold frontier: the next sequence's early pages were skipped for ever."""
    pool, row = cold_row()
    stale = int(pool.frontier[row])
    pool.release(row)
    again = pool.open()
    assert again == row and stale > 0
    pool.append(again, 12)
    limit = pool.cold_limit(again)
    assert len(range(stale, limit)) == 0, "from the old frontier on there is nothing to do"
    assert pool.retire(again) == limit > 0 and not violations(pool)


def test_12_a_reused_record_is_hot():
    """A page descriptor that was used again kept the cold flag of its last page."""
    pool, row = cold_row()
    cold = [int(i) for i in pool.ids[row] if i >= 0 and not pool.store.hot(np.array([i]))[0]]
    epochs = pool.store.epoch[cold].copy()
    pool.release(row)
    again = pool.open()
    pool.append(again, 12)
    reused = [int(i) for i in pool.ids[again, :3]]
    assert set(reused) & set(cold)
    assert pool.store.hot(np.array(reused)).all() and not pool.store.pins[reused].any()
    assert (pool.store.epoch[cold] >= epochs).all(), "and no reader can take it for its predecessor"
    assert not violations(pool)


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_13_a_row_of_128_channels_stays_in_its_array(name):
    """Rows of head_dim 128 were decoded as rows of 256 codes, past the caller's arrays."""
    geometry = Geometry(128, 64, 1)
    backend = get_backend(name, threads=1)
    codec = get_codec(CODEC)
    hot = tiers.quantize("int8", torch.randn((2, 64, 128), generator=torch.Generator().manual_seed(1)))
    slots, _ = backend.encode(codec, hot, geometry)
    values = backend.decode(codec, slots, geometry, "int8")
    assert values.shape == (2, 64, 128)
    if name == "cpu":
        guarded = torch.full((2 * 64 * 128 + 256,), 7.0)
        backend.decode(codec, slots, geometry, "int8", out=guarded[: 2 * 64 * 128].view(2, 64, 128))
        assert bool((guarded[2 * 64 * 128 :] == 7.0).all())
        assert torch.equal(guarded[: 2 * 64 * 128].view(2, 64, 128), values)
    last_row = 63 * 128
    assert last_row + 256 > geometry.elements, "a row of 256 from the last row's start ends past the page"


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256, 512, 576])
def test_14_planes_are_as_large_as_their_head_size(head_dim):
    """The extent of a plane was a constant for 256 channels."""
    layer = small(head_dim=head_dim, heads=2, page_tokens=16)
    regions = filled([layer], pages=2, slots=1)
    for plane in regions.hot[0].values():
        assert plane.nbytes == 2 * 2 * FORMATS["int8"].bytes(layer.geometry)
    groups = -(-head_dim // 64)
    assert layer.hot_page_bytes() == 2 * 2 * 16 * (head_dim + 2 * groups)
    fixed = 2 * 2 * 16 * (256 + 2 * 4)
    assert (fixed == layer.hot_page_bytes()) == (head_dim == 256)
    assert regions.pack(np.array([0]), np.array([0])).all()
    regions.unpack(np.array([0], dtype=np.int32), np.array([1], dtype=np.int32))
    cold = regions.values(0, "v", np.array([-2], dtype=np.int32))
    assert torch.equal(cold, regions.values(0, "v", np.array([1], dtype=np.int32)))


@pytest.mark.parametrize("head_dim,page_tokens", [(16, 1), (32, 1), (16, 3), (80, 1), (256, 64)])
def test_15_the_header_has_its_size_whatever_the_record(head_dim, page_tokens):
    """The header's size was what a record has beside codes and scales; padding of small records went into it."""
    at = raw_layout(Geometry(head_dim, page_tokens))
    assert at.codes_at == HEADER_BYTES == struct.calcsize(HEADER.format) == 16
    codes, scales = page_tokens * head_dim // 2, page_tokens * at.scales_per_row
    derived = at.stride - codes - scales
    assert at.scales_at == 16 + codes and at.end == at.scales_at + scales
    assert (derived == 16) == (at.stride == at.end), "by subtraction the header swallows the padding"
    if (head_dim, page_tokens) == (16, 1):
        assert derived == 23
    hot = tiers.quantize("int8", torch.randn((1, page_tokens, head_dim), generator=torch.Generator().manual_seed(2)))
    slots, _ = get_codec(CODEC).encode_torch(hot, Geometry(head_dim, page_tokens))
    stored, _ = take_apart(Geometry(head_dim, page_tokens), slots)
    assert torch.equal(stored.reshape(1, -1), slots[:, 16 : 16 + codes]) and not slots[:, at.end :].any()
    assert torch.equal(stored.reshape(1, -1), slots[:, derived : derived + codes]) == (derived == 16)


def test_16_a_full_pool_and_a_short_file_are_noticed(tmp_path, capsys):
    """A full pool and a short read were ignored."""
    pool = KvPool(PoolSize(4, 8, 2, 2, 8), Policy("window", 0, 0))
    row = pool.open()
    pool.append(row, 32)
    assert pool.retire(row) == 2 and pool.counters.stayed_hot["pool_full"] == 6
    entries = pool.tables.entries[row].tolist()
    assert [entry_slot(entry) for entry in entries[:2]] == [0, 1] and min(entries[2:]) >= 0
    ignoring = [-2 - slot for slot in (0, 1, -1, -1)]  # a slot number of -1 taken for one
    assert ignoring[2] == ignoring[3] == -1, "two pages would be unmapped and lost"
    other = pool.open()
    with pytest.raises(PoolFull, match="3 pages needed, 2 of 8 free"):
        pool.append(other, 12)
    assert pool.append(other, 8).tolist() == [0, 1], "freed pages serve the other sequence"

    make_dump(tmp_path / "d.safetensors", {0: {"tokens": 100}})
    out = tmp_path / "p.ckv"
    assert in_process(capsys, "pack", tmp_path / "d.safetensors", "-o", out, "--backend", "torch").code == 0
    out.write_bytes(out.read_bytes()[:-100])
    done = in_process(capsys, "restore", out, "-o", tmp_path / "r.safetensors")
    assert done.code == 2 and str(out) in done.err and re.search("expected|short|bytes", done.err)
    assert not (tmp_path / "r.safetensors").exists()


def cold_row():
    """A pool with one row that has cold pages."""
    pool = KvPool(PoolSize(4, 24, 20, 3, 16), Policy("window", 4, 0))
    row = pool.open()
    pool.append(row, 30)
    assert pool.retire(row) == 6
    return pool, row


def test_policies_that_would_retire_drafted_tokens_are_refused():
    with pytest.raises(InputError, match="at least the draft width 8, found 4"):
        KvPool(PoolSize(4, 8, 8, 1, 8, draft_tokens=8), Policy("window", 4, 0))


def test_pages_behind_a_sliding_window_are_dropped():
    pool = KvPool(PoolSize(4, 24, 20, 3, 16, window=10), Policy("window", keep_tokens=4, sink_tokens=0))
    row = pool.open()
    pool.append(row, 30)
    assert pool.retire(row) == 1 and pool.counters.expired == 5
    assert pool.tables.entries[row, :8].tolist() == [-1] * 5 + [-2, 6, 7]
    assert not violations(pool)
    with pytest.raises(PoolError, match="behind the window"):
        pool.truncate(row, 17)
    pool.truncate(row, 22)
    pool.append(row, 30)
    pool.retire(row)
    pool.release(row)
    assert pool.pages.count == pool.slots.count == 0 and not violations(pool)


def test_without_slots_policy_host_unmaps_pages_until_they_are_restored():
    size = PoolSize(4, 24, 0, 3, 16, replicas=20)
    data = TokenBytes(size)
    pool = KvPool(size, Policy("host", 4, 0), data)
    row = pool.open()
    for page, first in zip(pool.append(row, 30).tolist(), range(0, 30, 4), strict=True):
        data.write(page, 0, list(range(first, first + 4)))
    assert pool.retire(row) == 6 and pool.tables.entries[row, :8].tolist() == [-1] * 6 + [6, 7]
    with pytest.raises(PoolError, match="6 pages are on the host: restore them first"):
        pool.append(row, 1)
    assert pool.restore(row) == 6 and data.read(pool.tables.entries[row, :8]).reshape(-1)[:24].tolist() == list(
        range(24)
    )
    pool.append(row, 1)
    assert not violations(pool)


def test_the_table_on_a_device_follows_what_is_published():
    pool, row = cold_row()
    table = pool.tables.on("cpu")
    pool.restore(row)
    pool.open()
    assert torch.equal(pool.tables.on("cpu"), torch.from_numpy(pool.tables.entries)) and pool.tables.on("cpu") is table
    with pytest.raises(PoolError, match="publish_indices: expected int32"):
        pool.tables.publish_indices(row, 0, np.zeros(2))
    with pytest.raises(PoolError, match="row 0, pages 15 to 16"):
        pool.tables.publish_indices(row, 15, np.zeros(2, dtype=np.int32))


def test_regions_name_a_stride_that_the_codec_does_not_have():
    layer = small()
    layer.planes["v"] = type(layer.planes["v"])("v", "int8", "int8", get_codec(CODEC), 4096)
    with pytest.raises(InputError, match="layer 0, plane v: expected a stride of"):
        Regions([layer], 1, 1, TorchBackend())


def test_carried_planes_and_replicas_are_exact():
    size, policy = SIZES[1]
    regions = RegionBytes(size, TorchBackend())
    regions.write(0, 0, [2, 4, 6, 8])
    before = {(n, p): regions.values(n, p, np.array([0])) for n in (0, 1) for p in "kv"}
    regions.to_host(np.array([0]), np.array([5]))
    regions.pack(np.array([0]), np.array([3]))
    regions.from_host(np.array([5]), np.array([9]))
    for (number, name), values in before.items():
        assert torch.equal(regions.values(number, name, np.array([9], dtype=np.int32)), values)
        assert torch.equal(regions.values(number, name, np.array([-5], dtype=np.int32)), values) == (number == 1)
