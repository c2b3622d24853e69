"""The runs of one `coldkv simulate`: policy none, the chosen policies, the points of a sweep; one trace through each.

`coldkv.simulate/1` is the document that comes out.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from coldkv._version import __version__
from coldkv.errors import InputError
from coldkv.pool.kvpool import KvPool, PoolSize
from coldkv.pool.policy import Policy
from coldkv.results import git_revision
from coldkv.simulation.engine import Engine, Outcome, Rates, Sample
from coldkv.simulation.shape import Shape
from coldkv.simulation.traces import Request

SCHEMA = "coldkv.simulate/1"
SWEEPS = ("keep", "sink", "cold-share", "device-bytes")


@dataclass(frozen=True)
class Setup:
    """One run. `cold_share`: of the device bytes, for slots, unless `max_cold_pages` says how many slots."""

    policy: Policy
    device_bytes: int
    cold_share: float
    max_cold_pages: int | None = None
    rows: int = 512
    row_pages: int = 4096
    draft_tokens: int = 0

    def size(self, shape: Shape) -> PoolSize:
        """Pages and slots that fit the device bytes. InputError where there is not room for a page."""
        slots = 0
        if self.policy.name != "none":
            slots = int(self.device_bytes * self.cold_share) // shape.slot_bytes
            slots = slots if self.max_cold_pages is None else self.max_cold_pages
        pages = (self.device_bytes - slots * shape.slot_bytes) // shape.page_bytes
        if pages < 1:
            raise InputError(
                f"simulate: {self.device_bytes:,} device bytes hold {slots:,} slots of {shape.slot_bytes:,} bytes and "
                f"{max(pages, 0)} pages of {shape.page_bytes:,}: expected room for a page at least"
            )
        replicas = self.policy.host_bytes // shape.page_bytes if self.policy.name == "host" else 0
        replicas = min(replicas, pages + slots)
        return PoolSize(
            shape.tokens_per_page, pages, slots, self.rows, self.row_pages, replicas, draft_tokens=self.draft_tokens
        )


def parse_sweep(text: str) -> tuple[str, list[float]]:
    """`keep=64,128` -> ("keep", [64, 128]). InputError for another name or values that are no numbers."""
    from coldkv.pool.policy import parse_bytes

    name, equals, values = text.partition("=")
    if not equals or name not in SWEEPS:
        raise InputError(f"--sweep {text!r}: expected NAME=VALUE,... with one of {', '.join(SWEEPS)}")
    found = []
    for value in values.split(","):
        try:
            found.append(parse_bytes(value) if name == "device-bytes" else float(value))
        except ValueError:
            raise InputError(f"--sweep {text!r}: expected numbers, found {value[:40]!r}") from None
    if name in ("keep", "sink") and any(value != int(value) or value < 0 for value in found):
        raise InputError(f"--sweep {text!r}: expected whole numbers from 0")
    if name == "cold-share" and not all(0 < value < 1 for value in found):
        raise InputError(f"--sweep {text!r}: expected shares between 0 and 1")
    return name, found


def setups(base: Setup, policies: Sequence[str], sweep: tuple[str, list[float]] | None) -> list[Setup]:
    """Policy none first, then each policy, at every point of the sweep (none only where the point concerns it)."""
    found: list[Setup] = []
    for name in ("none", *(policy for policy in policies if policy != "none")):
        for value in sweep[1] if sweep else [None]:
            one = dataclasses.replace(base, policy=dataclasses.replace(base.policy, name=name))
            if value is not None and sweep[0] in ("keep", "sink"):
                one = dataclasses.replace(
                    one, policy=dataclasses.replace(one.policy, **{f"{sweep[0]}_tokens": int(value)})
                )
            elif value is not None and sweep[0] == "cold-share":
                one = dataclasses.replace(one, cold_share=value, max_cold_pages=None)
            elif value is not None:
                one = dataclasses.replace(one, device_bytes=int(value))
            if name == "none":  # what concerns slots does not concern it
                plain = Policy("none", base.policy.keep_tokens, base.policy.sink_tokens, base.policy.host_bytes)
                one = dataclasses.replace(one, policy=plain, cold_share=base.cold_share)
            if one not in found:
                found.append(one)
    return found


def run_all(
    chosen: Sequence[Setup],
    shape: Shape,
    trace: Callable[[], Iterator[Request]],
    total: int,
    rates: Rates,
    *,
    sample_s: float,
    on_sample: Callable[[int, Sample], None],
    make_content=None,
    advance=None,
    check: bool = False,
) -> Iterator[tuple[Setup, PoolSize, Outcome]]:
    """Replay the trace through a pool per setup. `make_content(size)` -> payload and content checker for real bytes."""
    for number, setup in enumerate(chosen):
        size = setup.size(shape)
        content = make_content(size) if make_content else None
        pool = KvPool(size, setup.policy, content.payload if content else None)
        if content:
            content.attach(pool)
        engine = Engine(pool, rates, shape.page_bytes, shape.slot_bytes, content=content, check=check)
        outcome = engine.run(
            trace(),
            total=total,
            sample_s=sample_s,
            on_sample=lambda sample, number=number: on_sample(number, sample),
            advance=advance,
        )
        yield setup, size, outcome


def row(setup: Setup, size: PoolSize, outcome: Outcome, shape: Shape) -> dict:
    """One row of the document."""
    policy = setup.policy
    return {
        "policy": policy.name,
        "keep_tokens": policy.keep_tokens,
        "sink_tokens": policy.sink_tokens,
        "host_bytes": policy.host_bytes if policy.name == "host" else 0,
        "device_bytes": setup.device_bytes,
        "pages": size.pages,
        "slots": size.slots,
        "page_bytes": shape.page_bytes,
        "slot_bytes": shape.slot_bytes,
        **outcome.to_json(),
    }


def document(run: dict, rows: list[dict]) -> dict:
    started = {"version": __version__, "git": git_revision(), "argv": sys.argv[1:]}
    started["time_utc"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"schema": SCHEMA, "run": started | run, "rows": rows}


def label(found: dict, rows: list[dict]) -> str:
    """A row's name in a picture: the policy, and what is not the same in all rows of that policy."""
    same = [other for other in rows if other["policy"] == found["policy"]]
    differs = [
        key for key in ("keep_tokens", "sink_tokens", "device_bytes", "slots") if len({r[key] for r in same}) > 1
    ]
    return ", ".join([found["policy"], *(f"{key.replace('_', ' ')} {found[key]:,}" for key in differs)])


def lines(document: dict) -> list[str]:
    """The document for people: the model, a table, what the policies buy, and how fast the bookkeeping was."""
    run, rows = document["run"], document["rows"]
    page, slot = rows[0]["page_bytes"], rows[0]["slot_bytes"]
    found = [
        f"{run['trace']}: {run['requests']:,} requests; table {run['table']}, codec {', '.join(run['codecs'])}, "
        f"{run['layers']} layers x {run['kv_heads']} KV heads x {run['head_dim']}",
        f"a page of {run['page_tokens']} tokens: {page:,} bytes hot, {slot:,} in a slot ({page / slot:.3f}x)",
        "",
        *table(rows),
        "",
    ]
    plain = rows[0]
    for row in rows[1:]:
        if row["policy"] != "none" and row["device_bytes"] == plain["device_bytes"]:
            found.append(
                f"{label(row, rows)}: {row['mean_tokens'] / plain['mean_tokens']:.2f}x the resident tokens of none, "
                f"{plain['delayed'] - row['delayed']:,} fewer requests delayed, peak {row['peak_device_bytes']:,} bytes"
            )
    for row in rows:
        if row["too_large"] or row["preempted"]:
            found.append(f"{label(row, rows)}: {row['too_large']} requests too large, {row['preempted']} preempted")
        if row["stayed_hot"]:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(row["stayed_hot"].items()))
            found.append(f"{label(row, rows)}: stayed hot, by page and pass: {reasons}")
        if row["verified_pages"]:
            found.append(f"{label(row, rows)}: {row['verified_pages']:,} pages verified, all as promised")
    slowest = min(rows, key=lambda row: row["page_events_per_s"])
    events, speed = sum(row["page_events"] for row in rows), slowest["page_events_per_s"]
    memory = ", ".join(f"{count / 2**20:.0f}" for count in rows[-1]["rss_quarter_bytes"])
    found.append(f"{events:,} page events, {speed:,.0f} per second in the slowest run")
    found.append(f"memory of the process at each quarter of the last run and at its end: {memory} MiB")
    return found


def table(rows: list[dict]) -> list[str]:
    """The rows as a table."""
    head = (
        f"{'policy':<8}{'keep':>6}{'GiB':>7}{'pages':>8}{'slots':>8}{'delayed':>9}{'wait s':>9}{'p99 s':>9}"
        f"{'seqs':>6}{'tokens':>11}{'reused':>12}{'retired':>11}{'restored':>9}{'moved GB':>10}"
    )
    lines = [head]
    for found in rows:
        lines.append(
            f"{found['policy']:<8}{found['keep_tokens']:>6}{found['device_bytes'] / 2**30:>7.2f}{found['pages']:>8,}"
            f"{found['slots']:>8,}{found['delayed']:>9,}{found['wait_mean_s']:>9.2f}{found['wait_p99_s']:>9.2f}"
            f"{found['peak_sequences']:>6}{found['mean_tokens']:>11,.0f}{found['reused_tokens']:>12,}"
            f"{found['retired']:>11,}{found['restored']:>9,}{found['moved_bytes'] / 1e9:>10.1f}"
        )
    return lines
