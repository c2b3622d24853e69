"""The decode-boundary pass: old pages of some rows go cold, packed in one batch. Torch-free."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from coldkv.geometry import ceil_div
from coldkv.pool.layout import NO_REPLICA, UNMAPPED
from coldkv.pool.policy import HOST_FULL, INVALID, PINNED, POOL_FULL, SHARED_RECENT, SINK, WRITING
from coldkv.pool.store import NOBODY

if TYPE_CHECKING:
    from coldkv.pool.kvpool import KvPool

_NOTHING = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32), False


def boundary_pass(pool: "KvPool", rows: Sequence[int]) -> int:
    """Retire what the policy allows in `rows` -> pages that went cold.

    From a row's cold frontier to its limit every page is looked at. It goes cold if it is hot, no sink, whole and old
    in every row that holds it, neither pinned nor being written nor refused by a codec before, and if there is a slot
    (and, under policy host, room for its replica); all its records must be valid. All pages are packed in one call
    and every row that holds one learns its sentinel. If packing raises, nothing has changed.

    The frontier moves past pages that are cold or hot for good (sinks, refused); it waits at a page that may go later.
    """
    pool.counters.passes += 1
    slotless = pool.policy.name == "host" and not pool.size.slots
    found, unsure, anyones = [], [], pool.unpromised_slots
    claimed = np.empty(0, dtype=np.int32)
    for row in rows:
        expire(pool, row)
        own = int(pool.promised_slots[row])
        at, ids, waits = _eligible(pool, row, slotless or own + anyones > 0)
        looked_at = len(ids)
        if len(claimed) and len(ids):
            fresh = ~np.isin(ids, claimed)
            at, ids = at[fresh], ids[fresh]
        if not slotless and len(ids) > own + anyones:
            pool.counters.stayed_hot[POOL_FULL] += len(ids) - own - anyones
            at, ids = at[: own + anyones], ids[: own + anyones]
        anyones -= max(0, len(ids) - own)
        if len(rows) > 1:
            claimed = np.concatenate([claimed, ids])
        if len(ids):
            found.append((row, at, ids))
        if waits or len(ids) < looked_at:
            unsure.append(row)
    retired = _retire(pool, found, slotless) if found else 0
    all_gone = retired == sum(len(ids) for _, _, ids in found)
    for row in rows:
        if all_gone and row not in unsure:
            pool.frontier[row] = max(int(pool.frontier[row]), pool.cold_limit(row))
        else:
            _advance(pool, row)
    return retired


def expire(pool: "KvPool", row: int) -> None:
    """Drop pages of a row that are wholly behind the sliding window of its layers."""
    if pool.size.window is None:
        return
    behind = max(0, int(pool.tokens[row]) - pool.size.window) // pool.page_tokens
    start = int(pool.start[row])
    if behind > start:
        pool._drop(row, start, behind)
        pool.start[row] = behind
        pool.frontier[row] = max(pool.frontier[row], behind)
        pool.counters.expired += behind - start


def _eligible(pool: "KvPool", row: int, any_slots: bool) -> tuple[np.ndarray, np.ndarray, bool]:
    """(places, logical pages) of a row that may go cold now, the others counted by reason; whether some of those may go
    later."""
    first, limit = max(int(pool.frontier[row]), int(pool.start[row])), pool.cold_limit(row)
    if first >= limit:
        return _NOTHING
    store = pool.store
    ids = pool.ids[row, first:limit]
    left = store.entry[ids] >= 0
    if not any_slots:
        pool.counters.stayed_hot[POOL_FULL] += int(np.count_nonzero(left))  # nothing else is worth looking at
        return *_NOTHING[:2], True
    at = np.arange(first, limit)
    waits = False

    def stay(mask: np.ndarray, reason: str) -> None:
        nonlocal left
        count = int((left & mask).sum())
        if count:
            pool.counters.stayed_hot[reason] += count
            left = left & ~mask

    if first < (sinks := ceil_div(pool.policy.sink_tokens, pool.page_tokens)):
        stay(at < sinks, SINK)
    refused, pinned, writing = store.refused[ids], store.pins[ids] > 0, store.writer[ids] != NOBODY
    if (refused | pinned | writing).any():
        stay(refused, INVALID)
        stay(pinned, PINNED)
        stay(writing, WRITING)
        waits = bool((pinned | writing).any())
    shared = left & (store.refs[ids] > 1)
    if shared.any():
        shared = np.flatnonzero(shared)
        recent = np.zeros(len(ids), dtype=bool)
        for other, held in pool.holders(row, at[shared], ids[shared]):
            recent[shared[held]] |= at[shared[held]] >= pool.cold_limit(other)
        stay(recent, SHARED_RECENT)
        waits = waits or bool(recent.any())
    return at[left], ids[left], waits


def _retire(pool: "KvPool", found: list[tuple[int, np.ndarray, np.ndarray]], slotless: bool) -> int:
    """Pack the pages of `found`, (row, places, logical pages) each, for which there are slots. `slotless`: the host
    replica becomes the only copy, to be restored before it is read."""
    store, host = pool.store, pool.policy.name == "host"
    ids, owner = found[0][2], None
    if len(found) > 1:
        ids = np.concatenate([ids for _, _, ids in found])
        owner = np.repeat(np.arange(len(found)), [len(ids) for _, _, ids in found])
    if host:
        fits = _within_host_budget(pool, ids)
        ids, owner = ids[fits], None if owner is None else owner[fits]
        if not len(ids):
            return 0
    pages = store.entry[ids]
    slots = pool.slots.take(0 if slotless else len(ids))
    try:
        copied, replicas = _copy_to_host(pool, ids, pages) if host else (_NOTHING[1], _NOTHING[1])
        try:
            valid = None if slotless else pool.payload.pack(pages, slots)
        except BaseException:
            pool.replicas.give(replicas)
            raise
    except BaseException:
        pool.slots.give(slots)
        raise
    store.replica[copied] = replicas
    pool.counters.replicas_written += len(copied)
    if not slotless:
        for (row, _, _), count in zip(found, _counts(found, owner, len(ids)), strict=True):
            spent = min(count, int(pool.promised_slots[row]))
            pool.promised_slots[row] -= spent
            pool.promised_slots_total -= spent
        if not valid.all():
            refused = ids[~valid]
            pool.counters.stayed_hot[INVALID] += len(refused)
            store.refused[refused] = True
            pool.free_slots(slots[~valid])
            ids, pages, slots = ids[valid], pages[valid], slots[valid]
            owner = None if owner is None else owner[valid]
    store.entry[ids] = UNMAPPED if slotless else -2 - slots
    store.epoch[ids] += 1
    pool.pages.give(pages)
    pool.counters.retired += len(ids)
    for (row, at, wanted), count in zip(found, _counts(found, owner, len(ids)), strict=True):
        kept = min(count, int(pool.refill[row]))
        if kept:
            pool.refill[row] -= kept
            pool._promise(row, kept)
        if count < len(wanted):
            cold = store.entry[wanted] < 0
            at, wanted = at[cold], wanted[cold]
        pool.moved(row, at, wanted, hot=-1)
    return len(ids)


def _copy_to_host(pool: "KvPool", ids: np.ndarray, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Replicas of those logical pages that have none -> (the logical pages, their replicas)."""
    lacking = pool.store.replica[ids] == NO_REPLICA
    replicas = pool.replicas.take(int(lacking.sum()))
    try:
        if len(replicas):
            pool.payload.to_host(pages[lacking], replicas)
    except BaseException:
        pool.replicas.give(replicas)
        raise
    return ids[lacking], replicas


def _counts(found: list, owner: np.ndarray | None, total: int) -> list[int]:
    """How many of `total` pages are of each row of `found`; `owner`: its number for each page, None for one row."""
    return [total] if owner is None else np.bincount(owner, minlength=len(found)).tolist()


def _within_host_budget(pool: "KvPool", ids: np.ndarray) -> np.ndarray:
    """Bool `[n]`: the page has a replica already or, one after the other, finds room for one."""
    needs = pool.store.replica[ids] == NO_REPLICA
    fits = ~needs | (np.cumsum(needs) <= pool.replicas.free)
    if not fits.all():
        pool.counters.stayed_hot[HOST_FULL] += int((~fits).sum())
    return fits


def _advance(pool: "KvPool", row: int) -> None:
    first, limit = max(int(pool.frontier[row]), int(pool.start[row])), pool.cold_limit(row)
    if first >= limit:
        return
    store, ids = pool.store, pool.ids[row, first:limit]
    later = (store.entry[ids] >= 0) & ~store.refused[ids]
    sinks = ceil_div(pool.policy.sink_tokens, pool.page_tokens)
    later[: max(0, sinks - first)] = False
    waits = np.flatnonzero(later)
    pool.frontier[row] = first + int(waits[0]) if len(waits) else limit
