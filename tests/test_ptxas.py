"""The kernel budget: what is read off the assembler, occupancy, what counts as a violation, and the committed table."""

import json
import re

import pytest
from clirun import ROOT
from test_docs import script

from coldkv import ptxas
from coldkv.errors import InputError, ToolError
from coldkv.ptxas import MULTIPROCESSORS, Usage

MESSAGES = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5firstv' for 'sm_90'
ptxas info    : Function properties for _Z5firstv
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 47 registers, used 1 barriers, 24 bytes cumulative stack size, 2048 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 20.425 ms
ptxas info    : Function properties for _Z6calledv
    8 bytes stack frame, 2 bytes spill stores, 1 bytes spill loads
ptxas info    : Compiling entry function '_Z6secondv' for 'sm_90'
ptxas info    : Function properties for _Z6secondv
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""


def measured(**kernels) -> dict:
    return {"nvcc": "1.2.3", "flags": ["-O3"], "kernels": {name: {90: use} for name, use in kernels.items()}}


def test_usage_is_read_with_that_of_called_functions():
    assert ptxas.parse(MESSAGES) == {"_Z5firstv": Usage(47, 2048, 24, 15), "_Z6secondv": Usage(8, 0, 8, 0)}


def test_a_kernel_without_a_usage_line_is_an_error():
    with pytest.raises(ToolError, match="_Z6secondv: expected a line"):
        ptxas.parse(MESSAGES.rsplit("ptxas info    : Used", 1)[0])


@pytest.mark.parametrize(
    "arch,registers,shared,warps",
    # registers and blocks per multiprocessor from the CUDA programming guide's table of compute capabilities
    [(90, 32, 0, 64), (90, 40, 0, 48), (90, 41, 0, 40), (90, 64, 0, 32), (90, 128, 0, 16), (90, 255, 0, 8),
     (80, 32, 48 << 10, 24), (120, 32, 0, 48), (120, 32, 33 << 10, 16), (120, 32, 100 << 10, 0)],
)  # fmt: skip
def test_resident_warps(arch, registers, shared, warps):
    assert MULTIPROCESSORS[arch].resident_warps(registers, shared) == warps


def test_a_measurement_fits_its_own_budget_and_stays_within_it_up_to_the_step():
    budget = json.loads(json.dumps(ptxas.budget_of(measured(a=Usage(41, 8, 0, 0)))))
    assert budget["kernels"] == {"a": {"90": {"registers": 48, "shared": 8}}}
    framed = json.loads(json.dumps(ptxas.budget_of(measured(a=Usage(8, 0, 16, 0)))))
    assert ptxas.violations(measured(a=Usage(8, 0, 16, 0)), framed) == []
    assert ptxas.violations(measured(a=Usage(41, 8, 0, 0)), budget) == []
    assert ptxas.violations(measured(a=Usage(48, 0, 0, 0)), budget) == []


@pytest.mark.parametrize(
    "kernels,expected",
    [
        ({"a": Usage(49, 8, 0, 0)}, "a on sm_90: registers: expected at most 48, found 49"),
        ({"a": Usage(41, 9, 0, 0)}, "a on sm_90: shared: expected at most 8, found 9"),
        ({"a": Usage(41, 8, 0, 12)}, "a on sm_90: spills 12 bytes of registers to memory, expected none"),
        ({"a": Usage(41, 8, 16, 0)}, "a on sm_90: stack: expected at most 0, found 16"),
        ({"a": Usage(41, 8, 0, 0), "b": Usage(8, 0, 0, 0)}, "b on sm_90: not in the budget"),
        ({}, "a on sm_90: in the budget, not in the build"),
    ],
)
def test_every_kind_of_violation_is_one_line(kernels, expected):
    budget = json.loads(json.dumps(ptxas.budget_of(measured(a=Usage(41, 8, 0, 0)))))
    assert ptxas.violations(measured(**kernels), budget) == [expected]


def test_another_schema_is_an_error():
    with pytest.raises(InputError, match="expected coldkv.ptxas/1, found 'x'"):
        ptxas.violations(measured(), {"schema": "x", "kernels": {}})


SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) hungry(float* x) {
  float v[64];
  for (int i = 0; i < 64; ++i) v[i] = x[threadIdx.x + 1024 * i];
  for (int round = 0; round < 3; ++round)
    for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i * 7 + 3) % 64] + x[i];
  for (int i = 0; i < 64; ++i) x[threadIdx.x + 1024 * i] = v[i];
}
extern "C" __global__ void modest(float* x) { x[threadIdx.x] = 1.0f; }
"""


def test_a_kernel_that_spills_is_caught(tmp_path):
    try:
        ptxas.cuda_home()
    except ToolError as error:
        pytest.skip(str(error))
    source = tmp_path / "planted.cu"
    source.write_text(SPILLING)
    found = ptxas.measure((90,), sources=[source])
    assert found["kernels"]["planted.cu: modest"][90].spills == 0
    lines = ptxas.violations(found, ptxas.budget_of(found))
    assert len(lines) == 1 and re.match(r"planted.cu: hungry on sm_90: spills \d+ bytes", lines[0])


def test_the_committed_table_is_that_of_the_committed_budget():
    made = script("ptxas_table")
    budget = json.loads(made.BUDGET.read_text())
    assert made.TABLE.read_text() == made.table(budget), "run scripts/ptxas_table"
    assert made.BUDGET.read_text() == made.dumps(budget)
    assert {arch for use in budget["kernels"].values() for arch in use} == {str(a) for a in ptxas.ARCHITECTURES}


def test_the_budget_names_every_kernel_of_the_sources():
    """What nvcc would find missing or new, for machines that have no nvcc."""
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "kernels").glob("*.[ch]*")))
    in_sources = set(re.findall(r"^CKV_KERNEL (?:__launch_bounds__\([^)]*\) )?(\w+)\(", sources, re.M))
    names = json.loads((ROOT / "kernels" / "ptxas.json").read_text())["kernels"]
    in_budget = {re.sub(r"<.*", "", name.partition(": ")[2]).rpartition("::")[2] for name in names}
    assert in_sources and in_budget == in_sources
