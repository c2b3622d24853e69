"""What holds of a live pool between any two calls; tests and `coldkv simulate` check it. Torch-free."""

from typing import TYPE_CHECKING

import numpy as np

from coldkv.geometry import ceil_div
from coldkv.pool.bitmap import Bitmap
from coldkv.pool.layout import NO_REPLICA, UNMAPPED
from coldkv.pool.store import NOBODY

if TYPE_CHECKING:
    from coldkv.pool.kvpool import KvPool


def violations(pool: "KvPool") -> list[str]:
    """What is wrong with the bookkeeping, nothing if all is well: owners, leaks, references, tables, promises,
    frontiers and budgets. Looks at everything: for tests, not for every step."""
    store, found = pool.store, []
    live = np.flatnonzero(store.ids.used)
    entry, replica = store.entry[live], store.replica[live]
    found += _owners(pool.pages, entry[entry >= 0])
    found += _owners(pool.slots, -2 - entry[entry < UNMAPPED])
    found += _owners(pool.replicas, replica[replica != NO_REPLICA])
    if ((entry == UNMAPPED) & (replica == NO_REPLICA)).any():
        found.append("a logical page has no bytes anywhere")
    for bitmap in (pool.pages, pool.slots, pool.replicas, pool.rows, store.ids):
        if bitmap.count != bitmap.used.sum():
            found.append(f"{bitmap.what}s: count {bitmap.count}, used {bitmap.used.sum()}")
        if not bitmap.used[: bitmap._low].all():
            found.append(f"{bitmap.what}s: a place below the first free one is free")
    held = np.bincount(pool.ids[pool.ids >= 0], minlength=len(store.refs))
    if (held != store.refs).any():
        found.append(f"references: {np.flatnonzero(held != store.refs)[:4].tolist()} are not as often in the rows")
    if (store.refs[~store.ids.used] != 0).any() or (store.refs[live] < 1).any():
        found.append("a logical page is leaked, or used though it is free")
    found += _dead_records(pool)
    if pool.promised_total != pool.promised.sum() or (pool.promised < 0).any() or pool.unpromised < 0:
        found.append(f"promises: {pool.promised.tolist()}, total {pool.promised_total}, free {pool.pages.free}")
    slots = pool.promised_slots
    if pool.promised_slots_total != slots.sum() or (slots < 0).any() or pool.unpromised_slots < 0:
        found.append(f"promises of slots: {slots.tolist()}, total {pool.promised_slots_total}, free {pool.slots.free}")
    entries = np.where(pool.ids >= 0, store.entry[pool.ids], UNMAPPED)
    if (entries != pool.tables.entries).any():
        row, page = np.argwhere(entries != pool.tables.entries)[0].tolist()
        found.append(
            f"table: row {row}, page {page}: {pool.tables.entries[row, page]}, the page is {entries[row, page]}"
        )
    for row in range(pool.size.rows):
        found += [f"row {row}: {text}" for text in _row_violations(pool, row)]
    return found


def _owners(bitmap: Bitmap, places: np.ndarray) -> list[str]:
    if len(np.unique(places)) != len(places):
        return [f"a {bitmap.what} is owned twice"]
    used = np.flatnonzero(bitmap.used)
    if len(places) != len(used) or (np.sort(places) != used).any():
        return [f"{bitmap.what}s: {len(used)} used, {len(places)} owned: leaked, or owned though free"]
    return []


def _dead_records(pool: "KvPool") -> list[str]:
    store, dead = pool.store, ~pool.store.ids.used
    clean = (store.entry[dead] == UNMAPPED) & (store.writer[dead] == NOBODY) & (store.pins[dead] == 0)
    clean &= (store.replica[dead] == NO_REPLICA) & ~store.refused[dead]
    return [] if clean.all() else ["a free record still has marks of its last page"]


def _row_violations(pool: "KvPool", row: int) -> list[str]:
    ids, start, tokens = pool.ids[row], int(pool.start[row]), int(pool.tokens[row])
    if not pool.rows.used[row]:
        state = (tokens, start, pool.frontier[row], pool.hot_pages[row], pool.promised[row])
        state += (pool.promised_slots[row], pool.refill[row])
        return ["not in use, but not empty"] if any(state) or (ids >= 0).any() else []
    found, store = [], pool.store
    mapped = ceil_div(tokens, pool.page_tokens)
    inside = np.zeros(len(ids), dtype=bool)
    inside[start:mapped] = True
    if ((ids >= 0) != inside).any():
        return [f"{tokens} tokens, but pages {np.flatnonzero(ids >= 0).tolist()}"]
    hot = store.hot(ids[start:mapped])
    if pool.hot_pages[row] != hot.sum():
        found.append(f"{pool.hot_pages[row]} hot pages noted, {hot.sum()} there")
    if tokens % pool.page_tokens and not hot[-1]:
        found.append("the partial page is not hot")
    writers = store.writer[ids[start:mapped]]
    if ((writers == row) & (store.refs[ids[start:mapped]] > 1)).any():
        found.append("writes to a page that another row holds")
    frontier = int(pool.frontier[row])
    sinks = ceil_div(pool.policy.sink_tokens, pool.page_tokens)
    below = np.arange(start, mapped) < frontier
    may_go = hot & ~store.refused[ids[start:mapped]] & (np.arange(start, mapped) >= sinks)
    if (below & may_go).any() and pool.policy.name != "none":
        found.append(f"the frontier {frontier} has passed page {start + np.flatnonzero(below & may_go)[0]}, still hot")
    if pool.policy.name == "none" and not hot.all():
        found.append("cold pages under policy none")
    return found
