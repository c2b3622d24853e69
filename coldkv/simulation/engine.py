"""Replays a trace through a live pool: arrivals, admission when pages are free, prefill in chunks, decode, passes.

Only memory is simulated: every sequence prefills and decodes at its given rate, however many there are. Torch-free.
"""

import heapq
import itertools
import resource
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field

from coldkv.geometry import ceil_div
from coldkv.pool.faults import PoolFull
from coldkv.pool.invariants import violations
from coldkv.pool.kvpool import KvPool
from coldkv.simulation.prefixes import PrefixIndex
from coldkv.simulation.traces import Request

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class Rates:
    """Tokens per second of one sequence, and how many prompt tokens come between two passes. `retain`: a finished
    sequence stays until its pages are needed, oldest first, so that later prompts can start from it."""

    prefill: float = 8000.0
    decode: float = 20.0
    chunk_tokens: int = 4096
    retain: bool = False


@dataclass
class Live:
    """A sequence with a row. `left`: tokens that the current phase still has to append."""

    request: Request
    row: int
    phase: str
    left: int
    order: int  # of admission
    stalled: bool = False


@dataclass
class Sample:
    """What there is at one moment. Tokens count for every sequence that has them, bytes once."""

    time_s: float
    waiting: int
    sequences: int
    retained: int
    tokens: int
    hot_pages: int
    cold_pages: int
    device_bytes: int
    host_bytes: int
    retired: int
    restored: int
    delayed: int


@dataclass
class Outcome:
    """Totals of one run; times in seconds of the trace, `wall_s` in seconds of this machine."""

    requests: int = 0
    finished: int = 0
    too_large: int = 0  # refused: larger than the whole pool, or than a row
    delayed: int = 0
    wait_mean_s: float = 0.0
    wait_p99_s: float = 0.0
    wait_max_s: float = 0.0
    makespan_s: float = 0.0
    preempted: int = 0
    stalls: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompts, found in other rows
    peak_sequences: int = 0
    peak_tokens: int = 0
    mean_tokens: float = 0.0  # over time, of running sequences
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    retired: int = 0
    restored: int = 0
    moved_bytes: int = 0  # read and written by retiring and restoring
    host_moved_bytes: int = 0
    stayed_hot: dict[str, int] = field(default_factory=dict)
    passes: int = 0
    page_events: int = 0
    wall_s: float = 0.0
    rss_quarter_bytes: list[int] = field(default_factory=list)  # at each quarter of the requests, then at the end
    verified_pages: int = 0

    @property
    def page_events_per_s(self) -> float:
        return self.page_events / self.wall_s if self.wall_s else 0.0

    def to_json(self) -> dict:
        return asdict(self) | {"page_events_per_s": self.page_events_per_s}


class Engine:
    """One run of one trace over one pool. `content`: notes what pages hold and verifies it (`payload.Contents`)."""

    def __init__(self, pool: KvPool, rates: Rates, page_bytes: int, slot_bytes: int, *, content=None, check=False):
        self.pool, self.rates, self.page_bytes, self.slot_bytes = pool, rates, page_bytes, slot_bytes
        self.content, self.check = content, check
        self.prefixes = PrefixIndex(pool.page_tokens)
        self.waiting: deque[tuple[float, Request]] = deque()
        self.live: dict[int, Live] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.heap: list[tuple[float, int, int]] = []  # (time, order of the event, row)
        self.orders = itertools.count()
        self.outcome = Outcome()
        self.waits = array("d")
        self.tokens = self.stalled = 0
        self.now = self.token_seconds = 0.0
        self.on_sample: Callable[[Sample], None] = lambda sample: None

    def run(
        self, requests: Iterable[Request], *, total: int = 0, sample_s: float = 10.0, on_sample=None, advance=None
    ) -> Outcome:
        """Replay `requests` (`total`, if known, for the memory quarters) and return the totals."""
        self.on_sample = on_sample or self.on_sample
        started, next_sample = time.perf_counter(), 0.0
        arrivals: Iterator[Request] = iter(requests)
        coming = next(arrivals, None)
        quarter = max(1, total // 4)
        while coming is not None or self.heap:
            at = min(coming.arrival if coming else float("inf"), self.heap[0][0] if self.heap else float("inf"))
            while next_sample <= at:
                self._sample(next_sample)
                next_sample += sample_s
            self.token_seconds += self.tokens * (at - self.now)
            self.now = at
            if coming is not None and coming.arrival <= at:
                self.outcome.requests += 1
                if self.outcome.requests % quarter == 0:
                    self.outcome.rss_quarter_bytes.append(_rss())
                if advance:
                    advance(1)
                self.waiting.append((coming.arrival, coming))
                coming = next(arrivals, None)
                self._admit()
            else:
                _, _, row = heapq.heappop(self.heap)
                self._step(self.live[row])
        self._sample(self.now)
        return self._finish(started)

    # -- events

    def _admit(self) -> None:
        pool = self.pool
        while self.waiting:
            arrival, request = self.waiting[0]
            owner, shared = self.prefixes.find(request)
            total = request.input_tokens + request.output_tokens
            if ceil_div(total, pool.page_tokens) > pool.size.row_pages:
                self.outcome.too_large += 1
                self.waiting.popleft()
                continue
            row = self._claim(owner, shared, total)
            if row is None:
                if self.live:
                    return  # somebody's pages will be free later
                self.outcome.too_large += 1
                self.waiting.popleft()
                continue
            self.waiting.popleft()
            wait = self.now - arrival
            self.waits.append(wait)
            self.outcome.delayed += wait > 0
            self.outcome.prompt_tokens += request.input_tokens
            self.outcome.reused_tokens += shared
            live = Live(request, row, PREFILL, request.input_tokens - shared, next(self.orders))
            self.live[row] = live
            self.tokens += shared
            self.outcome.peak_sequences = max(self.outcome.peak_sequences, len(self.live))
            if self.content:
                self.content.started(row, request)
            self._grow(live)

    def _claim(self, owner: int, shared: int, total: int) -> int | None:
        """A row for a request, or None. Retained rows make room, oldest first, but for the one it starts from."""
        while True:
            try:
                if shared:
                    row = self.pool.share(owner, shared, total - shared, self.rates.chunk_tokens)
                    if owner in self.idle:
                        self.idle.move_to_end(owner)
                    return row
                return self.pool.open(total, self.rates.chunk_tokens)
            except PoolFull:
                victim = next((row for row in self.idle if row != owner), None)
                if victim is None and owner in self.idle and not self.live:
                    victim, owner, shared = owner, -1, 0  # the last one: without it there is room, or never
                if victim is None:
                    return None
                self._forget(victim)

    def _step(self, live: Live) -> None:
        """The tokens appended last are there now: a pass, and on."""
        retired = self.pool.retire(live.row)
        if live.left:
            self._grow(live)
        elif live.phase == PREFILL:
            self.prefixes.add(live.row, live.request)
            live.phase, live.left = DECODE, live.request.output_tokens
            if live.left:
                self._grow(live)
            else:
                self._end(live)
        else:
            self._end(live)
            retired = 1
        if retired and self.waiting:
            self._admit()

    def _grow(self, live: Live) -> None:
        """Append what comes before the next pass: a chunk of the prompt, or what decode makes up to the next page."""
        count = min(live.left, self._room(live))
        try:
            pages = self.pool.append(live.row, count)
        except PoolFull:
            self._stall(live)
            return
        self.stalled -= live.stalled
        live.stalled = False
        live.left -= count
        self.tokens += count
        if self.content:
            self.content.mapped(live.row, pages)
        outcome, pool = self.outcome, self.pool
        outcome.peak_tokens = max(outcome.peak_tokens, self.tokens)
        outcome.peak_device_bytes = max(outcome.peak_device_bytes, self._device_bytes())
        outcome.peak_host_bytes = max(outcome.peak_host_bytes, pool.replicas.count * self.page_bytes)
        rate = self.rates.prefill if live.phase == PREFILL else self.rates.decode
        self._at(self.now + count / rate, live)

    def _room(self, live: Live) -> int:
        if live.phase == PREFILL:
            return self.rates.chunk_tokens
        tokens, page_tokens = int(self.pool.tokens[live.row]), self.pool.page_tokens
        room = page_tokens - tokens % page_tokens
        if self.pool.policy.name != "none":  # stop also where a page gets old
            room = min(room, page_tokens - (tokens - self.pool.policy.keep_tokens) % page_tokens)
        return room

    def _stall(self, live: Live) -> None:
        """No page although some were promised (they stayed hot): wait, and if all wait, the last one admitted goes."""
        self.outcome.stalls += 1
        self.stalled += not live.stalled
        live.stalled = True
        if self.idle:
            self._forget(next(iter(self.idle)))
        elif self.stalled == len(self.live) > 1:
            last = max(self.live.values(), key=lambda other: other.order)
            self.outcome.preempted += 1
            self.waiting.appendleft((self.now, last.request))
            self._leave(last)
            self.heap = [entry for entry in self.heap if entry[2] != last.row]
            heapq.heapify(self.heap)
            self.pool.release(last.row)
            if last is live:
                return
        elif len(self.live) == 1 and not self.idle:
            self.outcome.too_large += 1
            self._leave(live)
            self.pool.release(live.row)
            return
        self._at(self.now + 1 / self.rates.decode, live)

    def _at(self, when: float, live: Live) -> None:
        heapq.heappush(self.heap, (when, next(self.orders), live.row))

    def _end(self, live: Live) -> None:
        self.outcome.finished += 1
        if self.content:
            self.outcome.verified_pages += self.content.verify(live.row)
        if self.check and (found := violations(self.pool)):
            raise AssertionError(f"pool: {found[0]}")
        if self.rates.retain:
            del self.live[live.row]
            self.tokens -= int(self.pool.tokens[live.row])
            self.pool.reserve(live.row, 0)
            self.idle[live.row] = None
        else:
            self._leave(live)
            self.pool.release(live.row)

    def _leave(self, live: Live) -> None:
        """A running sequence stops; its row is still to be released."""
        self.stalled -= live.stalled
        self.tokens -= int(self.pool.tokens[live.row])
        self.prefixes.remove(live.row)
        del self.live[live.row]

    def _forget(self, row: int) -> None:
        del self.idle[row]
        self.prefixes.remove(row)
        self.pool.release(row)

    # -- figures

    def _device_bytes(self) -> int:
        return self.pool.pages.count * self.page_bytes + self.pool.slots.count * self.slot_bytes

    def _sample(self, at: float) -> None:
        pool = self.pool
        self.on_sample(
            Sample(
                at, len(self.waiting), len(self.live), len(self.idle), self.tokens, pool.pages.count, pool.slots.count,
                self._device_bytes(), pool.replicas.count * self.page_bytes, pool.counters.retired,
                pool.counters.restored, self.outcome.delayed,
            )
        )  # fmt: skip

    def _finish(self, started: float) -> Outcome:
        outcome, counters = self.outcome, self.pool.counters
        outcome.wall_s = time.perf_counter() - started
        outcome.makespan_s = self.now
        outcome.mean_tokens = self.token_seconds / self.now if self.now else 0.0
        waits = sorted(self.waits)
        if waits:
            outcome.wait_mean_s = sum(waits) / len(waits)
            outcome.wait_p99_s, outcome.wait_max_s = waits[-(-99 * (len(waits) - 1) // 100)], waits[-1]
        outcome.retired, outcome.restored = counters.retired, counters.restored
        both = counters.retired + counters.restored_from_slots
        outcome.moved_bytes = both * (self.page_bytes + self.slot_bytes)
        outcome.host_moved_bytes = (counters.replicas_written + counters.restored_from_replicas) * self.page_bytes
        outcome.stayed_hot, outcome.passes = dict(counters.stayed_hot), counters.passes
        outcome.page_events = counters.page_events
        outcome.rss_quarter_bytes.append(_rss())
        return outcome


def _rss() -> int:
    """Bytes of memory that this process has now, or on systems that do not say, had at most."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
