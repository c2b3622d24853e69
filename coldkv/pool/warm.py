"""Content back into physical pages: restore in place, and the copies that a row writes to. Torch-free."""

from typing import TYPE_CHECKING

import numpy as np

from coldkv.pool.faults import PoolFull
from coldkv.pool.layout import NO_REPLICA, UNMAPPED

if TYPE_CHECKING:
    from coldkv.pool.kvpool import KvPool


def warm(pool: "KvPool", row: int, first: int, stop: int, *, own_promise: bool = False) -> int:
    """Make pages `[first, stop)` of a row hot -> how many were not. `own_promise`: the row's promise may pay for them.

    The replica wins over the slot, since it is exact, and stays as a backup until the page is written. The slots are
    free afterwards, the content epochs higher, and the frontiers back at the first page. If there are too few pages or
    the payload raises, every slot and replica is as it was.
    """
    ids = pool.ids[row, first:stop]
    at = np.flatnonzero(~pool.store.hot(ids))
    if not len(at):
        return 0
    ids, at = ids[at], at + first
    paid = min(len(ids), int(pool.promised[row])) if own_promise else 0
    if len(ids) - paid > pool.unpromised:
        raise PoolFull(
            f"pool: row {row}: {len(ids)} pages to restore, {pool.unpromised} of {pool.size.pages} pages are free and "
            "not promised; they stay cold"
        )
    pages = filled(pool, ids)
    pool._promise(row, -paid)
    _now_hot(pool, row, at, ids, pages)
    return len(ids)


def own(pool: "KvPool", row: int, first: int, stop: int) -> None:
    """Make pages `[first, stop)` of a row hot and its own: cold ones warm, shared ones copied. Errors as `warm`."""
    store = pool.store
    ids = pool.ids[row, first:stop]
    shared = store.refs[ids] > 1
    at = np.flatnonzero(shared | ~store.hot(ids))
    pool._require_free(len(at))
    pages = filled(pool, ids[at])
    copied = shared[at]
    olds = ids[at[copied]]
    _now_hot(pool, row, first + at[~copied], ids[at[~copied]], pages[~copied])
    if len(olds):
        pool.hot_pages[row] += int((~store.hot(olds)).sum())
        store.refs[olds] -= 1
        pool.ids[row, first + at[copied]] = store.create(pages[copied])
        pool.counters.copied += len(olds)
        pool.counters.mapped += len(olds)
        pool.frontier[row] = min(pool.frontier[row], first + int(at[0]))
        pool._publish(row, first, stop)


def filled(pool: "KvPool", ids: np.ndarray) -> np.ndarray:
    """Physical pages, newly taken, with the content of logical pages `ids`: from the replica (which is exact), the
    page or the slot. Nothing is taken if the payload raises."""
    store, payload = pool.store, pool.payload
    pages = pool.pages.take(len(ids))
    hot = store.hot(ids)
    exact = ~hot & (store.replica[ids] != NO_REPLICA)
    packed = ~hot & ~exact
    try:
        if hot.any():
            payload.copy(store.entry[ids[hot]], pages[hot])
        if exact.any():
            payload.from_host(store.replica[ids[exact]], pages[exact])
        if packed.any():
            payload.unpack(store.slots(ids[packed]), pages[packed])
    except BaseException:
        pool.pages.give(pages)
        raise
    pool.counters.restored_from_replicas += int(exact.sum())
    pool.counters.restored_from_slots += int(packed.sum())
    return pages


def _now_hot(pool: "KvPool", row: int, at: np.ndarray, ids: np.ndarray, pages: np.ndarray) -> None:
    if not len(at):
        return
    store = pool.store
    slots = store.slots(ids)[store.entry[ids] < UNMAPPED]
    store.entry[ids] = pages
    store.epoch[ids] += 1
    pool.free_slots(slots)
    pool.frontier[row] = min(pool.frontier[row], int(at[0]))
    pool.moved(row, at, ids, hot=1)
