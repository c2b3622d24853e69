"""Damaged slots against memory that may not be touched, decoded in a process of their own: a read outside ends it."""

import subprocess
import sys

from clirun import ROOT

SETUP = """
import ctypes, mmap, sys
import torch
from coldkv.backends import CpuBackend, TorchBackend, fitted
from coldkv.codecs import get_codec
from coldkv.geometry import Geometry
from coldkv.native import KernelError, PlaneDesc
from coldkv.tiers import quantize

torch.set_num_threads(1)
codec_id, (head_dim, tokens, tries) = sys.argv[1], map(int, sys.argv[2:])
geometry, generator = Geometry(head_dim, tokens), torch.Generator().manual_seed(head_dim)
plane = quantize("int8", torch.randn(1, tokens, head_dim, generator=generator))
cpu, oracle = CpuBackend(threads=1), TorchBackend()
codec = fitted(get_codec(codec_id), plane, geometry, cpu)
slot, valid = cpu.encode(codec, plane, geometry)
assert valid.all()
stride, page = slot.shape[1], mmap.PAGESIZE
inside = -(-stride // page) * page
area = mmap.mmap(-1, inside + 2 * page)
base = ctypes.addressof(ctypes.c_char.from_buffer(area))
libc = ctypes.CDLL(None, use_errno=True)
for guard in (base, base + page + inside):  # no byte before or after the slot's pages may be touched
    assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
desc = PlaneDesc(2, tokens, head_dim, 0, 1)
out = torch.empty(1, tokens, head_dim)

def random_bytes(bad, attempt, first, first_beyond):
    # a few bytes anew: every second time in the header, from byte `first`, else from `first_beyond` on
    header = attempt % 2
    for _ in range(1 + attempt % 3):
        at = int(torch.randint(first if header else first_beyond, first_beyond if header else stride, (1,),
                               generator=generator))
        bad[0, at] = int(torch.randint(0, 256, (1,), generator=generator))
"""

LOOP = """
refused = agreed = 0
for attempt in range(tries):
    bad = slot.clone()
    damage(bad, attempt)
    at_end = base + page + (inside - stride) // 16 * 16 if attempt % 4 < 2 else base + page
    ctypes.memmove(at_end, bad.data_ptr(), stride)
    out.zero_()
    try:
        params = codec.native_params(geometry, "int8", "cpu")
        cpu._library.call(f"{codec.native}_decode", ctypes.byref(desc), ctypes.c_void_p(at_end),
                          ctypes.c_int64(stride), ctypes.c_void_p(out.data_ptr()), *params, ctypes.c_int(1))
        accepted(out)
    except KernelError:
        assert out.isnan().all()
        refused += 1
    # the oracle is slow; beyond the kernels it refuses bytes that decoding does not need
    if attempt % ORACLE_EVERY == 0:
        try:
            expected = oracle.decode(codec, bad, geometry, "int8")
            assert torch.equal(expected.view(torch.int32), out.view(torch.int32))
            agreed += 1
        except Exception as error:
            text = str(error)
            assert out.isnan().any() or any(word in text for word in UNREAD), text
print(refused, agreed)
"""


def refusals(codec_id: str, rules: str, head_dim: int, page_tokens: int, tries: int) -> int:
    """How many of `tries` damaged slots the host kernels refused. `rules`: Python that defines `damage(bad, attempt)`,
    `accepted(out)`, ORACLE_EVERY and UNREAD, words of the oracle's complaints about bytes that kernels do not read."""
    sizes = map(str, (head_dim, page_tokens, tries))
    command = [sys.executable, "-c", SETUP + rules + LOOP, codec_id, *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refused, _ = map(int, done.stdout.split())
    return refused
