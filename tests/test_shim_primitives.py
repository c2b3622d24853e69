"""The shim's primitives (barriers, shuffles, votes, atomics, dp4a, mma, async copies) against plain definitions."""

import ctypes
import subprocess
from functools import cache

import numpy as np
import pytest
import torch
from shim.backend import SEEDS, Shim, require
from shim.build import SELF_TESTS, build

from coldkv import native, native_cuda
from coldkv.errors import ToolError

SWITCHES = ("own", "ucontext")  # how fibers are switched: own code on x86-64, ucontext elsewhere
RNG = np.random.default_rng(3)


@cache
def primitives(switch: str) -> Shim:
    require()
    if switch == "ucontext":
        return Shim(build(SELF_TESTS[0], extra_flags=("-DCKV_SHIM_UCONTEXT",)))
    return Shim(build(*SELF_TESTS))


def run(name: str, x: np.ndarray, size: int, seed: int, start=None, switch: str = "own") -> np.ndarray:
    """What kernel `name` makes of the int32 values x in `size` int32 results, which begin as `start` or undefined."""
    shim = primitives(switch)
    shim.seed = seed
    out = torch.full((size,), -559038737, dtype=torch.int32) if start is None else torch.from_numpy(start.copy())
    shim.call(f"ckv_primitive_{name}_cuda", torch.from_numpy(x.astype(np.int32)), out, ctypes.c_void_p(None))
    return out.numpy()


def integers(*shape: int) -> np.ndarray:
    return RNG.integers(-(2**31), 2**31, shape).astype(np.int32)


def pick(x: np.ndarray, source) -> np.ndarray:
    """x[source(lane)] in every warp of 32; None is the lane itself."""
    lanes = [lane if source(lane) is None else source(lane) for lane in range(32)]
    return x.reshape(-1, 32)[:, lanes].reshape(-1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("switch", SWITCHES)
def test_shuffles(seed, switch):
    x = RNG.integers(-(2**20), 2**20, 128)
    found = run("shuffles", x, 1280, seed, switch=switch).reshape(10, 128)
    sources = (
        lambda i: (i * 5 + 3) % 32,
        lambda i: i // 8 * 8 + i // 2 % 8,
        lambda i: i - 3 if i >= 3 else None,
        lambda i: i - 3 if i % 16 >= 3 else None,
        lambda i: i + 5 if i + 5 < 32 else None,
        lambda i: i + 5 if i % 8 + 5 < 8 else None,
        lambda i: i ^ 21,
        lambda i: i ^ 12 if (i ^ 12) < i // 8 * 8 + 8 else None,
        lambda i: 11 - i if i < 12 else i ^ 3,
    )
    for row, source in zip(found, sources, strict=False):
        assert (row == pick(x, source)).all()
    assert (found[9] == 2 * pick(x, lambda i: i + 1 if i < 31 else None) + 1).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("switch", SWITCHES)
def test_votes_while_lanes_leave_a_loop(seed, switch):
    x = RNG.integers(0, 2**16, 128)
    expected = []
    for warp in x.reshape(-1, 32):
        left, code = [int(v) & 15 for v in warp], [1] * 32
        while lanes := [i for i in range(32) if left[i] > 0]:
            for i in lanes:
                below = sum(left[j] & 1 for j in lanes if j < i)
                code[i] = (code[i] * 33 + below) & 0xFFFFFF
                code[i] ^= 0x100 if any(left[j] == 7 for j in lanes) else 0
                code[i] ^= 0x200 if all(left[j] < 9 for j in lanes) else 0
            for i in lanes:
                left[i] -= 1
        expected += code
    assert run("votes", x, 128, seed, switch=switch).tolist() == expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_scan_over_the_block(seed, switch):
    x = RNG.integers(-1000, 1000, 256)
    assert (run("scan", x, 256, seed, switch=switch) == np.cumsum(x)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_half_warps_synchronise_apart(seed):
    x = RNG.integers(-1000, 1000, 256)
    rotated, stored = x.reshape(16, 16).copy(), x.reshape(16, 16).copy()
    for half in range(16):
        for _ in range(3 + half % 5):
            stored[half] = rotated[half]
            rotated[half] = np.roll(stored[half], -1)
    assert (run("half_warps", x, 256, seed) == rotated.reshape(-1) + pick(stored.reshape(-1), lambda i: i ^ 31)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_that_count(seed):
    for x in (RNG.integers(0, 100, 128), RNG.integers(-100, 100, 128)):
        expected = (x & 1).sum() * 4 + (x >= 0).all() * 2 + 1
        assert (run("barriers", x, 128, seed) == expected).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_warp_reductions(seed):
    x = integers(128)
    found = run("reductions", x, 768, seed).reshape(6, 128)
    for warp in range(4):
        for lanes in (slice(0, 8), slice(8, 32)):
            part = x.reshape(4, 32)[warp, lanes]
            unsigned = part.view(np.uint32)
            both = (np.bitwise_or.reduce(part), np.bitwise_and.reduce(part))
            expected = (part.sum(dtype=np.int32), part.min(), part.max(), unsigned.max().view(np.int32), *both)
            for row, value in zip(found.reshape(6, 4, 32)[:, warp, lanes], expected, strict=True):
                assert (row == value).all()


def test_bits():
    x = integers(128)
    x[:4] = (0, -1, 1, -(2**31))
    found = run("bits", x, 15 * 128, 1).view(np.uint32).reshape(15, 128).astype(object)
    low32 = 2**32 - 1
    for t in range(128):
        a, b = int(x[t]) & low32, int(x[(t + 1) % 128]) & low32
        s, both, swapped = a % 40, b << 32 | a, a << 32 | b
        perm = 0
        for i in range(4):
            selector = a >> 3 >> 4 * i & 15
            byte = both >> 8 * (selector & 7) & 255
            perm |= (255 * (byte >> 7) if selector & 8 else byte) << 8 * i
        expected = (
            a.bit_count(),
            32 - (a >> s % 32).bit_length(),
            (a & -a).bit_length(),
            int(f"{a:032b}"[::-1], 2),
            (both << s % 32) >> 32 & low32,
            both >> s % 32 & low32,
            (both << min(s, 32)) >> 32 & low32,
            both >> min(s, 32) & low32,
            perm,
            swapped.bit_count(),
            64 - (swapped >> s).bit_length(),
            (swapped & -swapped).bit_length(),
            a * b >> 32,
            int(np.float32(x[t]).view(np.uint32)),
            int(np.rint(np.array(0x3F800000 | a >> 9, dtype=np.uint32).view(np.float32) * np.float32(8))),
        )
        assert found[:, t].tolist() == list(expected), t


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics(seed):
    x = integers(512)
    start = np.zeros(16 + 512 + 2, dtype=np.int32)
    start[7] = -1
    found = run("atomics", x, len(start), seed, start=start)
    u = x.view(np.uint32)
    assert found[0] == found[3] == x.sum(dtype=np.int32)
    assert (found[1], found[2]) == (max(0, x.max()), min(0, x.min()))
    assert found[4:8].view(np.uint32).tolist() == [
        u.max(), np.bitwise_or.reduce(u), np.bitwise_xor.reduce(u), np.bitwise_and.reduce(u | 0xFFFF0000),
    ]  # fmt: skip
    product = 0
    for _ in range(512):
        product = (product * 3 + 1) & 0xFFFF
    assert (found[8], found[9]) == (-3 * 512, product)
    wide = found[10:14].copy().view(np.uint64)
    assert wide.tolist() == [sum(int(v) << 8 for v in u), int(u.max()) << 8]
    assert found[14:15].view(np.float32)[0] == 128 and found[15] == 77
    assert sorted(found[16:528].tolist()) == list(range(512)) and found[528] == 512
    assert found[16:528].tolist() != list(range(512))  # the schedule shows


def test_dp4a():
    x = integers(3, 128)
    bytes_of = x[:2].view(np.int8).reshape(2, 128, 4).astype(np.int64)
    expected = ((bytes_of[0] * bytes_of[1]).sum(1) + x[2]).astype(np.int32)
    assert (run("dp4a", x.reshape(-1), 128, 1) == expected).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_mma(seed):
    a, b = RNG.integers(-128, 128, (4, 16, 64)), RNG.integers(-128, 128, (4, 8, 64))
    x = np.concatenate((a.reshape(4, -1), b.reshape(4, -1)), axis=1).astype(np.int8).reshape(-1).view(np.int32)
    begin = np.tile(np.array([[1, 2]]), (16, 4)) + np.repeat([0, 2], 8)[:, None]
    expected = begin + np.einsum("wik,wjk->wij", a, b)
    assert (run("mma", x, 512, seed).reshape(4, 16, 8) == expected).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_async_copies_in_flight(seed):
    x = RNG.integers(-1000, 1000, (8, 128))
    assert (run("async", x.reshape(-1), 128, seed) == x.sum(0)[::-1]).all()


def test_dynamic_shared_memory():
    x = integers(128, 128)
    assert (run("dynamic", x.reshape(-1), 128 * 128, 1).reshape(128, 128) == x.T).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_indices_of_grids_and_blocks(seed):
    found = run("indices", np.zeros(1), 12 * 96, seed).reshape(12, 96)
    assert (found == np.arange(12)[:, None] * 1000 + np.arange(96)).all()


def test_vectors_and_copies():
    x = integers(128, 4)
    found = run("vectors", x.reshape(-1), 1024, 1).reshape(2, 128, 4)
    assert (found[0] == np.stack((x[:, 3], x[:, 2], x[:, 1], x[:, 0] & 255), axis=1)).all()
    for t in range(128):
        assert (found[1, t, : t % 4] == x[t, : t % 4]).all() and (found[1, t, t % 4 :] == -559038737).all()


def test_nvcc_takes_the_same_source(tmp_path):
    """Above all the wrappers with inline assembly, which no other kernel uses yet."""
    try:
        nvcc = native_cuda.cuda_home() / "bin" / "nvcc"
    except ToolError as error:
        pytest.skip(str(error))
    target = tmp_path / "primitives.o"
    flags = [*native_cuda.CUDA_FLAGS, "-arch=sm_80", f"-I{native.kernels_dir()}"]
    built = subprocess.run([nvcc, *flags, "-c", SELF_TESTS[0], "-o", target], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert target.stat().st_size
