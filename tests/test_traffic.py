"""Bytes that the kernels move, counted while they run on the CPU: at most 1.02 of the least; the committed table."""

import pytest
import torch
import traffic_table
from clirun import ROOT
from shim.backend import ShimBackend, require

from coldkv.codecs import get_codec
from coldkv.formats import FORMATS


@pytest.fixture(scope="module")
def backend():
    require()
    return ShimBackend()


@pytest.fixture(scope="module")
def rows(backend):
    return traffic_table.measure(backend)


def test_nothing_is_read_or_written_twice(rows):
    held = [row for row in rows if not row["sized"] and row["op"] != "stats"]
    assert len(held) >= 40
    pack = next(r for r in rows if (r["op"], r["codec"], r["format"]) == ("encode", "e2m1-g64", "int8"))
    assert pack["least"] == 16_896 + 9_232
    over = {(row["op"], row["codec"], row["format"]): traffic_table.ratio(row) for row in held}
    assert {name: ratio for name, ratio in over.items() if ratio > traffic_table.LIMIT} == {}
    assert all(row["accesses"] >= row["least"] and row["sectors"] >= row["least"] for row in held)


def test_the_committed_table_is_what_is_counted(rows):
    assert (ROOT / "kernels" / "TRAFFIC.md").read_text() == traffic_table.page(rows), "run scripts/traffic_table"


def test_reading_a_plane_twice_is_seen(backend):
    """The count itself: two calls read twice what one reads, and counting ends where it is said to."""
    x = torch.randn(2, 64, 256)
    plane = backend.quantize("int8", x)
    codec, geometry = get_codec("e2m1-g64"), traffic_table.GEOMETRY
    hot = 2 * FORMATS["int8"].bytes(geometry)
    with backend.shim.counting() as once:
        backend.encode(codec, plane, geometry)
    with backend.shim.counting() as twice:
        backend.encode(codec, plane, geometry)
        backend.encode(codec, plane, geometry)
    backend.encode(codec, plane, geometry)
    assert once["read_bytes"] == hot and once["read_sectors"] * 32 == hot
    assert twice == {name: 2 * count for name, count in once.items()}
