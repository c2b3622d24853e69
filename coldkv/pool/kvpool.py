"""The live pool: sequences (rows) over physical pages and slots. Torch-free; the bytes are the payload's business.

Every operation is all or nothing: what raises has changed nothing.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from coldkv.errors import InputError
from coldkv.geometry import ceil_div
from coldkv.pool.bitmap import Bitmap
from coldkv.pool.boundary import boundary_pass
from coldkv.pool.faults import PoolError, PoolFull
from coldkv.pool.layout import NO_REPLICA, UNMAPPED
from coldkv.pool.payload import NoPayload
from coldkv.pool.policy import Policy
from coldkv.pool.store import NOBODY, LogicalStore
from coldkv.pool.tables import BlockTables
from coldkv.pool.warm import filled, own, warm

NO_PAGE = -1


@dataclass(frozen=True)
class PoolSize:
    """`pages`: physical pages; `slots`: cold pages at most; `rows`: sequences at most, each of `row_pages` logical
    pages at most; `replicas`: pages of the host budget; `window`: of sliding layers, in tokens (None: full attention),
    beyond which pages are dropped; `draft_tokens`: width of speculative decoding, whose KV must stay hot."""

    page_tokens: int
    pages: int
    slots: int
    rows: int
    row_pages: int
    replicas: int = 0
    window: int | None = None
    draft_tokens: int = 0

    def __post_init__(self):
        least = {"page_tokens": 1, "pages": 1, "slots": 0, "rows": 1, "row_pages": 1, "replicas": 0, "draft_tokens": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise InputError(f"pool: {name}: expected at least {low}, found {getattr(self, name)}")
        if self.window is not None and self.window < 1:
            raise InputError(f"pool: window: expected at least 1, found {self.window}")


@dataclass
class PoolCounters:
    """Page events since the pool was made. `stayed_hot`: pages that a pass looked at and left hot, by reason (a page
    counts once in every pass that looks at it)."""

    mapped: int = 0  # physical pages given to rows by append and copy on write
    copied: int = 0
    freed: int = 0  # logical pages whose last row is gone
    retired: int = 0
    restored_from_slots: int = 0
    restored_from_replicas: int = 0
    replicas_written: int = 0
    expired: int = 0  # dropped behind a sliding window
    passes: int = 0
    stayed_hot: Counter = field(default_factory=Counter)

    @property
    def restored(self) -> int:
        return self.restored_from_slots + self.restored_from_replicas

    @property
    def page_events(self) -> int:
        return self.mapped + self.freed + self.retired + self.restored


class KvPool:
    """Rows of tokens whose pages are hot (a physical page), cold (a slot), or on the host only.

    A page is cold for all layers or for none: there is one block table row per sequence and no layer axis. Layers
    whose KV has another life (sliding windows) have a pool of their own.
    """

    def __init__(self, size: PoolSize, policy: Policy, payload: NoPayload | None = None):
        if policy.keep_tokens < size.draft_tokens and policy.name != "none":
            raise InputError(
                f"pool: cold keep tokens: expected at least the draft width {size.draft_tokens}, "
                f"found {policy.keep_tokens}"
            )
        self.size, self.policy = size, policy
        self.payload = NoPayload() if payload is None else payload
        self.page_tokens = size.page_tokens
        self.pages = Bitmap(size.pages, "page")
        self.slots = Bitmap(size.slots, "slot")
        self.replicas = Bitmap(size.replicas, "host replica")
        self.rows = Bitmap(size.rows, "row")
        self.store = LogicalStore(size.pages + size.slots + size.replicas)
        self.tables = BlockTables(size.rows, size.row_pages)
        self.ids = np.full((size.rows, size.row_pages), NO_PAGE, dtype=np.int32)
        self.tokens = np.zeros(size.rows, dtype=np.int64)
        self.start = np.zeros(size.rows, dtype=np.int64)  # first page not dropped behind the window
        self.frontier = np.zeros(size.rows, dtype=np.int64)  # pages below are cold, or hot for good
        self.hot_pages = np.zeros(size.rows, dtype=np.int64)
        self.promised = np.zeros(size.rows, dtype=np.int64)  # physical pages that the row may still take
        self.promised_total = 0
        # a row in chunks: slots kept for it, and how many of the pages that its passes return stay promised to it
        self.promised_slots = np.zeros(size.rows, dtype=np.int64)
        self.promised_slots_total = 0
        self.refill = np.zeros(size.rows, dtype=np.int64)
        self.counters = PoolCounters()

    # -- looking

    @property
    def unpromised(self) -> int:
        """Free physical pages that no row was promised."""
        return self.pages.free - self.promised_total

    @property
    def unpromised_slots(self) -> int:
        return self.slots.free - self.promised_slots_total

    def mapped(self, row: int) -> int:
        """Logical pages of a row, those behind a sliding window included."""
        return ceil_div(int(self.tokens[row]), self.page_tokens)

    def entitlement(self, row: int) -> int:
        """Physical pages that a row has or may still take: its claim on the device's address space."""
        return int(self.hot_pages[row] + self.promised[row])

    def cold_limit(self, row: int) -> int:
        """Pages `[0, limit)` of a row are whole and older than what the policy keeps."""
        return self.policy.cold_limit(int(self.tokens[row]), self.page_tokens)

    def require_row(self, row: int) -> None:
        if not (0 <= row < self.size.rows and self.rows.used[row]):
            raise PoolError(f"pool: row {row} is not in use")

    def require_readable(self, row: int) -> None:
        """PoolError while a page of the row is on the host only, where no attention can read it."""
        if self.policy.name == "host" and not self.size.slots:
            away = self.tables.entries[row, self.start[row] : self.mapped(row)] == UNMAPPED
            if away.any():
                raise PoolError(f"pool: row {row}: {int(away.sum())} pages are on the host: restore them first")

    def span(self, row: int, first: int, stop: int | None) -> tuple[int, int]:
        """Logical pages `[first, stop)` of a row (None: up to its last), checked against what it has."""
        self.require_row(row)
        mapped = self.mapped(row)
        stop = mapped if stop is None else stop
        if not self.start[row] <= first <= stop <= mapped:
            raise PoolError(f"pool: row {row}: pages {first} to {stop - 1}: it has {self.start[row]} to {mapped - 1}")
        return first, stop

    # -- life of a row

    def open(self, reserve_tokens: int = 0, chunk_tokens: int | None = None) -> int:
        """A new empty row, with a promise of pages for `reserve_tokens` tokens. PoolFull: no row, or too few pages.

        `chunk_tokens`: the row grows by at most so many tokens between two passes. Then it is promised the pages that
        it needs at one time, slots for the others as far as there are any, and what its passes return to the pool
        until it has had as many pages as it needs in all.
        """
        pages, refill, slots = self._claim(ceil_div(reserve_tokens, self.page_tokens), chunk_tokens)
        self._require_free(pages)
        row = int(self.rows.take(1)[0])
        self._grant(row, pages, refill, slots)
        return row

    def reserve(self, row: int, tokens: int) -> None:
        """Set the promise to what the row needs to grow by `tokens` tokens; 0 gives all promises back."""
        self.require_row(row)
        need = ceil_div(int(self.tokens[row]) + tokens, self.page_tokens) - self.mapped(row)
        self._require_free(need - int(self.promised[row]))
        self._grant(row, need - int(self.promised[row]), -int(self.refill[row]), -int(self.promised_slots[row]))

    def append(self, row: int, tokens: int) -> np.ndarray:
        """Grow a row by `tokens` tokens -> the physical pages mapped for them, int32 `[n]`.

        A shared partial last page is copied first, for only its holder may write on. PoolFull: too few pages.
        """
        self.require_row(row)
        if tokens < 0:
            raise PoolError(f"pool: row {row}: append: expected at least 0 tokens, found {tokens}")
        self.require_readable(row)
        before, old = int(self.tokens[row]), self.mapped(row)
        new = ceil_div(before + tokens, self.page_tokens)
        if new > self.size.row_pages:
            raise PoolFull(f"pool: row {row}: {new} pages needed, a row has at most {self.size.row_pages}")
        last = self.ids[row, old - 1] if tokens and before % self.page_tokens else NO_PAGE
        splits = last != NO_PAGE and int(self.store.refs[last]) > 1
        need = new - old + splits
        promised = min(need, int(self.promised[row]))
        self._require_free(need - promised)
        if splits:
            copy = filled(self, self.ids[row, old - 1 : old])
            taken = np.concatenate([copy, self.pages.take(need - 1)])
        else:
            taken = self.pages.take(need)
        self._promise(row, -promised)
        ids = self.store.create(taken)
        first = old - 1 if splits else old
        if splits:
            self.store.refs[last] -= 1
            self.counters.copied += 1
        self.ids[row, first:new] = ids
        self.hot_pages[row] += new - old
        self.tokens[row] += tokens
        self.counters.mapped += need
        self.tables.publish_indices(row, first, taken)
        if last != NO_PAGE and not splits:  # its content grows
            self.store.writer[last] = NOBODY
            if self.store.replica[last] != NO_REPLICA:
                self.drop_replicas(self.ids[row, old - 1 : old])
        if tokens and (before + tokens) % self.page_tokens:
            self.store.writer[self.ids[row, new - 1]] = row
        return taken

    def fork(self, row: int, reserve_tokens: int = 0, chunk_tokens: int | None = None) -> int:
        """A second row with the same content, page for page the same; either copies what it writes to."""
        self.require_row(row)
        return self._clone(row, int(self.tokens[row]), reserve_tokens, chunk_tokens)

    def share(self, row: int, tokens: int, reserve_tokens: int = 0, chunk_tokens: int | None = None) -> int:
        """A new row that starts with the first `tokens` tokens of `row`, whole pages, and a promise for more."""
        self.require_row(row)
        if tokens % self.page_tokens or not 0 <= tokens <= self.tokens[row]:
            whole = int(self.tokens[row]) // self.page_tokens * self.page_tokens
            raise PoolError(
                f"pool: row {row}: share: expected a multiple of {self.page_tokens} up to {whole}, found {tokens}"
            )
        return self._clone(row, tokens, reserve_tokens, chunk_tokens)

    def truncate(self, row: int, tokens: int) -> None:
        """Cut a row down to `tokens` tokens (speculative roll-back). Pages of its own stay promised to it.

        A last page that becomes partial must be hot, so a cold one is restored first. PoolFull: no page for that.
        """
        self.require_row(row)
        if not 0 <= tokens <= self.tokens[row]:
            raise PoolError(f"pool: row {row}: truncate: expected 0 to {self.tokens[row]} tokens, found {tokens}")
        left, mapped = ceil_div(tokens, self.page_tokens), self.mapped(row)
        if left < self.start[row] or (tokens % self.page_tokens and left - 1 < self.start[row]):
            raise PoolError(f"pool: row {row}: truncate to {tokens} tokens: its pages are behind the window")
        if tokens % self.page_tokens:
            warm(self, row, left - 1, left, own_promise=True)
        dropped = self.ids[row, left:mapped]
        freed = int((self.store.hot(dropped) & (self.store.refs[dropped] == 1)).sum())
        self._drop(row, left, mapped)
        self._promise(row, freed)
        self.tokens[row] = tokens
        self.frontier[row] = min(self.frontier[row], tokens // self.page_tokens)
        self._hold_pen(row, max(0, left - 1), left)

    def release(self, row: int) -> None:
        """End a row: its pages, those that no other row holds, its promise and its cold frontier are gone."""
        self.require_row(row)
        self._drop(row, int(self.start[row]), self.mapped(row))
        self._grant(row, -int(self.promised[row]), -int(self.refill[row]), -int(self.promised_slots[row]))
        self.tokens[row] = self.start[row] = self.frontier[row] = 0
        self.rows.give(np.array([row], dtype=np.int32))

    # -- hot and cold

    def retire(self, *rows: int) -> int:
        """The decode-boundary pass over `rows`, together -> pages that went cold. See `boundary.boundary_pass`."""
        for row in rows:
            self.require_row(row)
        return boundary_pass(self, rows)

    def restore(self, row: int, first: int = 0, stop: int | None = None, *, pin: bool = False) -> int:
        """Warm logical pages `[first, stop)` of a row back, in place and for every row that holds them -> how many.

        From the host replica where there is one, else from the slot, which is free again. `pin`: keep them hot until
        `unpin`. A page that is hot already stays as it is. PoolFull: too few unpromised pages, and nothing is lost.
        """
        first, stop = self.span(row, first, stop)
        restored = warm(self, row, first, stop)
        if pin:
            self.pin(row, first, stop)
        return restored

    def backup(self, row: int, first: int, stop: int) -> int:
        """Write host replicas of the hot, whole pages in `[first, stop)` that have none -> how many.

        A replica stays until its page is written or gone; if the page goes cold, restore takes the replica.
        PoolFull: the host budget does not hold all of them.
        """
        first, stop = self.span(row, first, stop)
        ids = self.ids[row, first : min(stop, int(self.tokens[row]) // self.page_tokens)]
        ids = ids[self.store.hot(ids) & (self.store.replica[ids] == NO_REPLICA) & (self.store.writer[ids] == NOBODY)]
        replicas = self.replicas.take(len(ids))
        try:
            self.payload.to_host(self.store.entry[ids], replicas)
        except BaseException:
            self.replicas.give(replicas)
            raise
        self.store.replica[ids] = replicas
        self.counters.replicas_written += len(ids)
        return len(ids)

    def pin(self, row: int, first: int, stop: int) -> None:
        """Keep pages from going cold, until `unpin` has been called as often."""
        first, stop = self.span(row, first, stop)
        self.store.pins[self.ids[row, first:stop]] += 1

    def unpin(self, row: int, first: int, stop: int) -> None:
        first, stop = self.span(row, first, stop)
        ids = self.ids[row, first:stop]
        if (self.store.pins[ids] < 1).any():
            raise PoolError(f"pool: row {row}: pages {first} to {stop - 1}: unpinned more often than pinned")
        self.store.pins[ids] -= 1

    def begin_write(self, row: int, first: int, stop: int) -> None:
        """Prepare pages `[first, stop)` for being written anew: warm, the row's own, and hot until `end_write`."""
        first, stop = self.span(row, first, stop)
        ids = self.ids[row, first:stop]
        if ((self.store.writer[ids] != NOBODY) & (self.store.writer[ids] != row)).any():
            raise PoolError(f"pool: row {row}: pages {first} to {stop - 1}: another row is writing")
        own(self, row, first, stop)
        self.store.writer[self.ids[row, first:stop]] = row

    def end_write(self, row: int, first: int, stop: int) -> None:
        """The pages have new content: a new epoch, no replica, and they may go cold again."""
        first, stop = self.span(row, first, stop)
        ids = self.ids[row, first:stop]
        if (self.store.writer[ids] != row).any():
            raise PoolError(f"pool: row {row}: pages {first} to {stop - 1}: the row is not writing them")
        self.drop_replicas(ids[self.store.replica[ids] != NO_REPLICA])
        self.store.writer[ids] = NOBODY
        self.store.refused[ids] = False
        self.store.epoch[ids] += 1
        self.frontier[row] = min(self.frontier[row], first)
        self._hold_pen(row, first, stop)

    # -- inside

    def _require_free(self, need: int) -> None:
        if need > self.unpromised:
            raise PoolFull(
                f"pool: {need} pages needed, {self.pages.free} of {self.size.pages} free and "
                f"{self.promised_total} of them promised"
            )

    def _claim(self, new_pages: int, chunk_tokens: int | None) -> tuple[int, int, int]:
        """(pages to promise now, pages to promise as passes return them, slots) for `new_pages` more pages of a row."""
        if chunk_tokens is None or self.policy.name == "none":
            return new_pages, 0, 0
        sinks = ceil_div(self.policy.sink_tokens, self.page_tokens)
        at_once = sinks + ceil_div(self.policy.keep_tokens + chunk_tokens, self.page_tokens) + 1
        kept = sinks + self.policy.keep_tokens // self.page_tokens
        slots = min(max(0, new_pages - kept), self.unpromised_slots)
        refill = min(max(0, new_pages - at_once), slots)
        return new_pages - refill, refill, slots

    def _grant(self, row: int, pages: int, refill: int, slots: int) -> None:
        self._promise(row, pages)
        self.refill[row] += refill
        self.promised_slots[row] += slots
        self.promised_slots_total += slots

    def _promise(self, row: int, change: int) -> None:
        self.promised[row] += change
        self.promised_total += change

    def _publish(self, row: int, first: int, stop: int) -> None:
        """Publish the entries of mapped pages."""
        self.tables.publish_indices(row, first, self.store.entry[self.ids[row, first:stop]])

    def _hold_pen(self, row: int, first: int, stop: int) -> None:
        """Of pages `[first, stop)`, the partial one at the row's end has the row as its writer, whole ones nobody."""
        ids = self.ids[row, first:stop]
        own = ids[self.store.writer[ids] == row]
        self.store.writer[own] = NOBODY
        if self.tokens[row] % self.page_tokens and self.mapped(row) == stop and stop > first:
            last = ids[-1]
            if self.store.refs[last] == 1:
                if self.store.replica[last] != NO_REPLICA:
                    self.drop_replicas(ids[-1:])  # the row may write on at any time
                self.store.writer[last] = row

    def _clone(self, row: int, tokens: int, reserve_tokens: int, chunk_tokens: int | None) -> int:
        pages = ceil_div(tokens, self.page_tokens)
        need = ceil_div(tokens + reserve_tokens, self.page_tokens) - pages
        need += bool(tokens % self.page_tokens and reserve_tokens)  # the copy of the partial page
        promised, refill, slots = self._claim(need, chunk_tokens)
        self._require_free(promised)
        new = int(self.rows.take(1)[0])
        self._grant(new, promised, refill, slots)
        start = min(int(self.start[row]), pages)
        ids = self.ids[row, start:pages]
        self.ids[new, start:pages] = ids
        self.store.refs[ids] += 1
        if tokens % self.page_tokens:
            self.store.writer[ids[-1]] = NOBODY
        self.tokens[new], self.start[new] = tokens, start
        self.hot_pages[new] = self.store.hot(ids).sum()
        self.frontier[new] = min(int(self.frontier[row]), tokens // self.page_tokens)
        self._publish(new, start, pages)
        return new

    def _drop(self, row: int, first: int, stop: int) -> None:
        """Take pages out of a row; content that no row holds any more is freed, wherever it is."""
        ids = self.ids[row, first:stop].copy()
        self.hot_pages[row] -= self.store.hot(ids).sum()
        self.ids[row, first:stop] = NO_PAGE
        self.tables.publish_indices(row, first, np.full(len(ids), UNMAPPED, dtype=np.int32))
        self.store.refs[ids] -= 1
        own = ids[self.store.writer[ids] == row]
        self.store.writer[own] = NOBODY
        dead = ids[self.store.refs[ids] == 0]
        entry = self.store.entry[dead]
        self.pages.give(entry[entry >= 0])
        self.free_slots(-2 - entry[entry < UNMAPPED])
        self.drop_replicas(dead[self.store.replica[dead] != NO_REPLICA])
        self.store.forget(dead)
        self.counters.freed += len(dead)

    def free_slots(self, slots: np.ndarray) -> None:
        if len(slots):
            self.payload.drop(slots)
            self.slots.give(slots)

    def drop_replicas(self, ids: np.ndarray) -> None:
        """Free the host replicas of logical pages that have one."""
        self.replicas.give(self.store.replica[ids])
        self.store.replica[ids] = NO_REPLICA

    def moved(self, row: int, at: np.ndarray, ids: np.ndarray, hot: int) -> None:
        """Tell every row that logical pages `ids`, at `at` in `row`, went cold (`hot` -1) or are hot again (+1)."""
        if not len(at):
            return
        self.hot_pages[row] += hot * len(at)
        self._publish(row, int(at[0]), int(at[-1]) + 1)
        shared = self.store.refs[ids] > 1
        if not shared.any():
            return
        at, ids = at[shared], ids[shared]
        for other, held in self.holders(row, at, ids):
            self.hot_pages[other] += hot * int(held.sum())
            self._publish(other, int(at[held][0]), int(at[held][-1]) + 1)
            if hot > 0:
                self.frontier[other] = min(self.frontier[other], int(at[held][0]))

    def holders(self, row: int, at: np.ndarray, ids: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Rows beside `row` that hold some of the logical pages `ids`, all at the same places `at` -> (row, bool)."""
        rows = np.flatnonzero(self.rows.used)
        rows = rows[rows != row]
        held = self.ids[rows[:, None], at[None, :]] == ids[None, :]
        return [(int(rows[i]), held[i]) for i in np.flatnonzero(held.any(axis=1))]
