"""Layer selections on the command line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldkv.errors import InputError
from coldkv.layers import format_layers, parse_layers, select_layers


def test_numbers_and_ranges():
    assert parse_layers("0,3-7") == [0, 3, 4, 5, 6, 7]
    assert parse_layers(" 9 , 1 - 2 ") == [1, 2, 9]
    assert parse_layers("4-4") == [4]


@pytest.mark.parametrize(
    "text", ["", ",", "a", "1,", "1-", "-1", "3-1", "1,1", "1-4,3", "1.5", "0-9999999", "1;2", "٣"]
)
def test_malformed_selections_are_refused(text):
    with pytest.raises(InputError, match="layers "):
        parse_layers(text)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_format_is_the_inverse(found):
    assert parse_layers(format_layers(found)) == sorted(found)


def test_unknown_layers_name_what_exists():
    assert select_layers(None, [3, 7], "dump a") == [3, 7]
    assert select_layers("7", [3, 7], "dump a") == [7]
    with pytest.raises(InputError, match="'1-3': dump a has no layer 1-2; layers with KV: 3,7"):
        select_layers("1-3", [3, 7], "dump a")
