"""Layer dtype tables: presets, strings, files, and how they meet a dump's layers."""

import json

import pytest

from coldkv.errors import InputError
from coldkv.table import PRESETS, assign, parse_table, uniform_table


def test_seed_preset_is_the_production_table():
    tiers = PRESETS["seed-10-6"]
    assert [i for i, tier in enumerate(tiers) if tier == "int8"] == [2, 5, 10, 11, 12, 15]
    assert tiers.count("nvfp4") == 10


def test_preset_by_place_where_the_count_fits():
    layers = list(range(3, 64, 4))  # the seed's 16 full-attention layers
    assignment = assign(parse_table("seed-10-6"), layers)
    assert assignment.mode == "layers" and assignment.notes == []
    assert dict(assignment.pairs)[11] == "int8" and dict(assignment.pairs)[3] == "nvfp4"
    assert assignment.tier_layers == {"int8": 6, "nvfp4": 10}


def test_preset_for_another_count_is_applied_by_tier_and_says_so():
    assignment = assign(parse_table("seed-10-6"), [0, 5], selected=[5])
    assert assignment.mode == "tiers"
    assert assignment.pairs == [(5, "int8"), (5, "nvfp4")]
    assert assignment.tier_layers == {"int8": 6, "nvfp4": 10}
    assert "16 attention layers and the dump has 2" in assignment.notes[0]


def test_string_names_the_models_layers():
    assignment = assign(parse_table("0-3:fp8, 4-35:nvfp4"), [0, 3, 4])
    assert assignment.pairs == [(0, "fp8"), (3, "fp8"), (4, "nvfp4")]
    assert assignment.notes == ["table 0-3:fp8, 4-35:nvfp4 also names 1-2,5-35, which the dump does not have"]
    assert assign(parse_table("0,2-3:fp8,1:int8"), [0, 1, 2, 3]).tier_layers == {"fp8": 3, "int8": 1}


def test_uniform():
    assert assign(uniform_table("bf16"), [4, 9]).pairs == [(4, "bf16"), (9, "bf16")]
    assert assign(parse_table("all-int8"), [4, 9]).mode == "uniform"


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_files(tmp_path, suffix):
    path = tmp_path / f"t.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps({"name": "mine", "index": "attention", "layers": {"0": "fp8", "1-2": "int8"}}))
    else:
        path.write_text('name = "mine"\nindex = "attention"\n[layers]\n"0" = "fp8"\n"1-2" = "int8"\n')
    assignment = assign(parse_table(str(path)), [3, 7, 11])
    assert assignment.name == "mine" and assignment.pairs == [(3, "fp8"), (7, "int8"), (11, "int8")]


@pytest.mark.parametrize(
    "text,message",
    [
        ("nope", "expected a preset"),
        ("0-3:fp9", "tier: expected one of .* found 'fp9'"),
        ("0-3:fp8,3-5:int8", "layer 3 is named twice, as fp8 and as int8"),
        ("0-3:fp8,4", "expected :tier after '4'"),
        ("3-0:fp8", "runs backwards"),
        (":fp8", "expected numbers and ranges"),
        ("missing.toml", "table missing.toml: no such file"),
    ],
)
def test_bad_tables(text, message):
    with pytest.raises(InputError, match=message):
        parse_table(text)


@pytest.mark.parametrize(
    "content,message",
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        ('{"layers": {}}', "expected an object"),
        ('{"layers": {"0": 8}}', "expected the name of a tier, found 8"),
        ('{"layers": {"0": "int8"}, "tier": 1}', "unknown key 'tier'"),
        ('{"layers": {"0": "int8"}, "index": "x"}', "index: expected"),
        ('{"layers": {"0-1": "int8", "1": "fp8"}}', "layer 1 is named twice"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        parse_table(str(path))


def test_a_table_that_misses_a_layer_is_an_error():
    with pytest.raises(InputError, match="layer 4-5 of the dump is not in the table"):
        assign(parse_table("0-3:fp8"), [3, 4, 5])
    assert assign(parse_table("0-3:fp8"), [3, 4, 5], selected=[3]).pairs == [(3, "fp8")]
