"""What the device assembler says of every kernel, what that means for occupancy, and the reviewed budget.

Usage is read off `ptxas -v` for the build's own flags: registers, shared memory, stack, spills. Register counts move
with the compiler's version, so a budget holds ceilings: registers rounded up to the hardware's allocation step of 8,
within which occupancy cannot change. Shared memory and stack frames are held to what was reviewed; spills have no
budget. No GPU is needed. Torch-free.
"""

import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from coldkv.errors import InputError, ToolError
from coldkv.native import _first_error, kernels_dir
from coldkv.native_cuda import ARCHITECTURES, CODE_FLAGS, cuda_home

SCHEMA = "coldkv.ptxas/1"
BLOCK = 256  # threads per block of the kernels, kBlock in kernels/port.cuh
REGISTER_STEP = 8


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor. Shared memory in bytes; each block pays 1 KiB of it to the system."""

    warps: int
    blocks: int
    shared: int
    registers: int = 65536

    def resident_warps(self, registers: int, shared: int, block: int = BLOCK) -> int:
        """Warps that fit at once, in whole blocks. Registers are given out per warp, each quarter having its own."""
        per_block = -(-block // 32)
        step = -(-max(registers, 1) // REGISTER_STEP) * REGISTER_STEP
        by_registers = self.registers // 4 // (32 * step) * 4 // per_block
        by_shared = self.shared // (shared + 1024)
        return min(by_registers, by_shared, self.blocks, self.warps // per_block) * per_block


MULTIPROCESSORS = {
    80: Multiprocessor(warps=64, blocks=32, shared=164 << 10),
    90: Multiprocessor(warps=64, blocks=32, shared=228 << 10),
    120: Multiprocessor(warps=48, blocks=24, shared=100 << 10),
}


@dataclass(frozen=True)
class Usage:
    """One kernel on one architecture; all but `registers` in bytes (shared: static; spills: stores plus loads)."""

    registers: int
    shared: int
    stack: int
    spills: int

    def ceiling(self) -> "Usage":
        """What the budget allows a kernel that needs this much."""
        step = -(-self.registers // REGISTER_STEP) * REGISTER_STEP
        return Usage(step, self.shared, self.stack, 0)


ENTRY = re.compile(r"Compiling entry function '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
STACK = re.compile(r"(\d+) bytes cumulative stack size")


def parse(text: str) -> dict[str, Usage]:
    """Mangled kernel name -> usage, from the messages of one `ptxas -v` run.

    Functions that a kernel calls have their own lines after it: their frames are in the kernel's cumulative stack size,
    their spills count as the kernel's. Raises ToolError when an announced kernel has no usage line.
    """
    found: dict[str, Usage] = {}
    name, frame, spills = None, 0, 0
    for line in text.splitlines():
        if entry := ENTRY.search(line):
            name, frame, spills = entry[1], 0, 0
        elif sizes := FRAME.search(line):
            spilt = int(sizes[2]) + int(sizes[3])
            if name in found:
                found[name] = replace(found[name], spills=found[name].spills + spilt)
            else:
                frame, spills = int(sizes[1]), spilt
        elif (used := USED.search(line)) and name:
            shared, stack = SHARED.search(line), STACK.search(line)
            sizes = (int(shared[1]) if shared else 0, int(stack[1]) if stack else frame)
            found[name] = Usage(int(used[1]), *sizes, spills)
    missing = set(ENTRY.findall(text)) - found.keys()
    if missing:
        raise ToolError(f"ptxas -v: kernel {sorted(missing)[0]}: expected a line 'Used N registers', found none")
    return found


def measure(architectures=ARCHITECTURES, *, sources: list[Path] | None = None, jobs: int = 2) -> dict:
    """{"nvcc", "flags", "kernels": {"file: kernel": {architecture: Usage}}} of the kernel sources (or `sources`).

    Raises ToolError without nvcc, or where a source does not compile.
    """
    nvcc = str(cuda_home() / "bin" / "nvcc")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"V(\d+(?:\.\d+)+)", version)
    sources = sorted(kernels_dir().glob("*.cu")) if sources is None else sources
    kernels: dict[str, dict[int, Usage]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        work = [(source, arch) for source in sources for arch in architectures]
        for (source, arch), usage in zip(work, pool.map(lambda w: _compile(nvcc, *w, folder), work), strict=True):
            names = _demangle(list(usage))
            for mangled, one in usage.items():
                kernels.setdefault(f"{source.name}: {names[mangled]}", {})[arch] = one
    return {
        "nvcc": release[1] if release else version.strip().splitlines()[-1],
        "flags": list(CODE_FLAGS),
        "kernels": kernels,
    }


def _compile(nvcc: str, source: Path, arch: int, folder: str) -> dict[str, Usage]:
    target = Path(folder) / f"{source.stem}-{arch}.cubin"
    command = [nvcc, *CODE_FLAGS, "-cubin", "-Xptxas", "-v", f"-arch=sm_{arch}", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ToolError(f"{source}: does not compile for sm_{arch}: {_first_error(done.stderr + done.stdout)}")
    return parse(done.stderr + done.stdout)


def _demangle(names: list[str]) -> dict[str, str]:
    """Readable names without return type, parameters and our namespace; the mangled ones where c++filt is missing."""
    try:
        done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {name: name for name in names}
    return {name: _short(text) for name, text in zip(names, done.stdout.splitlines(), strict=True)}


def _short(signature: str) -> str:
    text = re.sub(r"^(?:static )?void ", "", signature).replace("ckv::", "").replace("(anonymous namespace)::", "")
    depth = 0
    for at, char in enumerate(text):
        depth += (char == "<") - (char == ">")
        if char == "(" and depth == 0:
            return text[:at]
    return text


def budget_of(measured: dict) -> dict:
    """The budget document (schema `coldkv.ptxas/1`) that just holds what was measured."""
    kernels = {
        name: {str(arch): _without_zeros(usage.ceiling()) for arch, usage in per_arch.items()}
        for name, per_arch in sorted(measured["kernels"].items())
    }
    return {"schema": SCHEMA, "nvcc": measured["nvcc"], "flags": measured["flags"], "kernels": kernels}


def _without_zeros(usage: Usage) -> dict:
    return {key: value for key, value in asdict(usage).items() if value}


def violations(measured: dict, budget: dict) -> list[str]:
    """One line for every spill, kernel over its budget, and kernel on one side only."""
    if budget.get("schema") != SCHEMA or not isinstance(budget.get("kernels"), dict):
        raise InputError(f"kernel budget: schema: expected {SCHEMA}, found {budget.get('schema')!r}")
    out = []
    for name, per_arch in sorted(measured["kernels"].items()):
        for arch, usage in sorted(per_arch.items()):
            where = f"{name} on sm_{arch}"
            if usage.spills:
                out.append(f"{where}: spills {usage.spills} bytes of registers to memory, expected none")
            allowed = budget["kernels"].get(name, {}).get(str(arch))
            if allowed is None:
                out.append(f"{where}: not in the budget")
                continue
            for what in ("registers", "shared", "stack"):
                found, most = getattr(usage, what), allowed.get(what, 0)
                if found > most:
                    out.append(f"{where}: {what}: expected at most {most}, found {found}")
    for name, per_arch in sorted(budget["kernels"].items()):
        for arch in sorted(per_arch):
            if int(arch) not in measured["kernels"].get(name, {}):
                out.append(f"{name} on sm_{arch}: in the budget, not in the build")
    return out
