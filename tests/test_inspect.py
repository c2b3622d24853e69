"""`coldkv inspect`: dumps from their header, slots byte by byte, without torch."""

import json
import struct

import numpy as np
import pytest
from clirun import coldkv, in_process, python

from coldkv import minifloat
from coldkv.dumps import sample_path
from coldkv.inspection import slot as slot_view

STRIDE = 9232
CODES_AT, SCALES_AT = 16, 8208


def make_slot(version=1, flags=1, reserved=bytes(8), code=0x21, scale=0x38) -> bytearray:
    """A 64 x 256 slot whose codes and scales are one value each."""
    header = struct.pack("<IHH8s", 0x49384352, version, flags, reserved)
    return bytearray(header + bytes([code]) * 8192 + bytes([scale]) * 1024)


@pytest.fixture
def inspect(tmp_path, capsys):
    def inspect(record, *args):
        path = tmp_path / "one.slot"
        path.write_bytes(record)
        return in_process(capsys, "inspect", path, *args)

    return inspect


def as_json(done) -> dict:
    assert done.code == 0 and done.err == ""
    return json.loads(done.out)


@pytest.mark.parametrize(
    ("version", "flags", "codec", "alphabet"),
    [(1, 1, "e2m1-g64", "e2m1"), (2, 1, "e2m1-g16", "e2m1"), (3, 1, "native", "e2m1"), (3, 3, "native", "iso3")],
)
def test_the_header_says_which_codec_packed_it(inspect, version, flags, codec, alphabet):
    reserved = struct.pack("<fI", 0.25, 0) if version == 2 else bytes(8)
    found = as_json(inspect(make_slot(version, flags, reserved), "--json"))
    assert (found["codec"], found["alphabet"], found["problems"]) == (codec, alphabet, [])


def test_fields_lie_where_the_format_says(inspect):
    found = as_json(inspect(make_slot(2, 1, struct.pack("<fI", 0.25, 0)), "--json"))
    places = [(field["name"], field["at"], field["bytes"]) for field in found["fields"]]
    assert places == [
        ("magic", 0, 4),
        ("version", 4, 2),
        ("flags", 6, 2),
        ("page scale", 8, 4),
        ("reserved", 12, 4),
        ("codes", CODES_AT, 8192),
        ("scales", SCALES_AT, 1024),
    ]
    assert found["scales"]["max"] == 0.25 and found["scales"]["max_hex"] == "0x38", "0x38 is 1.0, times the page scale"


def test_codes_and_scales_are_counted(inspect):
    record = make_slot()
    record[CODES_AT] = 0xF1
    record[SCALES_AT : SCALES_AT + 5] = bytes([0x01, 0x07, 0x08, 0x7F, 0x00])
    found = as_json(inspect(record, "--json"))
    counts = {entry["code"]: entry["count"] for entry in found["codes"]}
    assert counts == {code: {1: 8192, 2: 8191, 15: 1}.get(code, 0) for code in range(16)}
    scales = found["scales"]
    assert (scales["subnormal"], scales["nan"], scales["zero"], scales["distinct"]) == (2, 1, 1, 6)
    assert (scales["max"], scales["min"]) == (1.0, 0.0)
    assert found["problems"] == ["scale at row 0, group 3: expected 0x01..0x7e, found 0x7f"]


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [(0, 0, "magic"), (4, 9, "version"), (6, 0x81, "flags"), (9, 1, "reserved")],
)
def test_damage_is_named(inspect, at, value, words):
    record = make_slot()
    record[at] = value
    done = inspect(record)
    assert done.code == 0 and f"problem: {words}" in done.out


def test_an_all_zero_slot_stays_hot(inspect):
    assert "could not be packed and stays hot" in inspect(bytes(STRIDE)).out


def test_hex_shows_every_byte_once_with_its_place(inspect):
    record = bytes(np.random.default_rng(1).integers(0, 256, STRIDE, dtype=np.uint8))
    lines = inspect(record, "--hex").out.splitlines()
    assert bytes.fromhex("".join(line[10:57] for line in lines)) == record
    assert lines[0].endswith("header")
    assert lines[1].endswith("codes token 0 channel 0 .. token 0 channel 31")
    assert lines[SCALES_AT // 16].endswith("scales token 0 group 0 .. token 0 group 15")
    assert lines[-1].endswith("scales token 63 group 0 .. token 63 group 15")


@pytest.mark.parametrize(("head_dim", "page_tokens", "stride"), [(80, 16, 736), (64, 16, 592), (576, 64, 20752)])
def test_other_geometries(inspect, head_dim, page_tokens, stride):
    codes = page_tokens * head_dim // 2
    scales = page_tokens * -(-head_dim // 16)
    record = bytes(make_slot())[:16] + bytes([0x21]) * codes + bytes([0x38]) * scales
    record += bytes(-len(record) % 16)
    assert len(record) == stride
    args = ["--head-dim", head_dim, "--page-tokens", page_tokens]
    found = as_json(inspect(record, "--json", *args))
    assert found["problems"] == [] and found["scales"]["count"] == scales
    assert len(inspect(record, "--hex", *args).out.splitlines()) == stride // 16


@pytest.mark.parametrize("record", [make_slot()[:-1], make_slot() + b"\0", make_slot()[:100]])
def test_a_length_that_does_not_fit_names_both(inspect, record):
    done = inspect(record)
    assert done.code == 2 and done.out == ""
    assert f"expected a slot of {STRIDE} bytes (64 tokens x 256), found {len(record)}" in done.err


def test_the_reader_can_say_what_packed_it(inspect):
    found = as_json(inspect(make_slot(), "--json", "--codec", "e2m1-g64", "--plane-format", "iso3"))
    assert found["alphabet"] == "iso3" and found["codes"][7]["value"] == 7
    done = inspect(make_slot(), "--codec", "native", "--plane-format", "int8")
    assert done.code == 2 and "no codec packs int8 planes" in done.err


def test_magnitudes_and_scales_agree_with_the_oracle():
    torch = pytest.importorskip("torch")
    assert slot_view.MAGNITUDES == {"e2m1": minifloat.E2M1_VALUES, "iso3": minifloat.ISO3_VALUES}
    bits = torch.arange(256, dtype=torch.uint8)
    expected = minifloat.e4m3_decode(bits).numpy()
    found = np.array([slot_view.e4m3_value(code) for code in range(256)], np.float32)
    np.testing.assert_array_equal(found, expected)


def test_the_sample_dump(capsys):
    found = as_json(in_process(capsys, "inspect", sample_path(), "--json"))
    assert found["kind"] == "dump" and found["page_tokens"] == 64
    assert {layer["kind"] for layer in found["layers"]} == {"full", "sliding"}
    assert min(layer["pages"] for layer in found["layers"]) >= 10
    assert "provenance" in found["metadata"]
    text = in_process(capsys, "inspect", sample_path()).out
    assert "k:bf16 v:bf16" in text and "provenance" in text


@pytest.mark.parametrize("args", [[], ["--json"]])
def test_inspect_imports_no_torch(tmp_path, args):
    path = tmp_path / "one.slot"
    path.write_bytes(make_slot())
    for file in (path, sample_path()):
        code = "import sys; from coldkv.cli import main; rc = main(['inspect', *sys.argv[1:]]); print()\n"
        done = python(code + "print(rc, 'torch' in sys.modules)", file, *args)
        assert done.out.splitlines()[-1] == "0 False"


@pytest.mark.parametrize(
    ("content", "args", "words"),
    [(b"", [], "the file is empty"), (b"\x10" * 64, [], "extension"), (None, [], "no such file")],
)
def test_files_that_hold_nothing_known(tmp_path, content, args, words):
    path = tmp_path / "x.dat"
    if content is not None:
        path.write_bytes(content)
    done = coldkv("inspect", path, *args)
    assert done.code == 2 and done.out == "" and words in done.err and done.err.count("\n") == 1


def test_slot_options_need_a_pool_or_slot(capsys):
    done = in_process(capsys, "inspect", sample_path(), "--slot", "0:k:0:0")
    assert done.code == 2 and "this is a dump" in done.err


def test_the_sample_by_name_with_its_queries(capsys):
    done = in_process(capsys, "inspect", "--sample", "--json")
    assert done.code == 0 and all(layer["queries"] for layer in json.loads(done.out)["layers"])
    assert in_process(capsys, "inspect").code == 2
