"""Builds the CUDA library from the same kernel sources, and loads it; no GPU is needed for either.

Torch's `load_inline` does it where what it needs is there: ninja, setuptools, Python's headers. Elsewhere nvcc is
called directly, with the same flags. The sources know nothing of torch, and functions are called through ctypes like
those of the host library; so a C++ engine can use what `build_with_nvcc` makes.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from coldkv.errors import ToolError
from coldkv.native import Library, _first_error, _key, _locked, _run_compiler, _version_text, cache_dir, kernels_dir

ARCHITECTURES = (80, 90, 120)  # Ampere, Hopper, Blackwell (consumer); PTX of the newest for what comes later
CODE_FLAGS = ("-O3", "-std=c++17", "-fmad=false")  # what decides over the device code
CUDA_FLAGS = (*CODE_FLAGS, "--threads=0", "-Xcompiler", "-fvisibility=hidden")

# An importable module with nothing in it: what the library offers is its C functions.
MODULE_SOURCE = """
#include <Python.h>
static PyModuleDef def = {{PyModuleDef_HEAD_INIT, "{name}", nullptr, -1, nullptr}};
PyMODINIT_FUNC PyInit_{name}() {{ return PyModule_Create(&def); }}
"""


@cache
def cuda_library() -> Library:
    """The CUDA kernels, built at the first call on a machine. Raises ToolError when they cannot be built here."""
    import torch

    if torch.version.cuda is None:
        raise ToolError("CUDA kernels: this torch is built without CUDA", hint="install a CUDA build of torch")
    home = cuda_home()
    nvcc = [str(home / "bin" / "nvcc")]
    flags = (*CUDA_FLAGS, *architecture_flags(nvcc))
    name = f"coldkv_cuda_{_key(_version_text(nvcc), flags, torch.__version__, sys.version_info[:2])}"
    folder = cache_dir() / name
    target, finished = folder / f"{name}.so", folder / "finished"
    with _locked(folder):
        if not (finished.exists() and target.exists()):
            folder.mkdir(exist_ok=True)
            if missing := load_inline_lacks():
                build_with_nvcc(home, target, flags)
                finished.write_text(f"nvcc, since load_inline lacks {missing}")
            else:
                _load_inline(home, name, folder, flags)
                finished.write_text("load_inline")
        built_by = finished.read_text()
    library = Library(_import_module(name, target) if built_by == "load_inline" else target, "cuda")
    library.built_by = built_by
    return library


def load_inline_lacks() -> str | None:
    """What keeps `load_inline` from building here, or None."""
    if not (shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))):
        return "ninja"
    if not find_spec("setuptools"):
        return "setuptools"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return None if header.is_file() else str(header)


def build_with_nvcc(home: Path, target: Path, flags: tuple[str, ...]) -> None:
    """Compile the kernel sources side by side and link them to the shared library `target`, which appears whole."""
    nvcc = str(home / "bin" / "nvcc")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as work:
        sources = sorted(kernels_dir().glob("*.cu"))
        objects = [str(Path(work) / f"{source.stem}.o") for source in sources]
        commands = [
            [nvcc, *flags, "-Xcompiler", "-fPIC", "-c", str(source), "-o", obj]
            for source, obj in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run_compiler, commands))
        built = Path(work) / target.name
        _run_compiler([nvcc, "-shared", "-Xlinker", "--no-undefined", *objects, "-o", str(built)])
        os.replace(built, target)


def cuda_home() -> Path:
    """The toolkit that nvcc really belongs to: $CUDA_HOME, what nvcc says, /usr/local/cuda.

    nvcc on PATH may be a wrapper script far from its toolkit, so its own word (`--dryrun`) counts, not its place.
    """
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        said = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
        if top := re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE):
            candidates.append(top.group(1).strip())
    candidates.append("/usr/local/cuda")
    for folder in candidates:
        if folder and (Path(folder) / "bin" / "nvcc").is_file():
            return Path(folder).resolve()
    raise ToolError("CUDA toolkit: nvcc not found on PATH nor in /usr/local/cuda", hint="install it or set CUDA_HOME")


def architecture_flags(nvcc: list[str]) -> list[str]:
    """-gencode flags for those of ARCHITECTURES that this nvcc knows, with PTX of the newest one."""
    listed = subprocess.run([*nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    known = [arch for arch in ARCHITECTURES if f"compute_{arch}" in listed.split()]
    if not known:
        wanted = ", ".join(f"sm_{arch}" for arch in ARCHITECTURES)
        raise ToolError(f"{nvcc[0]}: expected support for one of {wanted}, found none")
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in known]
    return [*flags, f"-gencode=arch=compute_{known[-1]},code=compute_{known[-1]}"]


def _load_inline(home: Path, name: str, folder: Path, flags: tuple[str, ...]) -> None:
    with _build_environment(home):
        from torch.utils import cpp_extension

        cpp_extension.CUDA_HOME = str(home)  # it may have been imported, and made up its mind, before
        includes = "\n".join(f'#include "{source.name}"' for source in sorted(kernels_dir().glob("*.cu")))
        try:
            cpp_extension.load_inline(
                name,
                cpp_sources=[MODULE_SOURCE.format(name=name)],
                cuda_sources=[includes],
                extra_cuda_cflags=list(flags),
                extra_include_paths=[str(kernels_dir())],
                build_directory=str(folder),
                with_cuda=True,
                no_implicit_headers=True,
            )
        except (RuntimeError, OSError, ImportError) as error:
            raise ToolError(f"CUDA kernel build failed: {_first_error(_whole_message(error))}") from error


def _whole_message(error: BaseException) -> str:
    """load_inline puts the compiler's output into the exception or its cause."""
    output = getattr(error.__cause__, "stdout", None) or b""
    lines = (output.decode(errors="replace") if isinstance(output, bytes) else output).splitlines()
    errors = [line for line in (*lines, *str(error).splitlines()) if re.search(r"\berror\b", line)]
    return "\n".join(errors) or str(error)


@contextmanager
def _build_environment(home: Path):
    """CUDA_HOME, and ninja on PATH also when the virtual environment that holds it is not activated."""
    saved = {key: os.environ.get(key) for key in ("CUDA_HOME", "PATH")}
    os.environ["CUDA_HOME"] = str(home)
    if not shutil.which("ninja"):
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        yield
    finally:
        for key, value in saved.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _import_module(name: str, path: Path) -> Path:
    """Import the built module, so that an undefined symbol shows here and not at the first call."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, path)
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except ImportError as error:
        raise ToolError(f"{path}: built, but cannot be loaded: {error}") from error
    return path
