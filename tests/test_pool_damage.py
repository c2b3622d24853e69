"""Damage to a pool is found and named; readers refuse it; nothing half-read, nothing half-written."""

import dataclasses
import os
import re
import struct
import zlib

import numpy as np
import pytest
import torch
from clirun import in_process
from poolkit import make_dump, pack_dump, reseal, restored_tensors

from coldkv import tiers
from coldkv.codecs import get_codec
from coldkv.codecs.rawslot import FLAG_VALID, MAGIC
from coldkv.dumps import open_dump
from coldkv.errors import InputError
from coldkv.pipeline import to_head_pages
from coldkv.pool.file import PoolFile
from coldkv.pool.layout import LayerLayout
from coldkv.pool.policy import Policy
from coldkv.pool.reader import LayerReader
from coldkv.pool.verify import verify


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(folder, pool): cold pages 1..4 with two replicas, hot pages 0 and 5, a partial page 6, queries, positions."""
    folder = tmp_path_factory.mktemp("pool")
    shape = {"tokens": 52, "heads": 2, "head_dim": 32, "queries": True, "positions": torch.arange(52) * 2}
    make_dump(folder / "d.safetensors", {0: shape, 3: shape}, page_tokens=8)
    policy = Policy("host", keep_tokens=12, sink_tokens=3, host_bytes=2 * 2 * 2 * 2 * 8 * 34)
    pack_dump(folder / "d.safetensors", folder / "p.ckv", policy=policy, codecs=["e2m1-g64"])
    return folder, folder / "p.ckv"


def located(layout: LayerLayout, table, replicas, name: str, byte: int):
    """(plane, page, head) of a byte of a tensor, from the document's formulas alone; None where it has no place."""
    heads, tokens = layout.geometry.kv_heads, layout.geometry.page_tokens
    page_of_slot = {-2 - entry: page for page, entry in enumerate(table) if entry <= -2}
    page_of_hot = {entry: page for page, entry in enumerate(table) if entry >= 0}
    page_of_replica = {replica: page_of_slot[slot] for slot, replica in enumerate(replicas) if replica >= 0}
    parts = name.split(".")[2:]
    if parts == ["slots"]:
        stride = layout.planes["k"].stride
        slot, rest = divmod(byte, 2 * heads * stride)
        return "kv"[rest // (heads * stride)], page_of_slot[slot], rest // stride % heads
    if parts in (["valid"], ["slot_crc"]):
        slot, rest = divmod(byte // 4, 2 * heads)
        return "kv"[rest // heads], page_of_slot[slot], rest % heads
    if parts in (["hot_crc"], ["replica_crc"]):
        index, rest = divmod(byte // 4, 2 * heads)
        owner = page_of_hot if parts == ["hot_crc"] else page_of_replica
        return "kv"[rest // heads], owner[index], rest % heads
    if parts[-1] in ("codes", "scales"):
        owner = page_of_replica if parts[0] == "replica" else page_of_hot
        row = {"codes": 32, "scales": 2}[parts[-1]]  # int8: 32 codes, one fp16 scale
        token, head = divmod(byte // row, heads)
        return parts[-2], owner[token // tokens], head
    return None


def test_the_small_pool_has_every_kind_of_region(small):
    with PoolFile(small[1]) as pool:
        kinds = {name.split(".", 2)[2] for name in pool.tensor_names()}
        assert kinds == {
            "block_table", "slots", "valid", "slot_crc", "hot_crc", "replica_table", "replica_crc", "q", "q_pos",
            "positions", *(f"{r}{p}.{t}" for r in ("", "replica.") for p in "kv" for t in ("codes", "scales")),
        }  # fmt: skip
        assert pool.rows("layers.0.block_table", 0, 7).tolist() == [0, -2, -3, -4, -5, 1, 2]
        assert pool.rows("layers.3.replica_table", 0, 4).tolist() == [0, 1, -1, -1]
    assert verify(str(small[1])).problems == []


def test_a_flipped_bit_anywhere_is_found_and_named(small, tmp_path):
    content = small[1].read_bytes()
    with PoolFile(small[1]) as pool:
        spans = {name: pool.span(name) for name in pool.tensor_names()}
        layouts = {layout.index: layout for layout in pool.layers}
        tables = {i: pool.array(f"layers.{i}.block_table").tolist() for i in layouts}
        replicas = {i: pool.array(f"layers.{i}.replica_table").tolist() for i in layouts}
    data_start = min(begin for begin, _ in spans.values())
    assert max(end for _, end in spans.values()) == len(content), "every byte is header or tensor"
    random = np.random.default_rng(5)
    path = tmp_path / "flipped.ckv"
    path.write_bytes(content)
    checked = 0
    with open(path, "r+b") as file:

        def flipped(at, bit):
            os.pwrite(file.fileno(), bytes([content[at] ^ 1 << bit]), at)
            problems = verify(str(path)).problems
            os.pwrite(file.fileno(), content[at : at + 1], at)
            return problems

        for at in [*range(16), *random.choice(data_start, 250, replace=False).tolist()]:
            found = flipped(at, int(random.integers(8)))
            assert [p.tensor for p in found] == ["header"] or found[0].tensor in spans, (at, found)
            checked += 1
        for name, (begin, end) in spans.items():
            layer = int(name.split(".")[1])
            for at in sorted(random.choice(end - begin, min(24, end - begin), replace=False).tolist()):
                found = flipped(begin + at, int(random.integers(8)))
                where = (name, at, list(map(str, found)))
                assert any(p.tensor == name and p.layer == layer for p in found), where
                expected = located(layouts[layer], tables[layer], replicas[layer], name, at)
                if expected is not None:
                    assert any((p.layer, p.plane, p.page, p.head) == (layer, *expected) for p in found), where
                checked += 1
    assert checked > 900 and verify(str(path)).problems == []


@pytest.mark.parametrize("byte", [0x00, 0x09, 0x20, 0xFF])
def test_changed_bytes_of_the_header_padding_are_found(small, tmp_path, byte):
    content = bytearray(small[1].read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    text = content[8 : 8 + length]
    at = 8 + len(text.rstrip(b" "))
    assert at < 8 + length, "this file has padding"
    content[at] = byte
    path = tmp_path / "p.ckv"
    path.write_bytes(content)
    assert bool(verify(str(path)).problems) == (byte != 0x20)


def test_truncated_and_extended_files_are_refused(small, tmp_path):
    content = small[1].read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    path, out = tmp_path / "cut.ckv", tmp_path / "out.safetensors"
    lengths = {64, 100, length, 8 + length - 1, 8 + length, 8 + length + 1, len(content) - 1}
    lengths |= set(range(64, len(content), len(content) // 40))
    for cut in sorted(lengths):
        path.write_bytes(content[:cut])
        assert verify(str(path)).problems, cut
        with pytest.raises(InputError):
            restored_tensors(path, out)
    path.write_bytes(content + b"\0")
    assert "expected" in str(verify(str(path)).problems[0])
    for cut in (0, 1, 7, 8, 20):  # too short to be told from any other file
        path.write_bytes(content[:cut])
        with pytest.raises(InputError):
            verify(str(path))
    assert not out.exists()


def test_verify_names_place_and_exits_1(small, tmp_path, capsys):
    content = bytearray(small[1].read_bytes())
    with PoolFile(small[1]) as pool:
        layout = pool.layer(3)
        begin, _ = pool.span("layers.3.slots")
    content[begin + layout.record_offset(2, "v", 1) + 40] ^= 4
    path = tmp_path / "p.ckv"
    path.write_bytes(content)
    done = in_process(capsys, "verify", path)
    assert done.code == 1 and "layer 3, plane v, page 3, head 1: layers.3.slots: slot 2: CRC32" in done.out
    assert len(done.err.splitlines()) == 1 and "2 problems" in done.err
    done = in_process(capsys, "restore", path, "-o", tmp_path / "r.safetensors", "--backend", "torch")
    assert done.code == 2 and done.out == "" and len(done.err.splitlines()) == 1
    assert "layer 3, plane v, page 3, head 1" in done.err and "verify" in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["p.ckv"]


def spoil_record(layer, slot, plane, head, at, data, *, heads=2):
    """Overwrite bytes of a record and make its CRC32 right again, so that only the header tells."""

    def change(tensors):
        slots = tensors[f"layers.{layer}.slots"]
        stride = slots.shape[1] // (2 * heads)
        start = "kv".index(plane) * heads * stride + head * stride
        slots[slot, start + at : start + at + len(data)] = np.frombuffer(data, np.uint8)
        crc = zlib.crc32(slots[slot, start : start + stride].tobytes())
        tensors[f"layers.{layer}.slot_crc"][slot, "kv".index(plane), head] = crc

    return change


@pytest.mark.parametrize(
    "at,data,text",
    [
        (0, b"\0\0\0\0", f"magic: expected 0x{MAGIC:08x}, found 0x00000000"),
        (4, struct.pack("<H", 2), "version: expected 1, found 2"),
        (6, struct.pack("<H", 0), f"flags: expected {FLAG_VALID}, found 0"),
        (8, b"\1", "reserved bytes: expected zero"),
    ],
)
def test_slot_headers_are_checked_before_decoding(small, tmp_path, at, data, text):
    path = tmp_path / "p.ckv"
    reseal(small[1], path, spoil_record(0, 3, "k", 1, at, data))
    (problem,) = verify(str(path)).problems
    assert (problem.layer, problem.plane, problem.page, problem.head) == (0, "k", 4, 1) and text in problem.text
    with pytest.raises(InputError, match="layer 0, plane k, page 4, head 1"):
        restored_tensors(path, tmp_path / "r.safetensors")
    assert not (tmp_path / "r.safetensors").exists()


def set_table(name, index, value):
    def change(tensors):
        tensors[name][index] = value

    return change


@pytest.mark.parametrize(
    "name,index,value,texts",
    [
        ("block_table", 2, -2, ["layer 0, page 2: .* slot 0 is owned twice, also by page 1", "slot 1 is leaked"]),
        ("block_table", 2, -7, ["layer 0, page 2: .* slot 5: only 4 exist", "slot 1 is leaked"]),
        ("block_table", 2, -(2**31), ["layer 0, page 2: .* only 4 exist"]),
        ("block_table", 5, 0, ["layer 0, page 5: .* hot page 0 is owned twice", "hot page 1 is leaked"]),
        ("block_table", 5, 9, ["layer 0, page 5: .* hot page 9: only 3 exist", "hot page 1 is leaked"]),
        (
            "block_table",
            3,
            -1,
            ["layer 0: .* slot 2 is leaked", "layer 3, page 3: .* cold in only one of layers 0 and 3"],
        ),
        ("block_table", 6, -1, ["layer 0, page 6: .* the partial page: expected hot page 2"]),
        ("valid", (1, 1, 0), 0, ["layer 0, plane v, page 2, head 0: .* expected validity 1, found 0"]),
        ("replica_table", 1, 0, ["layer 0, page 2: .* replica 0 is owned twice", "replica 1 is leaked"]),
        ("replica_table", 2, 7, ["layer 0, page 3: .* replica 7: only 2 exist"]),
    ],
)
def test_inconsistent_tables_are_named(small, tmp_path, name, index, value, texts):
    path = tmp_path / "p.ckv"
    reseal(small[1], path, set_table(f"layers.0.{name}", index, value))
    found = [str(problem) for problem in verify(str(path)).problems]
    for text in texts:
        assert any(re.search(text, line) for line in found), found
    with pytest.raises(InputError, match=f"layers.0.{name}"):
        restored_tensors(path, tmp_path / "r.safetensors")


def test_metadata_and_tensors_must_agree(small, tmp_path):
    path = tmp_path / "p.ckv"

    def other_heads(layer):
        geometry = dataclasses.replace(layer.geometry, kv_heads=3)
        return dataclasses.replace(layer, geometry=geometry) if layer.index == 3 else layer

    with pytest.raises(ValueError):  # the writer refuses it
        reseal(small[1], path, lambda tensors: None, relayout=other_heads)
    assert not path.exists()
    patched(small[1], path, b'"layer":3,"tier":"int8","kind":"full"', b'"layer":3,"tier":"int8","kind":"mla" ')
    with pytest.raises(InputError, match="layer 3: planes: expected k, found k, v"):
        PoolFile(path)
    patched(small[1], path, b'"tokens":52', b'"tokens":53')
    with pytest.raises(InputError, match=r"tensor layers.0.hot_crc|tensor layers.0.positions"):
        PoolFile(path)
    patched(small[1], path, b'"config":{}', b'"konfig":{}')
    with pytest.raises(InputError, match="codec: config: expected an object"):
        PoolFile(path)


def patched(source, target, old, new):
    """Replace bytes of the metadata (escaped as they are in the header) and make the header's CRC32 right again."""
    content = source.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    old, new = (x.replace(b'"', b'\\"') for x in (old, new))
    head = content[: 8 + length]
    assert old in head and len(old) == len(new)
    head = head.replace(old, new)
    at = head.index(b'"coldkv.pool.crc32":"') + 21
    crc = zlib.crc32(head[:at] + b"00000000" + head[at + 8 :])
    target.write_bytes(head[:at] + f"{crc:08x}".encode() + head[at + 8 :] + content[8 + length :])


@pytest.mark.parametrize(
    "old,new,text",
    [
        (b'{"version":1,"writer', b'{"version":2,"writer', "expected version 1, found 2; a newer coldkv"),
        (b'"id":"e2m1-g64","version":1', b'"id":"e2m1-g64","version":7', "codec e2m1-g64: expected version 1, found 7"),
        (b'"id":"e2m1-g64"', b'"id":"e2m1-g65"', "codec: expected one of .*, found 'e2m1-g65'"),
        (b'"slot_bytes":160', b'"slot_bytes":176', "slot_bytes: expected 160, found 176"),
        (b'"dtype":"bf16"', b'"dtype":"bf61"', "dtype: expected one of bf16, fp32"),
    ],
)
def test_newer_and_foreign_pools_are_refused_in_words(small, tmp_path, old, new, text):
    path = tmp_path / "p.ckv"
    patched(small[1], path, old, new)
    with pytest.raises(InputError, match=text) as caught:
        try:
            PoolFile(path)
        except InputError as error:
            raise InputError(error.one_line()) from None
    assert "\n" not in str(caught.value)


def test_records_lie_where_the_document_says(small):
    """Each record, found by the address formula, is the oracle's encoding of that page and head."""
    codec = get_codec("e2m1-g64")
    content = small[1].read_bytes()
    with PoolFile(small[1]) as pool, open_dump(small[0] / "d.safetensors") as dump:
        for layout in pool.layers:
            begin, _ = pool.span(f"layers.{layout.index}.slots")
            stride = layout.planes["k"].stride
            for number, name in enumerate("kv"):
                dense = dump.layer(layout.index).planes[name].read(0, 48).float()
                hot = tiers.quantize("int8", to_head_pages(dense, layout.geometry))
                slots, _ = codec.encode_torch(hot, layout.geometry)
                for slot, page in enumerate((1, 2, 3, 4)):
                    for head in range(2):
                        at = begin + slot * 2 * 2 * stride + number * 2 * stride + head * stride
                        assert content[at : at + stride] == slots[page * 2 + head].numpy().tobytes()


@pytest.mark.parametrize("heads", [4, 8])
def test_slot_addresses_do_not_collide_as_the_seed_s_did(small, heads):
    with PoolFile(small[1]) as pool:
        layout = pool.layer(0)
    layout = dataclasses.replace(layout, geometry=dataclasses.replace(layout.geometry, kv_heads=heads))
    stride, slots = layout.planes["k"].stride, 5
    places = [(slot, plane, head) for slot in range(slots) for plane in "kv" for head in range(heads)]
    ours = [layout.record_offset(*place) for place in places]
    assert ours == [s * 2 * heads * stride + "kv".index(p) * heads * stride + h * stride for s, p, h in places]
    assert sorted(ours) == list(range(0, slots * layout.pitch, stride)), "no gap, no overlap"
    words = [layout.word_index(*place) for place in places]
    assert sorted(words) == list(range(slots * 2 * heads))
    assert words == [s * 2 * heads + "kv".index(p) * heads + h for s, p, h in places]
    # the wrong formulas: head h + 1 of a slot and head h of the next one share a place
    wrong = {(s, h): s * stride + h * stride for s in range(slots) for h in range(heads)}
    assert wrong[0, 1] == wrong[1, 0] and len(set(wrong.values())) < len(wrong)
    wrong_words = {(s, h): s + h for s in range(slots) for h in range(heads)}
    assert wrong_words[0, 1] == wrong_words[1, 0]


def test_mapped_arrays_agree_with_copied_rows(small):
    with PoolFile(small[1]) as pool:
        for name in pool.tensor_names():
            view = pool.array(name)
            assert np.array_equal(view, pool.rows(name, 0, len(view)), equal_nan=view.dtype.kind == "f")
            assert not view.flags.writeable
        assert LayerReader(pool, pool.layer(0)).slot_page.tolist() == [1, 2, 3, 4]
        with pytest.raises(IndexError):
            pool.rows("layers.0.valid", 0, 5)
