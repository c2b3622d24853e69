"""Every kernel of kernels/ on the CPU: golden checksums and more, three shuffled schedules, every access checked."""

import re
from functools import cache

import pytest
import torch
from shim.backend import SEEDS, ShimBackend, require
from shim.cases import CASES, kernel_names, kernels_in_sources


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def shim_backend() -> ShimBackend:
    require()
    return ShimBackend()


@cache
def run(name: str, seed: int) -> frozenset[str]:
    """Runs a case once in the session; the kernels it has launched."""
    backend = shim_backend()
    before = backend.shim.kernels()
    backend.shim.seed = seed
    CASES[name](backend)
    return frozenset(kernel for kernel, count in backend.shim.kernels().items() if count > before[kernel])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_case(name, seed):
    assert run(name, seed) or name == "no_pages"


@pytest.mark.parametrize("seed", SEEDS)
def test_every_kernel_runs_under_every_schedule(seed):
    """By template arguments, as the library lists them; a new kernel is missing here until a case runs it."""
    ran = set().union(*(run(name, seed) for name in CASES))
    assert sorted(set(shim_backend().shim.kernels()) - ran) == []


def test_every_kernel_in_the_sources_is_in_the_library():
    """A kernel that no entry point launches is not compiled at all: the library's list against the sources."""
    listed = {re.sub(r"<.*", "", name).split("::")[-1] for name in shim_backend().shim.kernels()}
    assert kernels_in_sources() == listed


def test_kernels_are_found_in_source_texts():
    text = "template <int F>\nCKV_KERNEL one(int a) {}\nCKV_KERNEL __launch_bounds__(256) two(\n"
    assert kernel_names(text + "__global__ static void three(int") == {"one", "two", "three"}
    assert not kernel_names("#define CKV_KERNEL __global__ static void\n#define CKV_SHARED(T, name, n)")
