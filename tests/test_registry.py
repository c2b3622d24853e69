"""The codec registry is complete, and a codec from elsewhere works through the whole of `measure`."""

import json
from pathlib import Path

import pytest
from clirun import ROOT, coldkv

from coldkv.codecs import all_codecs

PLUGIN = '''
from coldkv.codecs import Codec


class Halves(Codec):
    """Keeps bf16 values as they are: two bytes per element, no header."""

    id = "plugin-bf16"

    def __init__(self, note=None):
        self.note = note

    @property
    def config(self):
        return {} if self.note is None else {"note": self.note}

    version = 1
    formats = ("bf16",)
    exact = True

    def slot_bytes(self, geometry, fmt):
        return 2 * geometry.elements

    def encode_torch(self, plane, geometry):
        import torch

        n = plane.head_pages
        return plane.codes.contiguous().view(torch.uint8).reshape(n, -1), torch.ones(n, dtype=torch.int32)

    def decode_torch(self, slots, geometry, fmt):
        return self.restore_torch(slots, geometry, fmt).codes.float()

    def restored_format(self, fmt):
        return fmt

    def restore_torch(self, slots, geometry, fmt):
        import torch
        from coldkv.tiers import HotPlane

        rows = (slots.shape[0], geometry.page_tokens, geometry.head_dim)
        return HotPlane(fmt, slots.contiguous().view(torch.bfloat16).reshape(rows), None, geometry.head_dim)

    def check_slots(self, slots, geometry, fmt):
        return []
'''


@pytest.mark.parametrize("codec_id", [codec.id for codec in all_codecs()])
def test_every_codec_is_documented_and_has_goldens_and_kernels(codec_id):
    codec = next(c for c in all_codecs() if c.id == codec_id)
    assert f"`{codec_id}`" in (ROOT / "kernels" / "FORMAT.md").read_text()
    assert list((ROOT / "tests" / "golden" / codec_id).glob("*.json"))
    assert codec.native is None or (ROOT / "kernels" / f"{codec.native}.cu").exists()


def install(folder: Path, entry: str) -> dict:
    (folder / "plugin_codec.py").write_text(PLUGIN)
    info = folder / "plugin_codec-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-codec\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[coldkv.codecs]\nplugin = {entry}\n")
    return {"PYTHONPATH": f"{ROOT}:{folder}"}


def test_a_codec_from_an_entry_point_is_measured_beside_ours(tmp_path):
    env = install(tmp_path, "plugin_codec:Halves")
    done = coldkv("measure", "--sample", "--tier", "bf16", "--layers", "0", "--json", env=env)
    assert done.code == 0, done.err
    rows = {row["codec"]: row for row in json.loads(done.out)["rows"] if row["plane"] == "k"}
    assert set(rows) == {"e2m1-g16", "e2m1-g64", "plugin-bf16", "rans-e2m1"}
    assert rows["plugin-bf16"]["nmse_hot"] == 0 and rows["plugin-bf16"]["ratio"] == 1
    assert rows["plugin-bf16"]["backend"] == "torch"


def test_options_of_a_codec_are_part_of_its_name_in_results(tmp_path):
    env = install(tmp_path, "plugin_codec:Halves")
    codecs = ["--codec", "plugin-bf16:note=1", "--codec", "plugin-bf16:note=x"]
    done = coldkv("measure", "--sample", "--tier", "bf16", "--layers", "0", *codecs, "--json", env=env)
    assert {row["codec"] for row in json.loads(done.out)["rows"]} == {"plugin-bf16:note=1", "plugin-bf16:note=x"}


def test_inspect_does_not_read_a_foreign_slot_as_a_raw_one(tmp_path):
    env, pool = install(tmp_path, "plugin_codec:Halves"), tmp_path / "p.ckv"
    packed = coldkv("pack", "--sample", "--tier", "bf16", "--codec", "plugin-bf16", "-o", pool, env=env)
    assert packed.code == 0, packed.err
    shown = coldkv("inspect", pool, "--slot", "0:k:2:0", env=env)
    assert shown.code == 0 and "codec plugin-bf16, which has its own layout" in shown.out
    assert "magic" not in shown.out and "scales" not in shown.out


@pytest.mark.parametrize(
    "entry,message",
    [
        ("plugin_codec:missing", "could not be loaded"),
        ("plugin_codec:Codec", "codec plugin_codec:Codec: the class sets no 'id'"),
    ],
)
def test_a_broken_entry_point_is_one_line_and_takes_nobody_with_it(tmp_path, entry, message):
    env = install(tmp_path, entry)
    done = coldkv("measure", "--sample", "--layers", "0", "--json", env=env)
    assert done.code == 0 and len(done.err.splitlines()) == 1
    assert message in done.err and done.err.rstrip().endswith("skipped")
    assert {row["codec"] for row in json.loads(done.out)["rows"]} == {"e2m1-g16", "e2m1-g64", "rans-e2m1"}
    assert coldkv("measure", "--sample", "--codec", "plugin-bf16", env=env).code == 2


def test_the_codec_in_the_documentation_works(tmp_path):
    import re

    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "codecs.md").read_text(), re.S)[1]
    env = install(tmp_path, "plugin_codec:PageInt8")
    (tmp_path / "plugin_codec.py").write_text(code)
    done = coldkv("measure", "--sample", "--layers", "0", "--codec", "page-int8", "--json", env=env)
    assert done.code == 0, done.err
    for row in json.loads(done.out)["rows"]:
        assert row["codec"] == "page-int8" and row["invalid_pages"] == 0
        assert row["nmse_hot"] < 0.002 and row["ratio"] == 16896 / 16400
    assert coldkv("pack", "--sample", "--codec", "page-int8", "-o", tmp_path / "p.ckv", env=env).code == 0
    assert coldkv("verify", tmp_path / "p.ckv", env=env).code == 0
