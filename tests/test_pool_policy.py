"""Which pages go cold: the window's limit, sinks, groups of layers, replicas' budget, option syntax."""

import pytest

from coldkv.errors import InputError
from coldkv.pool.policy import LayerPages, Policy, parse_bytes, plan_pages


@pytest.mark.parametrize(
    "tokens,keep,page_tokens,limit",
    [
        (672, 128, 64, 8),
        (640, 128, 64, 8),
        (639, 128, 64, 7),
        (128, 128, 64, 0),
        (129, 128, 64, 0),
        (192, 128, 64, 1),
        (100, 0, 64, 1),  # the partial page is not whole
        (128, 0, 64, 2),
        (63, 0, 64, 0),
        (17, 1, 16, 1),
        (0, 0, 16, 0),
    ],
)
def test_limit_of_the_window(tokens, keep, page_tokens, limit):
    policy = Policy(keep_tokens=keep)
    assert policy.cold_limit(tokens, page_tokens) == limit
    mapped = -(-tokens // page_tokens)
    assert limit == (min(mapped, (tokens - keep) // page_tokens) if tokens > keep else 0)
    assert Policy("none", keep_tokens=keep).cold_limit(tokens, page_tokens) == 0


def test_every_page_has_one_reason():
    layers = [
        LayerPages(0, 672, 100, sink_pages=frozenset({0, 1})),
        LayerPages(1, 672, 100, can_go_cold=False),
        LayerPages(2, 200, 100),
    ]
    plans = plan_pages(Policy(), layers, 64, {672: {5}})
    assert plans[0].cold == [2, 3, 4, 6, 7]
    assert plans[0].counts == {"sink": 2, "cold": 5, "invalid": 1, "recent": 3}
    assert plans[1].cold == [] and plans[1].counts == {"no_codec": 11}
    assert plans[2].cold == [0] and plans[2].counts == {"cold": 1, "recent": 3}
    none = plan_pages(Policy("none"), layers, 64)
    assert [none[i].counts for i in (0, 1, 2)] == [{"policy_none": 11}, {"no_codec": 11}, {"policy_none": 4}]


def test_a_sink_in_one_layer_keeps_the_page_hot_in_all_of_its_length():
    layers = [LayerPages(0, 320, 1, sink_pages=frozenset({0})), LayerPages(1, 320, 1, sink_pages=frozenset({1}))]
    plans = plan_pages(Policy(keep_tokens=0), layers, 64)
    assert plans[0].cold == plans[1].cold == [2, 3, 4]


@pytest.mark.parametrize(
    "host_bytes,replicas", [(0, []), (19, []), (20, [0]), (59, [0, 1]), (60, [0, 1, 2]), (10**6, [0, 1, 2])]
)
def test_replicas_are_whole_pages_of_all_layers_within_the_budget(host_bytes, replicas):
    layers = [LayerPages(0, 192, 13), LayerPages(5, 192, 7), LayerPages(6, 192, 1000, can_go_cold=False)]
    policy = Policy("host", keep_tokens=0, host_bytes=host_bytes)
    plans = plan_pages(policy, layers, 64)
    assert plans[0].replicas == plans[5].replicas == replicas
    assert plans[0].replicas_missed == plans[5].replicas_missed == 3 - len(replicas)
    assert plans[6].replicas == [] and plans[6].replicas_missed == 0
    assert plan_pages(Policy("window", keep_tokens=0), layers, 64)[0].replicas == []


@pytest.mark.parametrize("text,count", [("0", 0), ("100", 100), ("64k", 65536), ("3M", 3 << 20), (" 4g ", 4 << 30)])
def test_byte_counts(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5g", "4t", "4gb", "0x10", "1 g", "٤k", "9" * 16])
def test_malformed_byte_counts(text):
    with pytest.raises(InputError, match="expected N, Nk, Nm or Ng"):
        parse_bytes(text)


@pytest.mark.parametrize("bad", [{"name": "lru"}, {"keep_tokens": -1}, {"sink_tokens": -1}, {"host_bytes": -1}])
def test_malformed_policies(bad):
    with pytest.raises(InputError, match="cold policy"):
        Policy(**bad)
