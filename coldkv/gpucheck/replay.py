"""The golden checksum table, replayed on one backend."""

from types import ModuleType

from coldkv.gpucheck.clock import Deadline

FIELDS = ("input", "hot", "slots", "restored", "decoded")


def replay(backend, table: ModuleType, deadline: Deadline) -> dict:
    """{"rows", "of", "mismatches"}: every row of `table` (tests/golden_table.py) until the deadline, computed anew.

    A mismatch names codec, format, shape (head_dim, kv_heads, page_tokens) and the fields whose checksums differ;
    "input" among them means that the generated input differs, not the codec.
    """
    rows = [(codec, fmt, row) for codec, fmt in table.PAIRS for row in table.read(codec, fmt)]
    replayed, mismatches = 0, []
    for codec, fmt, expected in rows:
        if deadline.passed():
            break
        shape = (expected["head_dim"], expected["kv_heads"], expected["page_tokens"])
        options = (expected["options"], expected["share"]) if "options" in expected else ()
        found = table.row(backend, codec, fmt, shape, *options)
        wrong = [field for field in FIELDS if found[field] != expected[field]]
        if wrong:
            mismatches.append({"codec": codec, "format": fmt, "shape": list(shape), "fields": wrong})
        replayed += 1
    return {"rows": replayed, "of": len(rows), "mismatches": mismatches}
