"""The `cuda` backend over kernels that run on the CPU, under a seeded schedule and with every access checked."""

import ctypes
import itertools
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from coldkv.backends import CudaBackend, TorchBackend
from coldkv.errors import ToolError
from coldkv.native import KernelError, Library, host_compiler
from shim.build import build

LAUNCH_ERROR = 6  # CKV_E_LAUNCH
SEEDS = (1, 2, 3)  # the schedules that every case runs under


def require() -> None:
    """Skips the test where there is nothing to build a shim with; a build that fails is a failure."""
    if sys.platform != "linux":
        pytest.skip("the shim needs Linux")
    try:
        host_compiler()
    except ToolError as error:
        pytest.skip(str(error))


class ShimFault(Exception):
    """What a kernel did wrong: "KIND: kernel K block (x,y,z) thread T ..."."""


class Shim:
    """A loaded shim library: its schedule, its device memory and what it has run."""

    def __init__(self, path: Path):
        self.path = path
        self.dll = ctypes.CDLL(str(path))
        self.dll.ckv_shim_fault.restype = ctypes.c_char_p
        self.dll.ckv_shim_allocate.restype = ctypes.c_void_p
        self.dll.ckv_shim_allocate.argtypes = (ctypes.c_size_t, ctypes.c_char_p)
        self.dll.ckv_shim_release.argtypes = (ctypes.c_void_p,)
        self.dll.ckv_shim_live_buffers.restype = ctypes.c_longlong
        self.dll.ckv_shim_kernel.restype = ctypes.c_longlong
        self.dll.ckv_shim_begin.argtypes = (ctypes.c_uint64, ctypes.c_int, ctypes.c_int)
        self.dll.ckv_shim_limit.argtypes = (ctypes.c_longlong,)
        self.seed, self.shuffle, self.track_races = 1, True, True
        self.most_accesses = 100_000_000  # of one block, before it is said not to end
        self.seeds_run: set[int] = set()
        self.seconds = 0.0

    @contextmanager
    def running(self):
        """Around calls of entry points: one schedule, whose launches depend on the seed and their number alone."""
        self.dll.ckv_shim_begin(self.seed, int(self.shuffle), int(self.track_races))
        self.dll.ckv_shim_limit(self.most_accesses)
        buffers, started = self.dll.ckv_shim_live_buffers(), time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started
        self.seeds_run.add(self.seed)
        if fault := self.dll.ckv_shim_fault():
            raise ShimFault(self._with_lines(fault.decode()))
        if self.dll.ckv_shim_live_buffers() != buffers:
            raise ShimFault("a launcher has not freed what it allocated")

    def _with_lines(self, fault: str) -> str:
        """A fault with source lines, innermost first, in place of the offset in the library, if binutils are there."""
        if (offset := re.search(r" \[\+(0x[0-9a-f]+)\]$", fault)) and shutil.which("addr2line"):
            command = ["addr2line", "-i", "-e", str(self.path), offset[1]]
            lines = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")
            names = [line.split(" ")[0].rsplit("/", 1)[-1] for line in lines if ".cu:" in line or ".h:" in line]
            places = list(itertools.takewhile(lambda name: not name.startswith(("invoke.h", "cuda_on_cpu.h")), names))
            fault = fault[: offset.start()] + (f" ({' in '.join(places)})" if places else "")
        return fault

    @contextmanager
    def on_device(self, tensors: dict[str, torch.Tensor]):
        """Copies tensors into guarded buffers of exactly their extent, and back at the end; gives their pointers."""
        pointers = {}
        try:
            for name, tensor in tensors.items():
                pointers[name] = self.dll.ckv_shim_allocate(extent(tensor), name.encode())
                ctypes.memmove(pointers[name], tensor.data_ptr(), extent(tensor))
            yield pointers
            for name, tensor in tensors.items():
                ctypes.memmove(tensor.data_ptr(), pointers[name], extent(tensor))
        finally:
            for pointer in pointers.values():
                self.dll.ckv_shim_release(pointer)

    def call(self, function: str, *args) -> None:
        """Calls an entry point, tensors as device pointers, also those behind a structure with `tensors` by field.

        Raises ShimFault, or KernelError for an error code.
        """
        tensors = {f"argument {i} of {function}": a for i, a in enumerate(args, 1) if isinstance(a, torch.Tensor)}
        behind = [(a._obj, name) for a in args for name in getattr(getattr(a, "_obj", None), "tensors", ())]
        held = {f"{name} of {function}": params.tensors[name] for params, name in behind}
        with self.on_device(tensors | held) as pointers, self.running():
            for params, name in behind:
                setattr(params, name, pointers[f"{name} of {function}"])
            values = iter(pointers.values())  # those of the arguments come first
            code = getattr(self.dll, function)(
                *(ctypes.c_void_p(next(values)) if isinstance(a, torch.Tensor) else a for a in args)
            )
            if code and code != LAUNCH_ERROR:
                raise KernelError(function, code, "refused")

    def kernels(self) -> dict[str, int]:
        """Every kernel in the library, by name with template arguments -> how often it has been launched."""
        found: dict[str, int] = {}
        name, index = ctypes.create_string_buffer(512), 0
        while (launches := self.dll.ckv_shim_kernel(index, name, ctypes.c_size_t(len(name)))) >= 0:
            text = name.value.decode()
            found[text] = found.get(text, 0) + launches
            index += 1
        return found

    def totals(self) -> dict[str, int]:
        counts = (ctypes.c_longlong * 4)()
        self.dll.ckv_shim_totals(counts)
        return dict(zip(("launches", "blocks", "threads", "accesses"), counts, strict=True))

    @contextmanager
    def counting(self):
        """Gives a dict that holds, at the end, the bytes and the 32-byte sectors that kernels have read and written
        inside (runtime/traffic.h says how often which byte counts)."""
        found: dict[str, int] = {}
        self.dll.ckv_shim_count_traffic(1)
        try:
            yield found
        finally:
            counts = (ctypes.c_longlong * 4)()
            self.dll.ckv_shim_traffic(counts)
            self.dll.ckv_shim_count_traffic(0)
            names = ("read_bytes", "written_bytes", "read_sectors", "written_sectors")
            found.update(zip(names, counts, strict=True))

    def summary(self) -> str:
        """One line: how much has run."""
        kernels, totals = self.kernels(), self.totals()
        ran = [name for name, launches in kernels.items() if launches]
        sources = len({name.split("<")[0] for name in ran})
        return (
            f"shim: {sources} kernels in {len(ran)} of {len(kernels)} instantiations, {len(self.seeds_run)} schedules, "
            f"{totals['launches']} launches, {totals['threads']} threads, {totals['accesses']} accesses checked, "
            f"{self.seconds:.1f} s"
        )


class ShimBackend(CudaBackend):
    """CudaBackend as it is, except that its tensors live on the host and its launches run here."""

    name = "shim"

    def __init__(self):
        TorchBackend.__init__(self, "cpu")
        self._library = Library(build(), "cuda")
        self.shim = Shim(self._library.path)

    def _tail(self):
        return ctypes.c_void_p(None)

    def _call(self, stem, *args):
        self.shim.call(f"ckv_{stem}_cuda", *args, self._tail())

    def _empty(self, shape, dtype):
        """What new memory holds is not to be relied on; it is different for each seed."""
        tensor = torch.empty(shape, dtype=dtype)
        tensor.view(-1).view(torch.uint8).fill_((0xA5, 0xFF, 0x5A, 0x81)[self.shim.seed % 4])
        return tensor


def extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one, gaps of a strided view included."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
