"""Files appear whole or not at all: exceptions, Ctrl-C, kill -9, a full disk."""

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from clirun import heed_interrupts

from coldkv.atomic import atomic_path
from coldkv.errors import InputError

ROOT = Path(__file__).resolve().parent.parent


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_success_replaces_and_keeps_the_mode(tmp_path):
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")
    target.chmod(0o640)
    with atomic_path(target) as temporary:
        assert temporary.parent == tmp_path
        temporary.write_bytes(b"new")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert names(tmp_path) == ["a.bin"]


def test_a_new_file_obeys_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_path(tmp_path / "a.bin") as temporary:
            temporary.write_bytes(b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("old", [None, b"old"])
def test_any_exception_leaves_the_old_file_and_no_other(tmp_path, error, old):
    target = tmp_path / "a.bin"
    if old is not None:
        target.write_bytes(old)
    with pytest.raises(error):
        with atomic_path(target) as temporary:
            temporary.write_bytes(b"half")
            raise error()
    assert names(tmp_path) == ([] if old is None else ["a.bin"])
    assert old is None or target.read_bytes() == old


def test_a_link_is_followed(tmp_path):
    real, link = tmp_path / "real.bin", tmp_path / "link.bin"
    real.write_bytes(b"old")
    link.symlink_to(real)
    with atomic_path(link) as temporary:
        temporary.write_bytes(b"new")
    assert link.is_symlink() and real.read_bytes() == b"new"


def test_bad_targets(tmp_path):
    with pytest.raises(InputError, match="does not exist"), atomic_path(tmp_path / "none" / "a"):
        pass
    with pytest.raises(InputError, match="found a folder"), atomic_path(tmp_path):
        pass
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"), atomic_path(tmp_path / "pipe"):
        pass
    assert names(tmp_path) == ["pipe"]


CHILD = """
import sys, time
from coldkv.atomic import atomic_path
with atomic_path(sys.argv[1]) as temporary:
    with open(temporary, "wb") as file:
        file.write(b"x" * 100_000)
        file.flush()
        print("half", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("old", [None, b"old"])
def test_a_killed_writer_leaves_the_old_file_or_none(tmp_path, sign, old):
    target = tmp_path / "a.bin"
    if old is not None:
        target.write_bytes(old)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(target)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        preexec_fn=heed_interrupts,
    )
    assert child.stdout.readline() == b"half\n"
    child.send_signal(sign)
    assert child.wait(timeout=30) != 0
    child.stdout.close()
    if old is None:
        assert not target.exists()
    else:
        assert target.read_bytes() == old
    left = [name for name in names(tmp_path) if name != "a.bin"]
    if sign == signal.SIGINT:
        assert left == []
    else:  # nobody can clean up after kill -9, but what stays is hidden and not under the target's name
        assert len(left) == 1 and left[0].startswith(".a.bin.") and left[0].endswith(".tmp")


FULL = """
import sys, resource, signal, os
from coldkv.atomic import atomic_path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
from coldkv.safetensors_stream import StreamWriter
try:
    with atomic_path(sys.argv[1]) as temporary:
        with StreamWriter(temporary, [("a", "U8", (1 << 20,))], {}) as writer:
            writer.write("a", bytes(1 << 20))
except OSError as error:
    print(error.errno, error.filename)
"""


def test_a_file_size_limit_mid_write_leaves_nothing(tmp_path):
    target = tmp_path / "a.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(target)], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout == f"{errno.EFBIG} {target}\n", done.stderr
    assert names(tmp_path) == []


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """On a tiny tmpfs of its own; needs root."""
    mount = tmp_path / "disk"
    mount.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(mount)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root; the file size limit is tested above")
    try:
        target = mount / "a.bin"
        target.write_bytes(b"old")
        with pytest.raises(OSError) as caught, atomic_path(target) as temporary, open(temporary, "wb", 0) as file:
            for _ in range(64):
                file.write(bytes(65536))
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(target)
        assert names(mount) == ["a.bin"] and target.read_bytes() == b"old"
    finally:
        subprocess.run(["umount", str(mount)], check=True)
