"""The device's short cuts to E2M1 against the comparisons of the specification, for every input that can occur."""

import ctypes
import hashlib

import pytest
from clirun import ROOT
from shim.backend import require
from shim.build import COMMON, RUNTIME

from coldkv import native

SOURCE = ROOT / "tests" / "native" / "device_numerics.cpp"


@pytest.fixture(scope="module")
def checks():
    require()
    compiler = native.host_compiler()
    flags = (*COMMON, "-ffp-contract=off", "-DCKV_SHIM", f"-I{RUNTIME}", f"-I{native.kernels_dir()}")
    key = native._key(native._version_text(compiler), flags, hashlib.sha256(SOURCE.read_bytes()).hexdigest())
    target = native.cache_dir() / f"coldkv-device-numerics-{key}.so"
    native.build_shared(target, compiler, [(SOURCE, flags)])
    return ctypes.CDLL(str(target))


@pytest.mark.parametrize(
    "name,least",
    [
        ("e2m1", 30_000_000),
        ("iso3", 30_000_000),
        ("signs_of_nothing", 24),
        ("words_of_codes", 300_000),
        ("division", 33_000_000),
        ("decoding", 70_000),
    ],
)
def test_every_case_is_as_the_comparisons_say(checks, name, least):
    cases = ctypes.c_longlong()
    function = getattr(checks, f"check_{name}")
    function.restype = ctypes.c_longlong
    assert function(ctypes.byref(cases)) == 0
    assert cases.value >= least
