"""The shim catches what it is for: each kernel of shim/faults/ passes as it is and is caught with its fault planted."""

import ctypes
from functools import cache

import pytest
import torch
from shim.backend import SEEDS, Shim, ShimFault, require
from shim.build import SELF_TESTS, build

N, BLOCK = 1024, 256

# What `out` holds after the sound version; it starts as zeros.
EXPECTED = {
    "block_race": lambda x: pad(x.view(-1, BLOCK).sum(0)),
    "divergent_barrier": lambda x: pad(x.view(-1, BLOCK).sum(1)),
    "endless": lambda x: 2 * x,
    "exited_lane": lambda x: in_lanes(24, (x.view(-1, 32)[:, :24] > 0).sum(1, keepdim=True)),
    "freed_early": lambda x: 2 * x,
    "local_index": lambda x: torch.tensor([0, 1, 5, 14, 30, 55, 91, 140])[x & 7],
    "misaligned_load": lambda x: torch.cat((x[:-4], torch.zeros(4, dtype=x.dtype))),
    "missing_async_wait": lambda x: x.view(-1, BLOCK).flip(1),
    "missing_barrier": lambda x: x.view(-1, BLOCK).flip(1),
    "missing_lane": lambda x: in_lanes(32, x.view(-1, 32)[:, :24].sum(1, keepdim=True)),
    "out_of_range_read": lambda x: torch.cat((x[1:], torch.zeros(1, dtype=x.dtype))),
    "out_of_range_write": lambda x: 2 * x,
    "race": lambda x: pad(x.view(-1, BLOCK).sum(1)),
    "shared_out_of_range": lambda x: torch.nn.functional.pad(x.view(-1, BLOCK)[:, :-1], (1, 0)),
    "uninitialised": lambda x: (x.view(-1, BLOCK) > 0).sum(1, keepdim=True).expand(-1, BLOCK),
    "warp_order": lambda x: x.view(-1, 32).flip(1),
    "wrong_mask": lambda x: in_lanes(24, (x.view(-1, 32)[:, :24] > 0).sum(1, keepdim=True)),
}

# What the planted version is reported as: after "kernel NAME block (x,0,0) thread T".
DIVERGENT = r"waits at __syncthreads \(divergent_barrier.cu:\d+\); thread \d+ waits at __syncthreads"
EXITED = r"waits at __ballot_sync \(exited_lane.cu:\d+\) for lanes ffffffff; lane 2\d has exited"
MISSING = r"waits at __shfl_xor_sync \(missing_lane.cu:\d+\) .* waits at __syncthreads"
ACCESS = r"(reads|writes) 4 bytes at byte \d+ of"
SHARED_RACE = rf"{ACCESS} a shared array, where thread \d+ has (read|written)"
PAST_END = "4 bytes 0 bytes past the end of"
REPORTS = {
    "block_race": ("race", rf"{ACCESS} argument 3 .*, where another block of the launch has"),
    "divergent_barrier": ("deadlock", DIVERGENT),
    "endless": ("does not end", "is one of a block that has made 100000 memory accesses"),
    "exited_lane": ("deadlock", EXITED),
    "freed_early": ("out of range", "reads 4 bytes at an address in no buffer of this device"),
    "local_index": ("undefined", r"indexes an array outside its bounds \(local_index.cu:\d+\)"),
    "misaligned_load": ("misaligned", "4 bytes after a multiple of 16, the alignment of its type"),
    "missing_async_wait": ("async copy|race", f"its async copy has not been waited for|{SHARED_RACE}"),
    "missing_barrier": ("race", SHARED_RACE),
    "missing_lane": ("deadlock", MISSING),
    "out_of_range_read": ("out of range", f"reads {PAST_END} argument 2 of .* of 4096 bytes"),
    "out_of_range_write": ("out of range", f"writes {PAST_END} argument 3 of .* of 4096 bytes"),
    "race": ("race", SHARED_RACE),
    "shared_out_of_range": ("out of range", f"writes {PAST_END} a shared array of 1024 bytes"),
    "warp_order": ("race", SHARED_RACE),
    "wrong_mask": ("mask", r"calls __ballot_sync with mask 007fffff .*, in which its own lane is missing"),
}
LINED = ("out_of_range_write", "race", "misaligned_load", "divergent_barrier", "missing_async_wait")


def pad(sums: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(sums, (0, N - len(sums)))


def in_lanes(lanes: int, per_warp: torch.Tensor) -> torch.Tensor:
    return per_warp * (torch.arange(32) < lanes)


@cache
def faults() -> Shim:
    require()
    return Shim(build(*SELF_TESTS))


def run(name: str, planted: bool, seed: int, *, shuffle=True, track_races=True, most_accesses=100_000_000):
    """(what the kernel gives, what it should give), as lists."""
    shim = faults()
    shim.seed, shim.shuffle, shim.track_races, shim.most_accesses = seed, shuffle, track_races, most_accesses
    x = (torch.arange(N, dtype=torch.int32) * 7919 % 1009) - 400
    out = torch.zeros(N, dtype=torch.int32)
    arguments = (ctypes.c_int(planted), x.clone(), out, ctypes.c_int(N), ctypes.c_void_p(None))
    shim.call(f"ckv_fault_{name}_cuda", *arguments)
    return out.tolist(), EXPECTED[name](x).flatten().tolist()


def test_every_fault_is_in_the_tables():
    assert sorted(EXPECTED) == [path.stem for path in SELF_TESTS[1:]]
    assert sorted([*REPORTS, "uninitialised"]) == sorted(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_sound_version_passes_under_every_schedule(name):
    for seed in SEEDS:
        found, expected = run(name, False, seed)
        assert found == expected
    found, expected = run(name, False, 0, shuffle=False)
    assert found == expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", sorted(REPORTS))
def test_planted_fault_is_reported_with_kernel_block_and_thread(name, seed):
    kind, text = REPORTS[name]
    kernel = rf"kernel ckv::{name}_kernel(<true>)? block \([0-4],0,0\) thread \d+ "
    with pytest.raises(ShimFault, match=f"^({kind}): {kernel}.*({text})") as caught:
        run(name, True, seed, most_accesses=100_000)
    if name in LINED:
        assert f"{name}.cu:" in str(caught.value)
    found, expected = run(name, False, seed)  # and the shim goes on working
    assert found == expected


@pytest.mark.parametrize("name", ("race", "missing_barrier"))
def test_races_show_in_the_results_too(name):
    """Without the tracking, under every one of the schedules."""
    for seed in SEEDS:
        found, expected = run(name, True, seed, track_races=False)
        assert found != expected


def test_a_race_does_not_show_when_threads_run_in_order():
    found, expected = run("race", True, 0, shuffle=False, track_races=False)
    assert found == expected


def test_memory_nobody_has_written_differs_from_schedule_to_schedule():
    results = []
    for seed in SEEDS:
        found, expected = run("uninitialised", True, seed)
        assert found != expected
        results.append(found)
    assert results[0] != results[1] != results[2]


def test_a_schedule_can_be_repeated():
    """The same seed gives the same interleaving, whatever has run before."""
    once = [run("race", True, seed, track_races=False)[0] for seed in (1, 2, 3, 4, 5)]
    again = [run("race", True, seed, track_races=False)[0] for seed in (5, 4, 3, 2, 1)][::-1]
    assert once == again and len({tuple(r) for r in once}) > 1
