"""`scripts/gpu_check` without a GPU: what it says then, and its steps, with the cpu backend in place of the device."""

import json
import os
import subprocess
import sys
import time

import golden_table
import pytest
import torch
from clirun import ROOT, coldkv
from test_docs import script

from coldkv import backends, native
from coldkv.backends import CpuBackend
from coldkv.errors import InputError, ToolError
from coldkv.gpucheck import agreement, document, replay, sanitizer
from coldkv.gpucheck.clock import Deadline
from coldkv.gpucheck.run import Check
from coldkv.report import gpu

FOREVER = 1e9


@pytest.fixture(scope="module")
def cpu():
    try:
        return CpuBackend(threads=2)
    except ToolError as error:
        pytest.skip(str(error))


class FlipsOneBit(CpuBackend):
    """Writes one wrong bit into the slots of one format; only as the engine under test, which has one thread."""

    def encode(self, codec, plane, geometry, *, out=None):
        slots, valid = super().encode(codec, plane, geometry, out=out)
        if self.threads == 1 and plane.format == "fp8" and valid.all():
            slots[-1, 17] ^= 1
        return slots, valid


class BreaksOff(CpuBackend):
    def dequantize(self, plane, *, out=None):
        if self.threads == 1:
            raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")
        return super().dequantize(plane, out=out)


def run_script(*args, **env):
    command = [sys.executable, ROOT / "scripts" / "gpu_check", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, cwd="/")


def test_without_a_gpu_it_says_so_in_one_line_and_exits_2():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run_script()
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("no GPU check: torch ") and done.stderr.count("\n") == 1


def test_without_torch_it_says_so_in_one_line_and_exits_2(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('not here')\n")
    done = run_script(PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == "no GPU check: this Python has no torch (not here)\n"


def test_a_rehearsal_replays_all_goldens_and_leaves_a_file_that_report_reads(cpu, tmp_path, capsys):
    path = tmp_path / "gpu" / "check.json"
    assert script("gpu_check").main(["--rehearse", "--output", str(path)]) == 0
    doc = json.loads(path.read_text())
    assert doc["schema"] == gpu.SCHEMA and doc["ok"] and doc["finished"] and doc["skipped"] == []
    rows = sum(len(golden_table.read(codec, fmt)) for codec, fmt in golden_table.PAIRS)
    assert doc["golden"] == {"rows": rows, "of": rows, "mismatches": []} and rows > 300
    assert doc["agreement"]["cases"] > 500 and doc["agreement"]["mismatches"] == []
    assert {row["op"] for row in doc["rows"]} >= {"encode", "decode", "restore", "quantize", "load"}
    captured = capsys.readouterr()
    assert captured.out.count("of copy") == len(doc["rows"]) and "0 failures; written" in captured.err
    shown = coldkv("report", path)
    assert shown.code == 0 and f"{rows} of {rows} rows, 0 mismatches" in shown.out
    assert coldkv("report", path, "--baseline", path).code == 0


def test_a_rehearsal_needs_a_place_of_its_own():
    done = run_script("--rehearse")
    assert done.returncode == 2 and "--rehearse needs --output" in done.stderr


def test_a_wrong_bit_fails_goldens_and_agreement_and_exits_1(cpu, tmp_path, monkeypatch, capsys):
    path = tmp_path / "check.json"
    monkeypatch.setattr(backends, "CpuBackend", FlipsOneBit)
    assert script("gpu_check").main(["--rehearse", "--output", str(path)]) == 1
    doc = json.loads(path.read_text())
    assert not doc["ok"] and doc["finished"]
    assert {wrong["format"] for wrong in doc["golden"]["mismatches"]} == {"fp8"}
    refused = [wrong for wrong in doc["golden"]["mismatches"] if "refused" in wrong]
    assert {wrong["codec"] for wrong in refused} == {"ecq", "rans-e2m1"}
    assert any("frequencies" in wrong["refused"] for wrong in refused)
    differing = [wrong["fields"] for wrong in doc["golden"]["mismatches"] if wrong not in refused]
    assert differing and all("slots" in fields and "input" not in fields for fields in differing)
    assert doc["agreement"]["mismatches"] and all("fp8" in wrong["case"] for wrong in doc["agreement"]["mismatches"])
    assert "FAILED golden e2m1-g16 fp8" in capsys.readouterr().err
    assert "warning: this check did not pass" in coldkv("report", path).out


def test_a_step_that_breaks_off_is_a_failure_and_the_next_ones_still_run(cpu, tmp_path):
    path = tmp_path / "check.json"
    doc = Check(BreaksOff(threads=1), cpu, golden_table, path, FOREVER, on_gpu=False).run()
    assert doc == json.loads(path.read_text())
    assert doc["errors"].keys() == {"agreement", "timing"} and doc["golden"]["rows"] > 300
    assert document.failures(doc)[0] == "agreement: RuntimeError: CUDA error: an illegal memory access was encountered"


def test_out_of_time_is_written_and_not_passed_off_as_checked(cpu, tmp_path):
    path = tmp_path / "check.json"
    doc = Check(CpuBackend(1), cpu, golden_table, path, 0.0, on_gpu=False).run()
    assert doc == json.loads(path.read_text()) and not doc["ok"]
    assert [line.split(":")[0] for line in doc["skipped"]] == ["golden", "agreement", "timing"]
    assert document.failures(doc) == ["golden: expected all rows to be replayed, found 0 of unknown"]


def test_a_replay_stops_at_the_deadline_and_says_how_far_it_came(cpu):
    found = replay.replay(cpu, golden_table, Deadline(0.2))
    assert 0 < found["rows"] < found["of"] and found["mismatches"] == []


def test_vector_and_plain_loops_agree_on_random_planes(cpu):
    plain = CpuBackend(threads=1)
    plain._library = native.build_host(("-DCKV_NO_SIMD",))
    found = agreement.compare(cpu, plain, Deadline(FOREVER), agreement.SMALL_SHAPES)
    assert found["mismatches"] == [] and found["cases"] > 500


CLEAN_MEMCHECK = "========= COMPUTE-SANITIZER\n{}\n========= ERROR SUMMARY: 0 errors\n"
CLEAN_RACES = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
OUT_OF_BOUNDS = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at kernel(float *)+0x70
========= ERROR SUMMARY: 1 error
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at kernel()+0x80
========= RACECHECK SUMMARY: 12 hazards displayed (12 errors, 0 warnings)
"""


@pytest.mark.parametrize(
    "code,output,outcome,detail",
    [
        (0, CLEAN_MEMCHECK, "clean", "ERROR SUMMARY: 0 errors"),
        (0, CLEAN_RACES, "clean", "RACECHECK SUMMARY: 0 hazards"),
        (99, OUT_OF_BOUNDS, "found", "Invalid __global__ write of size 4 bytes"),
        (99, RACE, "found", "Error: Race reported between Write access at kernel()+0x80"),
        (0, OUT_OF_BOUNDS, "found", "Invalid __global__ write of size 4 bytes"),
        (0, "all well\n", "unusable", "all well"),
        (1, CLEAN_MEMCHECK, "unusable", "ERROR SUMMARY: 0 errors"),
        (99, "========= Error: Device not supported\n", "unusable", "Error: Device not supported"),
        (137, "", "unusable", "exit 137, no output"),
    ],
)  # fmt: skip
def test_what_the_sanitizer_says(code, output, outcome, detail):
    assert sanitizer.verdict(code, output) == {"outcome": outcome, "detail": detail}


def test_the_sanitizer_is_asked_for_both_tools_and_a_finding_fails_the_check(tmp_path):
    """With a stand-in for the program, which no machine without a GPU can run."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f'#!/bin/sh\nif [ $2 = memcheck ]; then cat <<\'END\'\n{OUT_OF_BOUNDS}END\nexit $4; fi\nexec "$5" "$6" "$7"\n'
    )
    program.chmod(0o755)
    code = f"print('''{CLEAN_RACES}'''); import coldkv.gpucheck"  # found wherever the check is started
    command = (sys.executable, "-c", code)
    found = sanitizer.run(str(program), Deadline(60), command=command)
    assert {tool: result["outcome"] for tool, result in found.items()} == {"memcheck": "found", "racecheck": "clean"}
    doc = document.empty({}) | {"sanitizer": found, "golden": {"rows": 1, "of": 1, "mismatches": []}}
    assert document.failures(doc) == ["compute-sanitizer memcheck: Invalid __global__ write of size 4 bytes"]
    assert sanitizer.run(None, Deadline(60))["memcheck"]["outcome"] == "absent"
    assert sanitizer.run(str(program), Deadline(5))["racecheck"] == {"outcome": "no time", "detail": "5 s left"}


def test_a_second_file_of_the_day_does_not_replace_the_first(tmp_path):
    day = time.gmtime(0)
    first = document.default_path(tmp_path, "NVIDIA H200", day)
    assert first.name == "nvidia-h200-1970-01-01.json"
    document.write(first, document.empty({}))
    assert document.default_path(tmp_path, "NVIDIA H200", day).name == "nvidia-h200-1970-01-01-2.json"


@pytest.mark.parametrize(
    "change,message",
    [
        ({"golden": None}, "golden: expected a dict, found None"),
        ({"golden": {"rows": 1}}, "golden: expected rows and of as numbers and a list of mismatches"),
        ({"sanitizer": {"memcheck": 1}}, "sanitizer: expected an object for each tool"),
        ({"rows": [{"op": 1}]}, "row 0: expected an object with the texts 'op' and 'codec'"),
    ],
)
def test_a_damaged_file_is_an_error_of_one_line(change, message):
    doc = document.empty({}) | change
    with pytest.raises(InputError) as error:
        gpu.validate(doc, "x.json")
    assert str(error.value) == f"x.json: {message}"
