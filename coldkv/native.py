"""Builds the kernels in `kernels/` once per machine and loads them: the host library and the CUDA library.

Both are C libraries (kernels/coldkv.h) reached through ctypes. Builds are cached in `$COLDKV_CACHE_DIR`, else
`$XDG_CACHE_HOME/coldkv`, else `~/.cache/coldkv`, under a key of everything that can change the code: sources,
flags, compiler, processor. ToolError says why a build is not possible. Importing this module does not import torch.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from coldkv.errors import ToolError

ABI_VERSION = 1
HOST_FLAGS = (
    "-x", "c++", "-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-fast-math", "-fPIC", "-pthread",
    "-fvisibility=hidden",
)  # fmt: skip
SLOT_ERROR = 5  # CKV_E_SLOT


class PlaneDesc(ctypes.Structure):
    """`ckv_plane_desc` of kernels/coldkv.h."""

    _fields_ = [
        ("format", ctypes.c_int32),
        ("page_tokens", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("n", ctypes.c_int64),
    ]


class KernelError(ToolError):
    """A kernel returned an error code (`.code`, CKV_E_* of kernels/coldkv.h)."""

    def __init__(self, function: str, code: int, text: str):
        super().__init__(f"{function}: {text}")
        self.code = code


class Library:
    """A loaded kernel library; `suffix` is "cpu" or "cuda", the ending of its function names."""

    def __init__(self, path: Path, suffix: str):
        self.path, self.suffix = path, suffix
        try:
            self._dll = ctypes.CDLL(str(path))
        except OSError as error:
            raise ToolError(f"{path}: cannot be loaded: {error}", hint="delete the file") from error
        found = self._dll.ckv_abi_version()
        if found != ABI_VERSION:
            raise ToolError(f"{path}: expected kernel ABI {ABI_VERSION}, found {found}", hint="delete the file")
        self._dll.ckv_strerror.restype = ctypes.c_char_p
        self._dll.ckv_slot_bytes.restype = ctypes.c_int64
        self._functions: dict[str, ctypes._CFuncPtr] = {}

    def call(self, stem: str, *args) -> None:
        """Call `ckv_<stem>_<suffix>`; arguments are ctypes values. Raises KernelError for a non-zero result."""
        name = f"ckv_{stem}_{self.suffix}"
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = getattr(self._dll, name)
        code = function(*args)
        if code:
            raise KernelError(name, code, self._dll.ckv_strerror(code).decode())

    def has(self, stem: str) -> bool:
        return hasattr(self._dll, f"ckv_{stem}_{self.suffix}")

    def slot_bytes(self, codec_stem: str, fmt: int, page_tokens: int, head_dim: int) -> int:
        """Bytes of one slot, or minus a CKV_E_* code."""
        return self._dll.ckv_slot_bytes(codec_stem.encode(), fmt, page_tokens, head_dim)


def kernels_dir() -> Path:
    """Folder of the kernel sources: inside the installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_kernels", package.parent / "kernels"):
        if (folder / "coldkv.h").is_file():
            return folder
    raise ToolError(f"kernel sources: expected in {package / '_kernels'}, not found", hint="reinstall coldkv")


def cache_dir() -> Path:
    """Where built libraries are kept; created on demand."""
    if folder := os.environ.get("COLDKV_CACHE_DIR"):
        path = Path(folder)
    else:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coldkv"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"{path}: kernel cache cannot be created: {error.strerror}"
        raise ToolError(message, hint="set COLDKV_CACHE_DIR") from error
    return path


@cache
def host_library() -> Library:
    """The host kernels, built at the first call on a machine. Raises ToolError without a working C++ compiler."""
    return build_host()


def build_host(extra_flags: tuple[str, ...] = ()) -> Library:
    """Build (or find) the host library; `extra_flags` such as `-DCKV_NO_SIMD` make a separate library."""
    compiler = host_compiler()
    flags = (*HOST_FLAGS, *extra_flags)
    target = cache_dir() / f"coldkv-cpu-{_key(_version_text(compiler), _cpu_flags(), flags)}.so"
    build_shared(target, compiler, [(source, flags) for source in sorted(kernels_dir().glob("*.cu"))])
    return Library(target, "cpu")


def build_shared(target: Path, compiler: list[str], units: list[tuple[Path, tuple[str, ...]]]) -> None:
    """Compile `units`, (source, flags) each, side by side and link them into `target`, unless it is there as built."""
    with _locked(target):
        if not _intact(target):
            with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as work:
                objects = [str(Path(work) / f"{i}-{source.stem}.o") for i, (source, _) in enumerate(units)]
                commands = [
                    [*compiler, *flags, "-c", str(source), "-o", obj]
                    for (source, flags), obj in zip(units, objects, strict=True)
                ]
                with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                    list(pool.map(_run_compiler, commands))
                built = Path(work) / target.name
                _run_compiler([*compiler, "-shared", "-pthread", *objects, "-o", str(built)])
                _publish(built, target)


def _intact(target: Path) -> bool:
    """Whether `target` is there as it was built: a library that was cut short kills whoever loads it."""
    try:
        return hashlib.sha256(target.read_bytes()).hexdigest() == target.with_suffix(".sha256").read_text()
    except OSError:
        return False


def _publish(built: Path, target: Path) -> None:
    try:
        digest = hashlib.sha256(built.read_bytes()).hexdigest()
        with built.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(built, target)
        note = built.with_suffix(".sha256")
        note.write_text(digest)
        os.replace(note, target.with_suffix(".sha256"))
    except OSError as error:
        raise ToolError(f"kernel build: {error.filename}: {error.strerror}; is CXX a C++ compiler?") from error


def host_compiler() -> list[str]:
    """$CXX, else g++, c++ or clang++, as an argument list. Raises ToolError when there is none."""
    if named := os.environ.get("CXX"):
        try:
            command = shlex.split(named)
        except ValueError as error:
            raise ToolError(f"C++ compiler: CXX is {named!r}: {error}", hint="unset CXX or correct it") from None
        if command and shutil.which(command[0]):
            return command
        raise ToolError(f"C++ compiler: CXX names {named!r}, which is not found", hint="unset CXX or correct it")
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise ToolError("C++ compiler: expected g++, c++ or clang++ on PATH, found none", hint="install one or set CXX")


@contextmanager
def _locked(target: Path):
    """One process builds `target` at a time; others wait and find it built."""
    lock = target.with_suffix(".lock")
    try:
        handle = lock.open("w")
    except OSError as error:
        message = f"{lock}: kernel cache is not writable: {error.strerror}"
        raise ToolError(message, hint="set COLDKV_CACHE_DIR") from error
    with handle:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # no locks on this system: the rename is atomic, so the worst case is building twice
        yield


def _run_compiler(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ToolError(f"{command[0]}: cannot be run: {error.strerror}") from error
    if result.returncode:
        raise ToolError(f"kernel build with {command[0]} failed: {_first_error(result.stderr + result.stdout)}")


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")


def _key(*parts) -> str:
    digest = hashlib.sha256(repr((platform.machine(), *parts)).encode())
    for path in sorted(kernels_dir().iterdir()):
        if path.suffix in (".cu", ".cuh", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def _version_text(command: list[str]) -> str:
    try:
        return subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ToolError(f"{command[0]} --version failed: {error}", hint="set CXX to a working C++ compiler") from error


def _cpu_flags() -> str:
    """What -march=native depends on, so that a cache on a shared disk serves each machine its own library."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    keys = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.split(":")[0].strip() in keys))
