"""Building and finding the kernel libraries: cache, locks, errors, and the CUDA build without a GPU."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coldkv import native, native_cuda
from coldkv.backends import get_backend
from coldkv.codecs import all_codecs
from coldkv.errors import ToolError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def library():
    try:
        return native.host_library()
    except ToolError as error:
        pytest.skip(str(error))


def fake_compiler(folder: Path, body: str) -> Path:
    path = folder / "fake-cxx"
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1; exit 0; fi\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_two_processes_build_once(library, tmp_path):
    body = f'for last; do :; done; echo x >> {tmp_path}/log; sleep 0.2; cp {library.path} "$last"'
    env = {**os.environ, "CXX": str(fake_compiler(tmp_path, body)), "COLDKV_CACHE_DIR": str(tmp_path / "cache")}
    code = "from coldkv import native; print(native.host_library().path)"
    runs = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = [run.communicate()[0].strip() for run in runs]
    assert all(run.returncode == 0 for run in runs) and paths[0] == paths[1]
    sources = len(list(native.kernels_dir().glob("*.cu")))
    assert (tmp_path / "log").read_text().count("x") == sources + 1
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".lock", ".sha256", ".so"]


def test_a_failing_compiler_is_one_clear_line(monkeypatch, tmp_path):
    body = "echo note: on the way >&2; echo 'slot.h:3: error: no such thing' >&2; exit 1"
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, body)))
    monkeypatch.setenv("COLDKV_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ToolError, match="failed: slot.h:3: error: no such thing"):
        native.build_host()
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(ToolError, match="CXX names '/no/such/compiler'"):
        native.host_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match="found none"):
        native.host_compiler()


def test_auto_without_a_compiler_is_torch_with_one_line(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    native.host_library.cache_clear()
    try:
        assert get_backend("auto").name == "torch"
    finally:
        native.host_library.cache_clear()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "using the slower torch backend" in lines[0]


def test_the_key_follows_the_sources(monkeypatch, tmp_path):
    before = native._key("compiler")
    copy = tmp_path / "kernels"
    shutil.copytree(native.kernels_dir(), copy)
    monkeypatch.setattr(native, "kernels_dir", lambda: copy)
    assert native._key("compiler") == before
    assert native._key("other compiler") != before
    (copy / "slot.h").write_text((copy / "slot.h").read_text() + "\n// changed\n")
    assert native._key("compiler") != before


def test_kernels_include_no_framework_header():
    for path in native.kernels_dir().iterdir():
        if path.suffix in (".cu", ".cuh", ".h"):
            for line in path.read_text().splitlines():
                if line.startswith("#include"):
                    assert "torch" not in line and "ATen" not in line and "Python.h" not in line


def test_cuda_sources_build_and_import_without_a_gpu():
    if torch.version.cuda is None:
        pytest.skip("torch without CUDA cannot build CUDA extensions")
    try:
        home = native_cuda.cuda_home()
    except ToolError as error:
        pytest.skip(str(error))
    library = native_cuda.cuda_library()
    for codec in all_codecs():
        for what in ("encode", "decode", "restore"):
            assert codec.native is None or library.has(f"{codec.native}_{what}")
        assert codec.native is None or library.has(f"{codec.native}_lengths") == codec.sized
    for stem in ("quantize", "dequantize", "load", "stats"):
        assert library.has(stem)
    assert library.slot_bytes("e2m1_g16", 2, 64, 256) == 9232
    ninja = (library.path.parent / "build.ninja").read_text()
    for flag in native_cuda.architecture_flags([str(home / "bin" / "nvcc")]):
        assert flag in ninja
