"""Bad dumps: one line that names file, tensor, expected and found; never a traceback, never run code."""

# ruff: noqa: E501 - one case per line reads better than a case folded over six

import io
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from dumpkit import layers, plane, safetensors_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from coldkv.dumps import DumpWriter, LayerSpec, open_dump
from coldkv.errors import InputError


def refused(path, message, **options):
    with pytest.raises(InputError) as caught:
        with open_dump(path, **options) as dump:
            for layer in dump.layers:  # some damage shows only when data is read
                layer.queries()
                layer.positions()
                for source in layer.planes.values():
                    source.read(0, source.tokens)
    line = caught.value.one_line()
    assert message in line, line
    assert str(path) in line and "\n" not in line


@pytest.mark.parametrize("extension", [".safetensors", ".npz", ".pt"])
def test_files_that_are_not_there_or_not_files(tmp_path, extension):
    path = tmp_path / f"a{extension}"
    refused(path, "no such file")
    path.write_bytes(b"")
    refused(path, "the file is empty")
    path.unlink()
    path.mkdir()
    refused(path, "expected a file, found a folder")
    path.rmdir()
    os.mkfifo(path)
    refused(path, "expected a file, found a folder or device")


@pytest.mark.parametrize("extension", [".safetensors", ".npz", ".pt"])
@pytest.mark.parametrize(
    "garbage", [b"\x80\x04K\x01.", b"PK\x03\x04" + bytes(40), b"hello world, this is no dump", bytes(99)]
)
def test_garbage_in_every_format(tmp_path, extension, garbage):
    path = tmp_path / f"a{extension}"
    path.write_bytes(garbage)
    refused(path, "dump")


def test_unknown_extensions(tmp_path):
    refused(tmp_path / "a.xyz", "no such file")
    (tmp_path / "a.xyz").write_bytes(b"1")
    refused(tmp_path / "a.xyz", "expected .safetensors, .npz or .pt, found extension '.xyz'")
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(layers()))
    refused(tmp_path / "a.safetensors", "a batch index applies to .pt files only", batch=0)


def without(name):
    return {k: v for k, v in layers().items() if k != name}


Q = {"layers.0.q": plane(2, 4, 8), "layers.0.q_pos": torch.tensor([1, 4])}
HOT = {
    "layers.0.k.codes": torch.zeros(5, 2, 64, dtype=torch.int8), "layers.0.k.scales": torch.zeros(5, 2, 1).half(),
    "layers.0.v.codes": torch.zeros(5, 2, 32, dtype=torch.uint8),
    "layers.0.v.scales": torch.zeros(5, 2, 4, dtype=torch.uint8),
}  # fmt: skip
SPOILED = {
    "no planes": ({"other": plane()}, "no KV planes found; expected layers.<i>.k"),
    "no v": (without("layers.3.v"), "layer 3: K without V"),
    "no k": (without("layers.3.k"), "tensor layers.3.k is missing, layer 3 has only v"),
    "dtype": ({**layers(), "layers.0.k": plane(dtype=torch.float64)}, "layers.0.k: expected bf16, fp16 or fp32, found F64"),
    "words": ({**layers(), "layers.0.k": plane().view(torch.int16)}, "16-bit words are ambiguous"),
    "rank": ({**layers(), "layers.0.k": plane()[0]}, "layers.0.k: expected [tokens, kv_heads, head_dim], found shape [2, 8]"),
    "tokens": ({**layers(), "layers.3.v": plane(6)}, "layers.3.v: expected 5 tokens as layers.3.k has, found 6"),
    "heads": ({**layers(), "layers.3.v": plane(5, 4)}, "layers.3.v: expected 2 KV heads as layers.3.k has, found 4"),
    "head_dim": ({**layers(), "layers.3.v": plane(5, 2, 6)}, "layers.3.v: expected 8 head_dim as layers.3.k has, found 6"),
    "odd": (layers(head_dim=7), "head_dim: expected an even number from 2 to 1024, found 7"),
    "wide": (layers(head_dim=1026), "found 1026"),
    "zero tokens": (layers(tokens=0), "layers.0.k: expected at least one token, found zero"),
    "zero heads": (layers(heads=0), "layers.0.k: expected at least one KV head, found zero"),
    "leading zero": ({**layers(), "layers.03.k": plane()}, "tensor layers.03.k: expected layers.<i>.k"),
    "unknown part": ({**layers(), "layers.3.w": plane()}, "tensor layers.3.w: expected layers.<i>.k"),
    "q alone": ({**layers(), "layers.0.q": plane(2, 4, 8)}, "layers.0.q: expected .q and .q_pos together"),
    "q_pos alone": ({**layers(), "layers.0.q_pos": torch.tensor([1])}, "layers.0.q: expected .q and .q_pos together"),
    "q width": ({**layers(), **Q, "layers.0.q": plane(2, 4, 6)}, "expected [samples, multiple of 2 heads, 8], found [2, 4, 6]"),
    "q heads": ({**layers(), **Q, "layers.0.q": plane(2, 3, 8)}, "expected [samples, multiple of 2 heads, 8], found [2, 3, 8]"),
    "q samples": ({**layers(), **Q, "layers.0.q": plane(3, 4, 8)}, "layers.0.q_pos: expected [3], found [2]"),
    "q dtype": ({**layers(), **Q, "layers.0.q_pos": torch.tensor([1.0, 2.0])}, "found BF16 with F32"),
    "q nan": ({**layers(), **Q, "layers.0.q": plane(2, 4, 8) / 0}, "layers.0.q: expected finite queries"),
    "q negative": ({**layers(), **Q, "layers.0.q_pos": torch.tensor([1, -4])}, "layers.0.q_pos: expected positions from 0"),
    "positions": ({**layers(), "positions": torch.arange(4)}, "positions: expected 5 positions for layer 0, found 4"),
    "positions dtype": ({**layers(), "positions": torch.ones(5)}, "positions: expected I64 or I32 [tokens], found F32"),
    "own positions": ({**layers(), "layers.3.positions": torch.arange(6)}, "expected 5 positions for layer 3, found 6"),
    "four bit unstated": (HOT, "layers.0.v.codes: hot format of U8 codes is not stated; add \"formats\""),
    "scales alone": ({k: v for k, v in HOT.items() if k != "layers.0.k.codes"}, "layers.0.k.scales: scales without"),
    "no scales": ({k: v for k, v in HOT.items() if k != "layers.0.k.scales"}, "layers.0.k.scales: int8 codes need scales"),
    "scale shape": ({**HOT, "layers.0.k.scales": torch.zeros(5, 2, 2).half()}, "expected F16 [5, 2, 1] for int8, found F16 [5, 2, 2]"),
    "scale dtype": ({**HOT, "layers.0.k.scales": torch.zeros(5, 2, 1)}, "expected F16 [5, 2, 1] for int8, found F32 [5, 2, 1]"),
    "both": ({**HOT, "layers.0.k": plane(5, 2, 64)}, "layers.0.k: given twice, as values and as codes"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_tensors(tmp_path, name):
    tensors, message = SPOILED[name]
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(tensors))
    refused(tmp_path / "a.safetensors", message)


@pytest.mark.parametrize(
    "meta,message",
    [
        ("{", "metadata coldkv.dump is not valid JSON"),
        ([], "expected a JSON object, found list"),
        ({"version": 2}, "expected version 1, found 2; a newer coldkv may have written it"),
        ({}, "expected version 1, found None"),
        ({"version": 1, "page_tokens": "64"}, "page_tokens: expected a whole number, found 64"),
        ({"version": 1, "page_tokens": 0}, "page_tokens: expected 1 to 4096, found 0"),
        ({"version": 1, "attention": []}, "attention: expected an object"),
        ({"version": 1, "attention": {"0": []}}, None),
        ({"version": 1, "attention": {"0": [1]}}, "attention of layer 0: expected an object"),
        ({"version": 1, "attention": {"3": {"kind": "odd"}}}, "attention of layer 3: kind: expected one of full, sliding, mla"),
        ({"version": 1, "attention": {"3": {"kind": "mla"}}}, "layers.3.v: an MLA layer has one plane and no V"),
        ({"version": 1, "attention": {"3": {"kind": "sliding", "window": 0}}}, "window: expected a positive whole number"),
        ({"version": 1, "attention": {"3": {"scaling": "x"}}}, "scaling: expected a positive number, found x"),
        ({"version": 1, "attention": {"3": {"scaling": float("inf")}}}, "scaling: expected a positive number, found inf"),
        ({"version": 1, "attention": {"3": {"softcap": True}}}, "softcap: expected a positive number, found True"),
    ],
)  # fmt: skip
def test_spoiled_metadata(tmp_path, meta, message):
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(layers(), meta))
    if message is None:
        open_dump(tmp_path / "a.safetensors").close()
    else:
        refused(tmp_path / "a.safetensors", message)


@pytest.mark.parametrize(
    "formats,message",
    [
        ({"v": "nvfp5"}, "layers.0.v.codes: expected a hot format (bf16, fp16, int8, fp8, nvfp4, iso3), found 'nvfp5'"),
        ({"v": ["fp8"]}, "layers.0.v.codes: expected a hot format (bf16, fp16, int8, fp8, nvfp4, iso3), found"),
        ({"v": "fp8"}, "layers.0.v.scales: expected F16 [5, 2, 1] for fp8, found U8 [5, 2, 4]"),
        ({"k": "fp8", "v": "iso3"}, "layers.0.k.codes: expected U8 codes for fp8, found I8"),
        ({"k": "int8", "v": "bf16"}, "layers.0.v.codes: expected BF16 codes for bf16, found U8"),
    ],
)
def test_hot_formats_must_fit_the_tensors(tmp_path, formats, message):
    meta = {"version": 1, "formats": {"0": formats}}
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(HOT, meta))
    refused(tmp_path / "a.safetensors", message)
    good = {"version": 1, "formats": {"0": {"v": "iso3"}}}
    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(HOT, good))
    with open_dump(tmp_path / "a.safetensors") as dump:
        assert [p.hot_format for p in dump.layers[0].planes.values()] == ["int8", "iso3"]


def test_a_pool_is_not_a_dump(tmp_path):
    def mark(header):
        header["__metadata__"] = {"coldkv.pool": "{}"}

    (tmp_path / "a.safetensors").write_bytes(safetensors_bytes(layers(), change=mark))
    refused(tmp_path / "a.safetensors", "this is a pool, not a dump")


def test_a_file_cut_while_open_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes(layers(tokens=5000)))
    with open_dump(path) as dump:
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(InputError, match="tensor layers.3.v: truncated: expected 160000 bytes"):
            dump.layers[1].planes["v"].read(0, 5000)


def test_every_truncation_of_an_archive_is_noticed(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, layer_0_k=np.ones((5, 1, 8), np.float32), layer_0_v=np.ones((5, 1, 8), np.float32))
    whole = path.read_bytes()
    for size in range(1, len(whole), 7):
        path.write_bytes(whole[:size])
        refused(path, "not a complete .npz archive")


def npz(path, compressed=False, **arrays):
    (np.savez_compressed if compressed else np.savez)(path, **arrays)


def f32(*shape):
    return np.ones(shape, np.float32)


NPZ = {
    "dtype": ({"layer_0_k": np.ones((5, 1, 8)), "layer_0_v": f32(5, 1, 8)}, "layer_0_k: expected bf16, fp16 or fp32, found float64"),
    "big endian": ({"layer_0_k": np.ones((5, 1, 8), ">f4"), "layer_0_v": f32(5, 1, 8)}, "layer_0_k: expected bf16, fp16 or fp32"),
    "words": ({"layer_0_k": np.ones((5, 1, 8), np.uint16), "layer_0_v": f32(5, 1, 8)}, "found uint16; 16-bit words are ambiguous"),
    "fields": ({"layer_0_k": np.ones((5, 1, 8), [("a", "V2")]), "layer_0_v": f32(5, 1, 8)}, "layer_0_k: expected bf16, fp16 or fp32"),
    "order": ({"layer_0_k": np.asfortranarray(f32(5, 2, 8)), "layer_0_v": f32(5, 2, 8)}, "layer_0_k: stored in Fortran order"),
    "objects": ({"layer_0_k": np.array([print], object), "layer_0_v": f32(5, 1, 8)}, "layer_0_k: holds pickled Python objects"),
    "heads": ({"layer_0_k": f32(5, 1, 8), "layer_0_v": f32(5, 2, 8)}, "layer_0_v: expected 1 KV heads as layer_0_k has, found 2"),
    "missing": ({"layer_0_v": f32(5, 1, 8)}, "tensor layer_0_k is missing"),
    "mla": ({"layer_0_k": f32(5, 1, 8)}, "layer 0: K without V"),
    "names": ({"layer_00_k": f32(5, 1, 8)}, "tensor layer_00_k: expected layer_<i>_k"),
    "none": ({"a": f32(5, 1, 8)}, "no KV planes found"),
    "zero": ({"layer_0_k": f32(0, 1, 8), "layer_0_v": f32(0, 1, 8)}, "layer_0_k: expected at least one token"),
    "q": ({"layer_0_k": f32(5, 1, 8), "layer_0_v": f32(5, 1, 8), "layer_0_q": f32(2, 1, 8)}, "expected .q and .q_pos together"),
    "positions": ({"layer_0_k": f32(5, 1, 8), "layer_0_v": f32(5, 1, 8), "positions": np.arange(4)}, "positions: expected [5] for layer 0, found [4]"),
}  # fmt: skip


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", NPZ)
def test_spoiled_archives(tmp_path, name, compressed):
    arrays, message = NPZ[name]
    npz(tmp_path / "a.npz", compressed, **arrays)
    refused(tmp_path / "a.npz", message)


def test_archives_with_damage_inside(tmp_path):
    path = tmp_path / "a.npz"
    rng = np.random.default_rng(0)
    npz(path, True, layer_0_k=rng.random((500, 1, 8), np.float32), layer_0_v=f32(500, 1, 8))
    raw = bytearray(path.read_bytes())
    raw[2000] ^= 0xFF  # within the compressed bytes of layer_0_k
    path.write_bytes(raw)
    refused(path, "layer_0_k: damaged")
    with zipfile.ZipFile(path, "w") as archive:
        good = io.BytesIO()
        np.save(good, f32(5, 1, 8))
        archive.writestr("layer_0_k.npy", good.getvalue()[:-4])
        archive.writestr("layer_0_v.npy", good.getvalue())
    refused(path, "layer_0_k: expected 160 bytes for float32 [5, 1, 8], found 156")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("layer_0_k.npy", good.getvalue())
    refused(path, "layer_0_k: expected a stored or deflated member, found method 14")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("layer_0_k.npy", b"\x93NUMPY\x01\x00v\x00{'descr': __import__('os')}" + b" " * 90)
    refused(path, "layer_0_k: not a readable npy array")
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "w") as archive:
        archive.writestr("layer_0_k.npy", good.getvalue())
        archive.writestr("layer_0_k.npy", good.getvalue())
    refused(path, "array layer_0_k.npy is in the archive twice")


def test_a_forged_size_is_refused_before_memory_is_asked_for(tmp_path):
    path = tmp_path / "a.npz"
    npz(path, True, positions=np.arange(5), layer_0_k=f32(5, 1, 8), layer_0_v=f32(5, 1, 8))
    raw = path.read_bytes()
    at = raw.index(b"PK\x01\x02") + 24  # uncompressed size of the first entry in the central directory
    path.write_bytes(raw[:at] + (0xF0000000).to_bytes(4, "little") + raw[at + 4 :])
    refused(path, "tensor positions")
    refused(path, "bytes cannot inflate to 4026531840")


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("style", ["zip", "legacy", "pickle"])
def test_pickles_with_code_are_never_run(tmp_path, style):
    path, mark = tmp_path / "a.pt", tmp_path / "mark"
    content = {"key_cache": [Bomb(mark)], "value_cache": []}
    if style == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=style == "zip")
    refused(path, "")
    assert not mark.exists()


def test_a_pickled_cache_object_is_refused_with_a_way_out(tmp_path):
    from collections import Counter

    class_of_the_library = Counter  # stands for any class that is not a tensor or container
    torch.save({"cache": [torch.nn.Linear(2, 2), class_of_the_library()]}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "holds Python objects")
    with pytest.raises(InputError) as caught:
        open_dump(tmp_path / "a.pt")
    assert "torch.nn.modules.linear.Linear" in str(caught.value) and "save plain tensors" in caught.value.hint


def kv(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


PT = {
    "nothing": ({}, "no KV found in a dict with no keys; expected key_cache"),
    "other": ({"a": 1, "b": 2}, "no KV found in a dict with a, b"),
    "number": (3, "expected a dict or list of tensors, found int"),
    "empty list": ([], "no KV planes found"),
    "lengths": ({"key_cache": [kv(1, 1, 5, 8)], "value_cache": []}, "expected key_cache and value_cache lists of equal length"),
    "lonely": ([(kv(1, 1, 5, 8),)], "layer 0: expected (k, v), found tuple"),
    "half": ([(kv(1, 1, 5, 8), None)], "layer 0: K without V"),
    "string": ([("a", "b")], "tensor [0][0]: expected a tensor, found str"),
    "rank": ([(kv(1, 5, 8), kv(1, 5, 8))], "expected [batch, kv_heads, tokens, head_dim], found shape [1, 5, 8]"),
    "batch": ([(kv(2, 1, 5, 8), kv(2, 1, 5, 8))], "expected a batch of 1, found 2"),
    "dtype": ([(kv(1, 1, 5, 8, dtype=torch.float64), kv(1, 1, 5, 8))], "tensor [0][0]: expected bf16, fp16 or fp32, found float64"),
    "heads": ([(kv(1, 1, 5, 8), kv(1, 2, 5, 8))], "tensor [0][1]: expected 1 KV heads as [0][0] has, found 2"),
    "named rank": ({"layers.0.k": kv(1, 5, 1, 8), "layers.0.v": kv(5, 1, 8)}, "layers.0.k: expected [tokens, kv_heads, head_dim]"),
    "named no k": ({"layers.0.v": kv(5, 1, 8)}, "tensor layers.0.k is missing, found only v"),
    "named other": ({"layers.0.x": kv(5, 1, 8)}, "tensor layers.0.x: expected layers.<i>.k"),
    "named value": ({"layers.0.k": 5}, "layers.0.k: expected a tensor, found int"),
    "meta": ({"layers.0.k": kv(5, 1, 8), "coldkv.dump": "{"}, "coldkv.dump is not valid JSON"),
    "version": ({"layers.0.k": kv(5, 1, 8), "coldkv.dump": {"version": 9}}, "expected version 1, found 9"),
    "q": ({"layers.0.k": kv(5, 1, 8), "layers.0.v": kv(5, 1, 8), "layers.0.q": kv(1, 1, 8)}, "expected .q and .q_pos together"),
    "q dtype": ({"layers.0.k": kv(5, 1, 8), "layers.0.v": kv(5, 1, 8), "layers.0.q": kv(1, 1, 8), "layers.0.q_pos": kv(1)}, "found fp32 with fp32"),
    "positions": ({"layers.0.k": kv(5, 1, 8), "layers.0.v": kv(5, 1, 8), "layers.0.positions": torch.arange(4)}, "layers.0.positions: expected 5 whole numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", PT)
def test_spoiled_torch_files(tmp_path, name):
    content, message = PT[name]
    torch.save(content, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", message)


def test_a_torch_batch_is_chosen(tmp_path):
    states = torch.randn(2, 3, 5, 8)
    torch.save([(states, states)], tmp_path / "a.pt")
    with open_dump(tmp_path / "a.pt", batch=1) as dump:
        assert torch.equal(dump.layers[0].planes["k"].read(0, 5), states[1].transpose(0, 1))
    refused(tmp_path / "a.pt", "batch index 2 outside 0..1", batch=2)
    torch.save({"layers.0.k": kv(5, 1, 8), "layers.0.v": kv(5, 1, 8)}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "a batch index applies to Hugging Face caches only", batch=0)


@pytest.mark.parametrize("cut", [10, 100, 400, 1000])
def test_truncated_torch_files(tmp_path, cut):
    path = tmp_path / "a.pt"
    torch.save([(torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8))], path)
    path.write_bytes(path.read_bytes()[:-cut])
    refused(path, "not a complete torch file")


def test_the_writer_leaves_nothing_on_failure(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match="layers.0.v"):
        with DumpWriter(path, [LayerSpec(0, 5, 2, 8)], {}) as writer:
            writer.write("layers.0.k", plane())
    with pytest.raises(KeyboardInterrupt):
        with DumpWriter(path, [LayerSpec(0, 5, 2, 8)], {}) as writer:
            raise KeyboardInterrupt
    with pytest.raises(InputError, match="expected a name ending in .safetensors"):
        DumpWriter(tmp_path / "a.npz", [LayerSpec(0, 5, 2, 8)], {})
    with pytest.raises(ValueError, match="each once"):
        DumpWriter(path, [LayerSpec(0, 5, 2, 8), LayerSpec(0, 5, 2, 8)], {})
    assert list(tmp_path.iterdir()) == []


GOOD = {
    "a.safetensors": safetensors_bytes(
        {**layers(), **Q, "positions": torch.arange(5)}, {"version": 1, "attention": {"0": {"kind": "full"}}}
    ),
}
for _name, _save in (("a.npz", np.savez), ("b.npz", np.savez_compressed)):
    _file = io.BytesIO()
    _save(_file, layer_0_k=f32(9, 1, 8), layer_0_v=f32(9, 1, 8), positions=np.arange(9))
    GOOD[_name] = _file.getvalue()


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(GOOD)),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_flipped_bytes_are_read_or_refused_but_never_crash(tmp_path_factory, name, changes):
    raw = bytearray(GOOD[name])
    for at, value in changes:
        raw[at % len(raw)] = value
    path = tmp_path_factory.mktemp("f") / name
    path.write_bytes(raw)
    try:
        with open_dump(path) as dump:
            for layer in dump.layers:
                layer.positions()
                layer.queries()
                for source in layer.planes.values():
                    assert source.read(0, source.tokens).shape == (source.tokens, source.kv_heads, source.head_dim)
    except InputError as error:
        assert "\n" not in error.one_line()
