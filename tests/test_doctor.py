"""`coldkv doctor`: every part has a state and a meaning, and only what all commands need makes it fail."""

import json
import sys

import pytest
from clirun import in_process

from coldkv import diagnosis
from coldkv.diagnosis import BROKEN, MISSING, OK, Check


def test_this_machine_is_described(capsys):
    done = in_process(capsys, "doctor", "--json")
    found = json.loads(done.out)
    checks = {check["name"]: check for check in found["checks"]}
    assert done.code == 0 and found["ok"] is True
    assert {"python", "torch", "gpu", "cuda toolkit", "cache folder", "codecs", "sample dump", "ninja"} <= set(checks)
    assert checks["torch"]["state"] == OK and checks["torch"]["required"] is True
    assert all(check["found"] and check["means"] for check in checks.values())
    assert not [name for name, check in checks.items() if check["means"] == "the check itself failed"]


def test_text_has_one_line_per_check(capsys, monkeypatch):
    checks = [Check("a", OK, "1.0", "fine"), Check("longer", MISSING, "none", "not needed")]
    monkeypatch.setattr(diagnosis, "CHECKS", [lambda: checks])
    done = in_process(capsys, "doctor")
    assert done.code == 0
    assert done.out == "ok       a       1.0; fine\nmissing  longer  none; not needed\n"


def test_a_required_part_that_is_missing_fails(capsys, monkeypatch):
    monkeypatch.setattr(
        diagnosis, "CHECKS", [lambda: [Check("torch", MISSING, "none", "install torch", required=True)]]
    )
    done = in_process(capsys, "doctor")
    assert done.code == 2 and done.err == "coldkv: torch is missing: none; install torch\n"
    assert done.out.startswith("missing  torch")


def test_a_check_that_fails_is_reported_not_raised(monkeypatch):
    def _strange_part():
        raise RuntimeError("odd")

    monkeypatch.setattr(diagnosis, "CHECKS", [_strange_part])
    (check,) = diagnosis.diagnose()
    assert (check.name, check.state, check.found) == ("strange part", BROKEN, "RuntimeError: odd")


def test_packages_that_are_absent_or_broken(monkeypatch, tmp_path):
    (tmp_path / "coldkv_test_broken.py").write_text("raise ImportError('undefined symbol: x')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert diagnosis._import("coldkv_test_absent") == (MISSING, "not installed")
    assert diagnosis._import("coldkv_test_broken") == (BROKEN, "ImportError: undefined symbol: x")


def test_without_a_compiler_torch_is_named_as_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("COLDKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    diagnosis_of = {check.name: check for check in diagnosis._cpu_backend()}
    assert diagnosis_of["c++ compiler"].state == MISSING
    assert "torch is used instead" in diagnosis_of["c++ compiler"].means
    assert diagnosis_of["cache folder"].state == OK and (tmp_path / "cache").is_dir()


@pytest.mark.parametrize("name", ["COLDKV_CACHE_DIR"])
def test_a_cache_folder_that_cannot_be_made(monkeypatch, tmp_path, name):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(name, str(tmp_path / "file" / "cache"))
    checks = {check.name: check for check in diagnosis._cpu_backend()}
    assert checks["cache folder"].state == BROKEN and "COLDKV_CACHE_DIR" in checks["cache folder"].means
