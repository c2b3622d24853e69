"""The streaming writer and the validating header reader of safetensors files."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldkv.errors import InputError
from coldkv.safetensors_stream import ITEM_BYTES, StreamWriter, read_header

NUMPY = {"U8": np.uint8, "I8": np.int8, "F16": np.float16, "I32": np.int32, "F32": np.float32, "I64": np.int64}


@given(
    specs=st.lists(
        st.tuples(st.sampled_from(sorted(NUMPY)), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=6
    ),
    seed=st.integers(0, 1000),
)
def test_any_tensors_round_trip_through_the_public_reader(tmp_path_factory, specs, seed):
    from safetensors.numpy import load_file

    path = tmp_path_factory.mktemp("s") / "a.safetensors"
    rng = np.random.default_rng(seed)
    arrays = {f"t{i}": rng.integers(0, 100, shape).astype(NUMPY[dtype]) for i, (dtype, shape) in enumerate(specs)}
    with StreamWriter(path, [(f"t{i}", d, s) for i, (d, s) in enumerate(specs)], {"a": "b"}) as writer:
        pending = {name: memoryview(array.tobytes()) for name, array in arrays.items()}
        while pending:  # chunks of all tensors, interleaved
            name = rng.choice(sorted(pending))
            cut = int(rng.integers(1, 30))
            writer.write(name, pending[name][:cut])
            pending[name] = pending[name][cut:]
            if not len(pending[name]):
                del pending[name]
    loaded = load_file(path)
    header = read_header(path)
    assert header.metadata == {"a": "b"} and header.file_bytes == path.stat().st_size
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array)
        info = header.tensors[name]
        assert info.begin % ITEM_BYTES[info.dtype] == 0 and info.shape == array.shape and info.nbytes == array.nbytes


def test_metadata_can_be_patched_after_the_data(tmp_path):
    path = tmp_path / "a.safetensors"
    with StreamWriter(path, [("a", "U8", (3,))], {"crc": "00000000"}) as writer:
        writer.write("a", b"abc")
        start = read_header(path).data_start
        writer.set_metadata({"crc": "deadbeef"})
        with pytest.raises(ValueError, match="does not fit"):
            writer.set_metadata({"crc": "x" * 200})
    header = read_header(path)
    assert header.metadata == {"crc": "deadbeef"} and header.data_start == start
    assert path.read_bytes()[header.tensors["a"].begin :] == b"abc"


def test_reserved_room_takes_longer_metadata(tmp_path):
    path = tmp_path / "a.safetensors"
    with StreamWriter(path, [("a", "U8", (3,))], {}, reserve=400) as writer:
        writer.write("a", b"abc")
        writer.set_metadata({"pool": "x" * 300})
    assert read_header(path).metadata == {"pool": "x" * 300}


def test_incomplete_and_surplus_data_are_errors(tmp_path):
    with pytest.raises(ValueError, match="tensor a: expected 3 bytes, wrote 2"):
        with StreamWriter(tmp_path / "a", [("a", "U8", (3,))], {}) as writer:
            writer.write("a", b"ab")
    with pytest.raises(ValueError, match="tensor a: expected 3 more bytes, found 4"):
        with StreamWriter(tmp_path / "a", [("a", "U8", (3,))], {}) as writer:
            writer.write("a", b"abcd")
    with pytest.raises(ValueError, match="twice"):
        StreamWriter(tmp_path / "a", [("a", "U8", (3,)), ("a", "U8", (3,))], {})
    with pytest.raises(ValueError, match="strings"):
        StreamWriter(tmp_path / "a", [("a", "U8", (3,))], {"a": 1})


GOOD = {"a": {"dtype": "U8", "shape": [2, 2], "data_offsets": [0, 4]}}


def spoiled(**changes):
    return {"a": {**GOOD["a"], **changes}}


@pytest.mark.parametrize(
    "header,message",
    [
        (spoiled(dtype="U9"), "tensor a: unknown dtype 'U9'"),
        (spoiled(dtype=["U8"]), "tensor a: unknown dtype"),
        (spoiled(shape=[2, 3]), r"expected 6 bytes for U8 \[2, 3\], found 4"),
        (spoiled(shape=[-2, -2]), "malformed shape"),
        (spoiled(shape=[2.0, 2]), "malformed shape"),
        (spoiled(shape=[True, 4]), "malformed shape"),
        (spoiled(shape="22"), "malformed shape"),
        (spoiled(data_offsets=[4, 0]), "malformed shape"),
        (spoiled(data_offsets=[0]), "malformed shape"),
        (spoiled(shape=[2**40, 2**40]), "expected 1208925819614629174706176 bytes"),
        (spoiled(data_offsets=[4, 8]), "truncated or wrong offsets: expected data up to byte 8, found 4 bytes"),
        ({"a": {"dtype": "U8"}}, "expected dtype, shape and data_offsets"),
        ({"a": 3}, "expected dtype, shape and data_offsets"),
        ({**GOOD, "b": GOOD["a"]}, "tensor b: expected data at byte 4, found 0"),
        ({"b": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}, "tensor b: expected data at byte 0, found 2"),
        ({"b": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, r"a.safetensors: expected \d+ bytes, found \d+"),
        ({**GOOD, "__metadata__": {"a": 1}}, "__metadata__: expected strings only"),
        ({**GOOD, "__metadata__": []}, "__metadata__: expected strings only"),
        ([], "header is not valid JSON: expected an object"),
    ],
)
def test_spoiled_headers_are_refused_in_one_line(tmp_path, header, message):
    path = tmp_path / "a.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"data")
    with pytest.raises(InputError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "raw,message",
    [
        (b"\x08\0\0", "found only 3 bytes"),
        (b"\xff" * 16, "header of 18446744073709551615 bytes, at most 100000000 allowed"),
        ((90_000_000).to_bytes(8, "little") + b"{}", "truncated: expected a header of 90000000 bytes, found 2"),
        (b"\x02" + bytes(7) + b"{]", "not valid JSON"),
        (b"\x04" + bytes(7) + b"\xff\xfe{}", "not valid JSON"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "not valid JSON"),
        (b"\x0e" + bytes(7) + b'{"a":1,"a":2} ', "duplicate name 'a'"),
    ],
)
def test_files_that_are_no_safetensors(tmp_path, raw, message):
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=message):
        read_header(path)


def test_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    with StreamWriter(path, [("a", "F32", (3,)), ("b", "U8", (2,))], {"x": "y"}) as writer:
        writer.write("a", bytes(12))
        writer.write("b", bytes(2))
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError):
            read_header(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(InputError, match="expected .* bytes, found"):
        read_header(path)
