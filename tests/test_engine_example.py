"""kernels/ lifted into a C++ program: copied elsewhere, built by the commands of its README, run."""

import re
import shutil
import subprocess

import pytest
from clirun import ROOT

from coldkv import native, native_cuda
from coldkv.errors import ToolError


def commands(tool: str) -> list[str]:
    """The README's command lines that begin with this compiler."""
    return re.findall(rf"^    ({re.escape(tool)} .*)$", (ROOT / "kernels" / "README.md").read_text(), re.M)


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(ROOT / "kernels", tmp_path / "kernels")


def run(command: str, folder):
    return subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)


def test_the_folder_builds_alone_and_the_example_runs(copy):
    try:
        compiler = native.host_compiler()
    except ToolError as error:
        pytest.skip(str(error))
    if "g++" not in compiler[0]:
        pytest.skip(f"the README's commands are for g++, here is {compiler[0]}")
    library, example = commands("g++")
    built = run(library.replace("-O3", "-O1"), copy)  # quicker to build; the same bits
    assert built.returncode == 0, built.stderr
    done = run(example, copy)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"16896 bytes hot, 9232 bytes cold, nmse (0\.\d{4})\n", done.stdout)
    assert found and 0.001 < float(found[1]) < 0.02, done.stdout


def test_the_example_compiles_for_a_gpu(copy):
    try:
        nvcc = native_cuda.cuda_home() / "bin" / "nvcc"
    except ToolError as error:
        pytest.skip(str(error))
    _, example = commands("nvcc")
    flags, source = re.fullmatch(r"nvcc (.*) (example\.cpp) .*", example).groups()
    done = run(f"{nvcc} {flags} -Werror all-warnings -c {source} -o example.o", copy)
    assert done.returncode == 0, done.stderr


def test_the_header_is_plain_c(copy):
    (copy / "only.c").write_text('#include "coldkv.h"\nint main(void) { return ckv_abi_version() != CKV_INT8; }\n')
    if not shutil.which("gcc"):
        pytest.skip("no C compiler")
    done = run("gcc -std=c99 -Wall -Wextra -pedantic -Werror -c only.c", copy)
    assert done.returncode == 0, done.stderr


def test_every_function_of_the_header_is_explained():
    text = (ROOT / "kernels" / "README.md").read_text()
    header = (ROOT / "kernels" / "coldkv.h").read_text()
    stems = re.findall(r"^CKV_DECLARE(?:_SIZED)?_CODEC\((\w+)\)$", header, re.M)
    assert {"e2m1_g64", "e2m1_g16", "native"} <= set(stems)
    names = set(re.findall(r"\b(ckv_\w+)\(", re.sub(r"##stem##", "<stem>", header)))
    names |= set(re.findall(r"(ckv_<stem>_\w+)\(", re.sub(r"##stem##", "<stem>", header)))
    names = {re.sub(r"_(cpu|cuda)$", "_*", name) for name in names}
    missing = {name for name in names | set(stems) if f"`{name}" not in text}
    assert missing == set()
