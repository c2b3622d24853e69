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
    assert set(rows) == {"e2m1-g16", "e2m1-g64", "plugin-bf16"}
    assert rows["plugin-bf16"]["nmse_hot"] == 0 and rows["plugin-bf16"]["ratio"] == 1
    assert rows["plugin-bf16"]["backend"] == "torch"


@pytest.mark.parametrize(
    "entry,message",
    [
        ("plugin_codec:missing", "could not be loaded"),
        ("plugin_codec:Codec", "codec plugin_codec:Codec: the class sets no 'id'"),
    ],
)
def test_a_broken_entry_point_is_one_line(tmp_path, entry, message):
    done = coldkv("measure", "--sample", "--layers", "0", env=install(tmp_path, entry))
    assert done.code == 2 and len(done.err.splitlines()) == 1
    assert message in done.err
