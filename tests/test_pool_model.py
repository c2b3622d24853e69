"""The live pool against a plain model: random operations, with and without real bytes; wrong pools that it finds."""

import shutil
import subprocess
import sys

import pytest
from clirun import ROOT, environment
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from poolmodel import SIZES, Driver, soak


class PoolMachine(RuleBasedStateMachine):
    """Drawn operations on a drawn pool; hypothesis shrinks what fails."""

    @initialize(kind=st.integers(0, len(SIZES) - 1))
    def make(self, kind):
        self.driver = Driver(*SIZES[kind])

    @rule(data=st.data())
    def step(self, data):
        self.driver.step(lambda low, high: data.draw(st.integers(low, high)))


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPoolMachine = PoolMachine.TestCase


def test_twenty_thousand_random_operations():
    done = soak(20_000, seed=1)
    for name in ("append", "retire", "fork", "share", "truncate", "restore", "rewrite", "release", "backup"):
        assert done[name] > 50, f"{name}: too rare to say anything: {done}"
    for name in ("append full", "restore full", "retire failed", "append failed", "restore failed"):
        assert done[name] > 0, f"{name} never happened: {done}"


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_random_operations_on_real_bytes(name):
    import random

    from poolbytes import RegionBytes

    from coldkv.backends import get_backend

    backend, generator = get_backend(name, threads=1), random.Random(3)
    for size, policy in (SIZES[0], SIZES[1]):
        driver = Driver(size, policy, RegionBytes(size, backend), check_every=3)
        while driver.operations < 250:
            driver.step(lambda low, high: generator.randint(low, high))
        driver.check()
        assert driver.done["retire"] > 20 and driver.done["restore"] > 3


# file, what it says, what a wrong pool says instead
MUTATIONS = {
    "a shared page goes cold while it is recent elsewhere": (
        "boundary.py", "recent[shared[held]] |= at[shared[held]] >= pool.cold_limit(other)", "pass"
    ),
    "release keeps the cold frontier": (
        "kvpool.py",
        "self.tokens[row] = self.start[row] = self.frontier[row] = 0",
        "self.tokens[row] = self.start[row] = 0",
    ),
    "other rows keep the physical page of a page that went cold": (
        "kvpool.py", "        shared = self.store.refs[ids] > 1\n        if not shared.any():", "        if True:"
    ),
    "restore forgets to free the slot": (
        "warm.py", "    pool.free_slots(slots)\n", "    pass\n"
    ),
    "the slot is preferred to an exact replica": (
        "warm.py", "exact = ~hot & (store.replica[ids] != NO_REPLICA)", "exact = ~hot & (store.entry[ids] == UNMAPPED)"
    ),
    "a page that the codec refused goes cold": (
        "boundary.py", "    if not valid.all():", "    if not valid.any():"
    ),
    "a partial page that another row holds is written on": (
        "kvpool.py", "splits = last != NO_PAGE and int(self.store.refs[last]) > 1", "splits = False"
    ),
    "the window keeps one page too few": (
        "policy.py", "(tokens - self.keep_tokens) // page_tokens", "-(-(tokens - self.keep_tokens) // page_tokens)"
    ),
}  # fmt: skip
RUN = "import sys; sys.path.append(sys.argv[1]); from poolmodel import soak; soak(6000, seed=2, check_every=2)"


def soaked(source):
    command = [sys.executable, "-c", RUN, str(ROOT / "tests")]
    env = environment() | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=env, cwd=source, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def pool_copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "coldkv", folder / "coldkv", ignore=shutil.ignore_patterns("__pycache__", "data"))
    return folder


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_wrong_line_is_caught(name, pool_copy):
    """The edit is applied to a copy of the source; the model-based run on it must fail by an assertion or a refusal."""
    file, right, wrong = MUTATIONS[name]
    path = pool_copy / "coldkv" / "pool" / file
    text = path.read_text()
    assert text.count(right) == 1, "the mutation does not fit the source any more"
    try:
        path.write_text(text.replace(right, wrong))
        done = soaked(pool_copy)
    finally:
        path.write_text(text)
    assert done.returncode == 1, "the wrong pool was not noticed"
    assert "AssertionError" in done.stderr or "PoolError" in done.stderr or "IndexError" in done.stderr, done.stderr


def test_the_copy_without_a_wrong_line_passes(pool_copy):
    done = soaked(pool_copy)
    assert done.returncode == 0, done.stderr
