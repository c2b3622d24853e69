"""What `coldkv doctor` looks at: one function per part, each says what it found and what follows."""

import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from coldkv.errors import ColdkvError

OK = "ok"
MISSING = "missing"
BROKEN = "broken"


@dataclass(frozen=True)
class Check:
    """`state` is ok, missing or broken; `found` what is there; `means` what that means for coldkv."""

    name: str
    state: str
    found: str
    means: str
    required: bool = False

    @property
    def fatal(self) -> bool:
        return self.required and self.state != OK

    def to_dict(self) -> dict:
        return asdict(self)


def diagnose() -> list[Check]:
    """All checks, in an order in which a later one may explain an earlier one. Never raises for a broken part."""
    checks: list[Check] = []
    for check in CHECKS:
        try:
            checks += check()
        except Exception as error:  # a diagnosis must survive what it diagnoses
            name = check.__name__.strip("_").replace("_", " ")
            checks.append(Check(name, BROKEN, f"{type(error).__name__}: {error}", "the check itself failed"))
    return checks


def _python() -> list[Check]:
    found = f"{platform.python_version()} at {sys.executable}"
    state = OK if sys.version_info >= (3, 11) else BROKEN
    return [Check("python", state, found, "3.11 or newer is needed", required=True)]


def _packages() -> list[Check]:
    out = []
    for name in ("click", "numpy", "pandas", "rich", "safetensors"):
        state, found = _import(name)
        out.append(Check(name, state, found, "needed: pip install coldkv brings it", required=True))
    return out


def _torch() -> list[Check]:
    state, found = _import("torch")
    if state != OK:
        return [Check("torch", state, found, "needed by measure, pack and restore: pip install torch", required=True)]
    import torch

    build = torch.version.cuda
    means = f"built for CUDA {build}" if build else "a CPU-only build: the cuda backend cannot be built with it"
    out = [Check("torch", OK, found, means, required=True)]
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        found = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}"
        return [*out, Check("gpu", OK, found, "backend cuda can run")]
    return [*out, Check("gpu", MISSING, "none that torch can use", "backend cuda cannot run; cpu and torch can")]


def _cpu_backend() -> list[Check]:
    from coldkv import native

    out = []
    without = "backend cpu cannot be built, torch is used instead"
    try:
        compiler = native.host_compiler()
        out.append(
            Check("c++ compiler", OK, f"{compiler[0]}: {_first_line(*compiler, '--version')}", "builds backend cpu")
        )
    except ColdkvError as error:
        out.append(Check("c++ compiler", MISSING, str(error), f"{without}; {error.hint}"))
    try:
        folder = native.cache_dir()
        built = sorted(folder.glob("*.so"))
        size = sum(path.stat().st_size for path in built)
        state = OK if os.access(folder, os.W_OK) else BROKEN
        means = "built kernels are kept here; COLDKV_CACHE_DIR moves it"
        out.append(Check("cache folder", state, f"{folder} ({len(built)} libraries, {size:,} bytes)", means))
    except ColdkvError as error:
        out.append(Check("cache folder", BROKEN, str(error), f"kernels cannot be kept; {error.hint}"))
    try:
        library = native.host_library()
        out.append(Check("cpu kernels", OK, str(library.path), "backend cpu is built and loads"))
    except ColdkvError as error:
        out.append(Check("cpu kernels", MISSING, str(error), without))
    return out


def _cuda_backend() -> list[Check]:
    from coldkv import native_cuda

    without = "backend cuda cannot be built"
    try:
        home = native_cuda.cuda_home()
    except ColdkvError as error:
        return [Check("cuda toolkit", MISSING, str(error), f"{without}; {error.hint or 'set CUDA_HOME'}")]
    nvcc = home / "bin" / "nvcc"
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30)
    release = re.search(r"release ([\d.]+)", done.stdout)
    if done.returncode or not release:
        return [Check("cuda toolkit", BROKEN, f"{nvcc}: exit {done.returncode}", without)]
    found = f"{release[1]} at {home}"
    try:
        import torch

        build = torch.version.cuda
    except ImportError:
        build = None
    if not build:
        return [Check("cuda toolkit", MISSING, found, f"{without} with a CPU-only torch; install its CUDA build")]
    if build.split(".")[0] != release[1].split(".")[0]:
        means = f"{without}: torch wants a toolkit of CUDA {build}; set CUDA_HOME to one"
        return [Check("cuda toolkit", BROKEN, found, means)]
    return [Check("cuda toolkit", OK, found, "backend cuda can be built")]


def _files() -> list[Check]:
    from coldkv.dumps import sample_path

    sample = sample_path()
    if sample.is_file():
        found = f"{sample} ({sample.stat().st_size:,} bytes)"
        return [Check("sample dump", OK, found, "measure --sample works")]
    return [Check("sample dump", MISSING, str(sample), "measure --sample cannot run; install again", required=True)]


def _extras() -> list[Check]:
    uses = {
        "transformers": "coldkv capture and eval; pip install 'coldkv[capture]'",
        "gguf": "capture and eval of GGUF files; pip install 'coldkv[capture]'",
        "matplotlib": "coldkv report --plot; pip install 'coldkv[plot]'",
        "ninja": "building backend cuda; pip install 'coldkv[cuda]'",
    }
    out = []
    for name, use in uses.items():
        try:
            out.append(Check(name, OK, importlib.metadata.version(name), f"optional, for {use.split(';')[0]}"))
        except importlib.metadata.PackageNotFoundError:
            out.append(Check(name, MISSING, "not installed", f"optional, for {use}"))
    return out


def _codecs() -> list[Check]:
    from coldkv.codecs import broken_entry_points, codec_ids

    out = [Check("codecs", OK, ", ".join(codec_ids()), "built in or by the entry point coldkv.codecs", required=True)]
    means = "an installed package registers a codec that does not load; uninstall or fix it"
    return out + [Check("codecs", BROKEN, " ".join(line.split()), means) for line in broken_entry_points.values()]


CHECKS: list[Callable[[], list[Check]]] = [
    _python,
    _packages,
    _torch,
    _cpu_backend,
    _cuda_backend,
    _codecs,
    _files,
    _extras,
]


def _import(name: str) -> tuple[str, str]:
    """(state, version or error) of a package, by really importing it: a wrong binary shows only then."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return MISSING, "not installed"
        return BROKEN, str(error)
    except Exception as error:
        return BROKEN, " ".join(f"{type(error).__name__}: {error}".split())
    try:
        return OK, importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return OK, str(getattr(module, "__version__", "unknown version"))


def _first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return (done.stdout or done.stderr).strip().split("\n")[0]
