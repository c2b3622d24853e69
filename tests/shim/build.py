"""Builds shim libraries: kernels with the checks compiled in, the runtime without."""

import hashlib
from functools import cache
from pathlib import Path

from coldkv import native

FOLDER = Path(__file__).parent
RUNTIME = FOLDER / "runtime"
COMMON = ("-std=c++17", "-O2", "-g1", "-fPIC", "-pthread", "-fvisibility=hidden")
# The sanitizers only mark the accesses here; the functions they call are in runtime/checks.cpp.
KERNEL_FLAGS = (
    "-x", "c++", *COMMON, "-ffp-contract=off", "-fno-fast-math", "-fno-exceptions", "-fno-optimize-sibling-calls",
    "-DCKV_SHIM", f"-I{RUNTIME}",
    "-fsanitize=thread", "-fsanitize=alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero",
)  # fmt: skip

SELF_TESTS = (FOLDER / "primitives.cu", *sorted((FOLDER / "faults").glob("*.cu")))  # kernels that test the shim


@cache
def build(*sources: Path, extra_flags: tuple[str, ...] = ()) -> Path:
    """The library of these kernel sources; all of kernels/ when none is named. Raises ToolError without a compiler."""
    compiler = native.host_compiler()
    kernels = native.kernels_dir()
    flags = (*KERNEL_FLAGS, f"-I{kernels}", *extra_flags)
    units = [(source, flags) for source in sources or sorted(kernels.glob("*.cu"))]
    units += [(source, (*COMMON, f"-I{RUNTIME}", *extra_flags)) for source in sorted(RUNTIME.glob("*.cpp"))]
    contents = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (*sources, *sorted(RUNTIME.iterdir()))]
    key = native._key(native._version_text(compiler), units, contents)
    target = native.cache_dir() / f"coldkv-shim-{key}.so"
    native.build_shared(target, compiler, units)
    return target
