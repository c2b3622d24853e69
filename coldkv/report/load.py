"""Result files of every kind that `coldkv report` reads, told apart by their `schema`. Torch-free."""

import os
from dataclasses import dataclass

from coldkv import results
from coldkv.errors import InputError
from coldkv.evaluation import results as evaluation
from coldkv.report import bench


@dataclass(frozen=True)
class ResultFile:
    """One file: `kind` is "results", "eval" or "bench", `doc` the validated document.

    Its summary is recomputed from the rows.
    """

    path: str
    kind: str
    doc: dict

    @property
    def rows(self) -> list[dict]:
        return self.doc["rows"]


def load(path: str | os.PathLike) -> ResultFile:
    """Read and validate one file. Raises InputError naming the file, or OSError."""
    doc = results.read_json(path)
    schema = doc.get("schema")
    if schema == results.SCHEMA:
        results.validate(doc, str(path))
        # The rows are the measurement; a stored summary may be older than the arithmetic, or edited.
        doc["summary"] = results.summarize(doc["rows"], doc["run"])
        return ResultFile(str(path), "results", doc)
    if schema == evaluation.SCHEMA:
        evaluation.validate(doc, str(path))
        doc["summary"] = evaluation.summarize(doc["rows"])
        return ResultFile(str(path), "eval", doc)
    if schema == bench.SCHEMA:
        bench.validate(doc, str(path))
        return ResultFile(str(path), "bench", doc)
    known = f"{results.SCHEMA}, {evaluation.SCHEMA} or {bench.SCHEMA}"
    raise InputError(f"{path}: schema: expected {known}, found {schema!r}; give a file written by --results")
