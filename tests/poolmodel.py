"""A plain-Python model of the live pool, and a driver that does the same to both and compares.

Content is one integer per token. What goes through a slot comes back with its lowest bit set, and that is all a slot
loses: a codec whose restored pages are a fixed point behaves the same. Replicas are exact.
"""

from collections import Counter

import numpy as np

from coldkv.pool.faults import PoolError, PoolFull
from coldkv.pool.invariants import violations
from coldkv.pool.kvpool import KvPool, PoolSize
from coldkv.pool.payload import NoPayload
from coldkv.pool.policy import Policy

REFUSED = 6  # value of a first token whose page the codec refuses


class Injected(Exception):
    """A kernel or a copy that failed."""


class TokenBytes(NoPayload):
    """Content of pages, slots and replicas as integers `[n, T]`, on the host. `fail_in`: calls until one raises."""

    def __init__(self, size: PoolSize):
        self.pages, self.slots, self.replicas = (
            np.full((n, size.page_tokens), -9) for n in (size.pages, size.slots, size.replicas)
        )
        self.valid = np.zeros(size.slots, dtype=bool)
        self.fail_in = 0

    def _may_fail(self):
        self.fail_in -= 1
        if self.fail_in == 0:
            raise Injected

    def pack(self, pages, slots):
        self.slots[slots] = self.pages[pages] | 1
        self.valid[slots] = self.pages[pages, 0] != REFUSED
        self._may_fail()
        return self.valid[slots]

    def unpack(self, slots, pages):
        assert self.valid[slots].all(), "an invalid slot is read"
        self.pages[pages] = self.slots[slots]
        self._may_fail()

    def copy(self, source, target):
        self.pages[target] = self.pages[source]
        self._may_fail()

    def to_host(self, pages, replicas):
        self.replicas[replicas] = self.pages[pages]
        self._may_fail()

    def from_host(self, replicas, pages):
        self.pages[pages] = self.replicas[replicas]
        self._may_fail()

    def drop(self, slots):
        self.valid[slots] = False
        self.slots[slots] = -7

    def write(self, page, first, values):
        self.pages[page, first : first + len(values)] = values

    def read(self, entries):
        hot = entries >= 0
        found = np.empty((len(entries), self.pages.shape[1]), dtype=np.int64)
        found[hot] = self.pages[entries[hot]]
        assert self.valid[-2 - entries[~hot]].all(), "an invalid slot is read"
        found[~hot] = self.slots[-2 - entries[~hot]]
        return found


class Page:
    """One logical page of the model: what a hot page holds; cold pages read as `values | 1`."""

    def __init__(self, values=()):
        self.values, self.hot, self.replica, self.pins, self.refused = list(values), True, None, 0, False
        self.writing = False

    def read(self):
        return self.values if self.hot else [value | 1 for value in self.values]


class Row:
    def __init__(self, pages=(), tokens=0, promised=0, refill=0, slots=0):
        self.pages, self.tokens = list(pages), tokens
        self.promised, self.refill, self.slots = promised, refill, slots


class Model:
    """The rules, in sets and lists. Methods return False (and do nothing) where the pool must say PoolFull."""

    def __init__(self, size: PoolSize, policy: Policy, refused: int | None = REFUSED):
        self.size, self.policy, self.rows, self.refused = size, policy, {}, refused

    def pages(self):
        return {id(page): page for row in self.rows.values() for page in row.pages}.values()

    def holders(self, page):
        return [row for row in self.rows.values() if any(page is held for held in row.pages)]

    def unpromised(self):
        used = sum(page.hot for page in self.pages())
        return self.size.pages - used - sum(row.promised for row in self.rows.values())

    def free_slots(self):
        return self.size.slots - sum(not page.hot for page in self.pages())

    def free_replicas(self):
        return self.size.replicas - sum(page.replica is not None for page in self.pages())

    def count(self, tokens):
        return -(-tokens // self.size.page_tokens)

    def limit(self, row):
        old = row.tokens - self.policy.keep_tokens
        return old // self.size.page_tokens if old > 0 and self.policy.name != "none" else 0

    def claim(self, new_pages, chunk):
        """(promised at once, promised as passes return pages, promised slots)"""
        if chunk is None or self.policy.name == "none":
            return new_pages, 0, 0
        sinks, window = self.count(self.policy.sink_tokens), self.count(self.policy.keep_tokens + chunk)
        free = self.free_slots() - sum(row.slots for row in self.rows.values())
        slots = min(max(0, new_pages - sinks - self.policy.keep_tokens // self.size.page_tokens), free)
        later = min(max(0, new_pages - sinks - window - 1), slots)
        return new_pages - later, later, slots

    def retire(self, rows):
        """Pages that go cold, decided page by page from the start of each row, without any frontier."""
        replicas, retired, seen = self.free_replicas(), 0, set()
        anyones = self.free_slots() - sum(row.slots for row in self.rows.values())
        for row in rows:
            own = row.slots
            for place, page in enumerate(row.pages[: self.limit(row)]):
                first = place * self.size.page_tokens < self.policy.sink_tokens
                old = all(place < self.limit(holder) for holder in self.holders(page))
                if id(page) in seen or first or not page.hot or page.refused or page.pins or page.writing or not old:
                    continue
                if not own + anyones:
                    continue
                seen.add(id(page))
                own, anyones = (own - 1, anyones) if own else (own, anyones - 1)
                if self.policy.name == "host" and page.replica is None and not replicas:
                    continue  # the slot was meant for it; the pass does not look for another page
                row.slots -= row.slots > 0
                if self.policy.name == "host" and page.replica is None:
                    page.replica, replicas = list(page.values), replicas - 1
                if page.values[0] == self.refused:
                    page.refused = True
                else:
                    page.hot = False
                    retired += 1
                    row.promised, row.refill = row.promised + (row.refill > 0), row.refill - (row.refill > 0)
        return retired

    def warm(self, page):
        if not page.hot:
            page.hot = True
            page.values = list(page.replica) if page.replica is not None else [value | 1 for value in page.values]

    def settle(self, row):
        """The row writes on in its partial last page if nobody else holds it: then its replica is out of date."""
        if row.tokens % self.size.page_tokens and len(self.holders(row.pages[-1])) == 1:
            row.pages[-1].replica = None


class Driver:
    """Does one operation to the pool and to the model and compares everything that can be seen."""

    def __init__(self, size: PoolSize, policy: Policy, payload=None, check_every: int = 1):
        self.size, self.policy = size, policy
        self.bytes = TokenBytes(size) if payload is None else payload
        self.pool = KvPool(size, policy, self.bytes)
        self.model = Model(size, policy, REFUSED if payload is None else None)
        self.check_every, self.operations, self.done = check_every, 0, Counter()

    # every operation: (model decides, pool does); `act` compares

    def act(self, name, allowed, do, then, fail_in=0):
        """`allowed`: what the model says; `do`: the pool; `then(result)`: the same in the model."""
        before = self.snapshot() if fail_in or not allowed else None
        self.bytes.fail_in = fail_in
        try:
            result = do()
        except PoolFull:
            assert not allowed, f"{name}: the pool is full, the model is not"
            self.same(before, name)
            self.done[f"{name} full"] += 1
        except Injected:
            self.same(before, name)
            self.done[f"{name} failed"] += 1
        else:
            assert allowed, f"{name}: the model is full, the pool is not"
            self.bytes.fail_in = 0
            then(result)
            self.done[name] += 1
        finally:
            self.bytes.fail_in = 0
        self.operations += 1
        if self.operations % self.check_every == 0:
            self.check()

    def snapshot(self):
        pool, store = self.pool, self.pool.store
        arrays = [pool.ids, pool.tokens, pool.frontier, pool.hot_pages, pool.promised, pool.tables.entries]
        arrays += [pool.promised_slots, pool.refill]
        arrays += [store.entry, store.refs, store.writer, store.pins, store.epoch, store.replica, store.refused]
        arrays += [bitmap.used for bitmap in (pool.pages, pool.slots, pool.replicas, pool.rows, store.ids)]
        return [array.copy() for array in arrays]

    def same(self, before, name):
        for number, (old, new) in enumerate(zip(before, self.snapshot(), strict=True)):
            assert (old == new).all(), f"{name}: raised, but state {number} has changed"

    def check(self):
        problems = violations(self.pool)
        assert not problems, problems
        pool, model = self.pool, self.model
        assert pool.unpromised == model.unpromised(), "unpromised pages"
        assert pool.slots.free == model.free_slots() and pool.replicas.free == model.free_replicas()
        assert set(np.flatnonzero(pool.rows.used).tolist()) == set(model.rows), "rows"
        for number, row in model.rows.items():
            assert pool.tokens[number] == row.tokens and pool.promised[number] == row.promised, f"row {number}"
            assert pool.promised_slots[number] == row.slots and pool.refill[number] == row.refill, f"row {number}"
            entries = pool.tables.entries[number, : len(row.pages)]
            assert (entries >= 0).tolist() == [page.hot for page in row.pages], f"row {number}: which pages are hot"
            if len(entries):
                self.compare(number, entries, row)

    def compare(self, number, entries, row):
        found = self.bytes.read(entries).reshape(-1)[: row.tokens].tolist()
        wanted = [value for page in row.pages for value in page.read()][: row.tokens]
        assert found == wanted, f"row {number}: content"

    # operations

    def open(self, reserve, chunk=None):
        need, later, slots = self.model.claim(self.model.count(reserve), chunk)
        allowed = need <= self.model.unpromised() and len(self.model.rows) < self.size.rows

        def then(number):
            self.model.rows[number] = Row(promised=need, refill=later, slots=slots)

        self.act("open", allowed, lambda: self.pool.open(reserve, chunk), then)

    def append(self, number, values, fail_in=0):
        model, row, page_tokens = self.model, self.model.rows[number], self.size.page_tokens
        before, count = row.tokens, len(values)
        partial = before % page_tokens if count else 0
        splits = bool(partial) and len(model.holders(row.pages[-1])) > 1
        need = model.count(before + count) - len(row.pages) + splits
        allowed = need - min(need, row.promised) <= model.unpromised()
        allowed &= model.count(before + count) <= self.size.row_pages

        def then(_):
            row.promised -= min(need, row.promised)
            if splits:
                row.pages[-1] = Page(row.pages[-1].values)
            row.tokens += count
            left, place = list(values), before
            while left:
                at = place % page_tokens
                if at == 0:
                    row.pages.append(Page())
                page, part = row.pages[-1], left[: page_tokens - at]
                page.values[at:] = part
                page.replica = None
                self.bytes.write(self.pool.tables.entries[number, place // page_tokens], at, part)
                place, left = place + len(part), left[len(part) :]
            if count:  # appending nothing writes nothing
                model.settle(row)

        self.act("append", allowed, lambda: self.pool.append(number, count), then, fail_in)

    def retire(self, numbers, fail_in=0):
        rows = [self.model.rows[number] for number in numbers]

        def then(retired):
            assert retired == self.model.retire(rows), "retire: how many"

        self.act("retire", True, lambda: self.pool.retire(*numbers), then, fail_in)

    def clone(self, number, tokens, reserve, chunk=None):
        """fork (tokens None) or share"""
        model, row = self.model, self.model.rows[number]
        kept = row.tokens if tokens is None else tokens
        pages = model.count(kept)
        need = model.count(kept + reserve) - pages + bool(kept % self.size.page_tokens and reserve)
        need, later, slots = model.claim(need, chunk)
        allowed = need <= model.unpromised() and len(model.rows) < self.size.rows

        def do():
            if tokens is None:
                return self.pool.fork(number, reserve, chunk)
            return self.pool.share(number, tokens, reserve, chunk)

        def then(new):
            model.rows[new] = Row(row.pages[:pages], kept, need, later, slots)

        self.act("fork" if tokens is None else "share", allowed, do, then)

    def truncate(self, number, tokens, fail_in=0):
        model, row = self.model, self.model.rows[number]
        left = model.count(tokens)
        edge = row.pages[left - 1] if tokens % self.size.page_tokens else None
        need = int(edge is not None and not edge.hot)
        paid = min(need, row.promised)
        if any(page.writing for page in row.pages):
            return
        allowed = need - paid <= model.unpromised()

        def then(_):
            if need:
                model.warm(edge)
            row.promised -= paid
            row.promised += sum(page.hot and len(model.holders(page)) == 1 for page in row.pages[left:])
            row.pages, row.tokens = row.pages[:left], tokens
            model.settle(row)

        self.act("truncate", allowed, lambda: self.pool.truncate(number, tokens), then, fail_in)

    def restore(self, number, first, stop, pin, fail_in=0):
        model, pages = self.model, self.model.rows[number].pages[first:stop]
        cold = [page for page in pages if not page.hot]

        def then(restored):
            assert restored == len(cold)
            for page in pages:
                model.warm(page)
                page.pins += pin

        def do():
            return self.pool.restore(number, first, stop, pin=bool(pin))

        self.act("restore", len(cold) <= model.unpromised(), do, then, fail_in)

    def unpin(self, number, place):
        page = self.model.rows[number].pages[place]
        if not page.pins:
            try:
                self.pool.unpin(number, place, place + 1)
            except PoolError:
                return
            raise AssertionError("unpinned what was not pinned")

        def then(_):
            page.pins -= 1

        self.act("unpin", True, lambda: self.pool.unpin(number, place, place + 1), then)

    def backup(self, number, first, stop, fail_in=0):
        row = self.model.rows[number]
        whole = row.pages[: row.tokens // self.size.page_tokens][first:stop]
        pages = [page for page in whole if page.hot and page.replica is None and not page.writing]

        def then(written):
            assert written == len(pages)
            for page in pages:
                page.replica = list(page.values)

        allowed = len(pages) <= self.model.free_replicas()
        self.act("backup", allowed, lambda: self.pool.backup(number, first, stop), then, fail_in)

    def rewrite(self, number, place, values, fail_in=0):
        """A whole page is written anew, with a boundary pass in between, which must leave it alone."""
        model, row = self.model, self.model.rows[number]
        page = row.pages[place]
        shared = len(model.holders(page)) > 1
        allowed = int(shared or not page.hot) <= model.unpromised()

        def do():
            self.pool.begin_write(number, place, place + 1)
            return True

        def then(_):
            if shared:
                row.pages[place] = Page(page.values)
                row.pages[place].values = page.read() if page.replica is None or page.hot else list(page.replica)
            else:
                model.warm(page)
            mine = row.pages[place]
            mine.writing = True
            assert self.pool.retire(number) == model.retire([row]), "a pass while writing"
            mine.values, mine.replica, mine.writing, mine.refused = list(values), None, False, False
            self.bytes.write(self.pool.tables.entries[number, place], 0, values)
            self.pool.end_write(number, place, place + 1)

        self.act("rewrite", allowed, do, then, fail_in)

    def release(self, number):
        def then(_):
            del self.model.rows[number]

        self.act("release", True, lambda: self.pool.release(number), then)

    # one operation drawn by `pick(low, high)` (inclusive): hypothesis or a seeded generator

    def wish(self, pick):
        """(tokens to reserve, chunk or None)"""
        page_tokens = self.size.page_tokens
        return (pick(0, 8 * page_tokens), pick(1, page_tokens)) if pick(0, 1) else (pick(0, 2 * page_tokens), None)

    def step(self, pick):
        fresh = len(self.model.rows) < 2 or pick(0, 19) == 0
        if fresh:
            return self.open(*self.wish(pick))
        numbers = sorted(self.model.rows)
        number = numbers[pick(0, len(numbers) - 1)]
        row, page_tokens = self.model.rows[number], self.size.page_tokens
        fail_in = pick(1, 2) if pick(0, 9) == 0 else 0
        kind = pick(0, 15)
        if kind <= 4:
            count = pick(0, 4 * page_tokens) if pick(0, 3) == 0 else pick(0, page_tokens)
            return self.append(number, [2 * pick(0, 9) for _ in range(count)], fail_in)
        if kind <= 8:
            more = [other for other in numbers if other != number and pick(0, 1)]
            return self.retire([number, *more], fail_in)
        if kind == 9:
            return self.clone(number, None, *self.wish(pick))
        if kind == 10:
            return self.clone(number, pick(0, row.tokens // page_tokens) * page_tokens, *self.wish(pick))
        if kind == 11:
            deep = pick(0, 2) == 0
            return self.truncate(number, pick(0 if deep else max(0, row.tokens - page_tokens), row.tokens), fail_in)
        if kind == 12:
            return self.release(number)
        if not row.pages:
            return self.append(number, [2 * pick(0, 9)], fail_in)
        first = pick(0, len(row.pages) - 1)
        stop = pick(first, len(row.pages))
        if kind == 13:
            return self.restore(number, first, stop, pick(0, 3) == 0, fail_in)
        if kind == 14:
            if pick(0, 1) and self.size.replicas:
                return self.backup(number, first, stop, fail_in)
            return self.unpin(number, first)
        if first < row.tokens // page_tokens:
            return self.rewrite(number, first, [2 * pick(0, 9) for _ in range(page_tokens)], fail_in)
        return None


SIZES = (
    (PoolSize(4, 24, 20, 6, 16), Policy("window", keep_tokens=4, sink_tokens=4)),
    (PoolSize(4, 24, 20, 6, 16, replicas=8), Policy("host", keep_tokens=5, sink_tokens=0)),
    (PoolSize(3, 18, 4, 5, 12, replicas=6), Policy("window", keep_tokens=2, sink_tokens=1)),
    (PoolSize(1, 16, 9, 4, 10), Policy("window", keep_tokens=0, sink_tokens=2)),
    (PoolSize(4, 20, 6, 5, 12, replicas=30), Policy("host", keep_tokens=4, sink_tokens=4)),
    (PoolSize(4, 20, 6, 5, 12), Policy("none")),
)


def soak(operations: int, seed: int = 0, check_every: int = 1) -> Counter:
    """Random operations, a new pool of another kind every 500 -> how often each was done. AssertionError where the
    pool and the model differ."""
    import random

    generator, done, left = random.Random(seed), Counter(), operations
    number = 0
    while left > 0:
        size, policy = SIZES[number % len(SIZES)]
        driver = Driver(size, policy, check_every=check_every)
        number += 1
        while driver.operations < min(500, left):
            driver.step(lambda low, high: generator.randint(low, high))
        left -= driver.operations
        done += driver.done
    return done
