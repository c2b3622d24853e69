"""The golden checksum table, replayed on one backend."""

from types import ModuleType

from coldkv.errors import InputError
from coldkv.gpucheck.clock import Deadline


def replay(backend, table: ModuleType, deadline: Deadline) -> dict:
    """{"rows", "of", "mismatches"}: every row of `table` (tests/golden_table.py) until the deadline, computed anew.

    A mismatch names codec, format, shape (head_dim, kv_heads, page_tokens) and the fields whose checksums differ;
    "input" among them means that the generated input differs, not the codec. Where a reader refuses what was written
    there are no checksums, and `refused` says why.
    """
    rows = [(codec, fmt, row) for codec, fmt in table.PAIRS for row in table.read(codec, fmt)]
    replayed, mismatches = 0, []
    for codec, fmt, expected in rows:
        if deadline.passed():
            break
        shape = (expected["head_dim"], expected["kv_heads"], expected["page_tokens"])
        options = (expected["options"], expected["share"]) if "options" in expected else ()
        where = {"codec": codec, "format": fmt, "shape": list(shape)}
        replayed += 1
        try:
            found = table.row(backend, codec, fmt, shape, *options)
        except InputError as error:
            mismatches.append(where | {"fields": [], "refused": error.one_line()})
            continue
        wrong = [field for field in expected if found.get(field) != expected[field]]
        if wrong:
            mismatches.append(where | {"fields": wrong})
    return {"rows": replayed, "of": len(rows), "mismatches": mismatches}
