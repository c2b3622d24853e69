"""pandas frames of result files, and expressions over them. Imports pandas."""

import ast

import pandas as pd

from coldkv.errors import InputError
from coldkv.report.load import ResultFile
from coldkv.results import ROW_TYPES


def rows_frame(files: list[ResultFile]) -> pd.DataFrame:
    """All rows of all files; columns as in the schema, then `file`. Missing numbers are NaN."""
    frame = pd.DataFrame([row | {"file": file.path} for file in files for row in file.rows])
    for column, (kind, _) in ROW_TYPES.items():
        if kind is float and column in frame:
            frame[column] = frame[column].astype("float64")
    return frame


def summary_frame(files: list[ResultFile]) -> pd.DataFrame:
    """One line per file and codec. Empty if there are only bench files."""
    lines = [
        line | {"left_hot": ",".join(line["left_hot"]), "file": file.path}
        for file in files
        if file.kind == "results"
        for line in file.doc["summary"]["codecs"]
    ]
    frame = pd.DataFrame(lines)
    for column in frame.columns:
        if frame[column].isna().all():
            frame[column] = frame[column].astype("float64")
    return frame


def select(frame: pd.DataFrame, expression: str) -> pd.DataFrame:
    """The rows of `frame` for which a pandas query is true.

    Raises InputError for an unknown column, bad syntax, or an expression that is not a condition on rows.
    """
    names = ", ".join(frame.columns)
    if "@" in expression:
        raise InputError(f"--fail-on {expression!r}: '@' is not allowed, only columns: {names}")
    try:
        mask = frame.eval(expression, engine="python")
    except pd.errors.UndefinedVariableError as error:
        raise InputError(f"--fail-on {expression!r}: {error}; columns: {names}") from None
    except Exception as error:  # pandas lets through whatever its parser or numpy raise
        detail = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"--fail-on {expression!r}: not a condition pandas understands: {detail}") from None
    if not isinstance(mask, pd.Series) or mask.dtype != bool:
        raise InputError(f'--fail-on {expression!r}: expected a condition such as "nmse_hot > 0.02", found a value')
    tree = ast.walk(ast.parse(expression, mode="eval")) if _parses(expression) else ()
    used = {node.id for node in tree if isinstance(node, ast.Name)}
    for name in sorted(used & set(frame.columns)):
        if len(frame) and frame[name].isna().all():
            raise InputError(
                f"--fail-on {expression!r}: column {name} has no value in any row, so the gate could never fail",
                hint="logit_rmse needs queries in the dump" if name == "logit_rmse" else None,
            )
    return frame[mask]


def never_matching(frame: pd.DataFrame, expression: str) -> list[str]:
    """Comparisons `column == 'text'` whose text is nowhere in the column: a gate that cannot fail, usually a typo."""
    out = []
    for node in ast.walk(ast.parse(expression, mode="eval")) if _parses(expression) else ():
        match node:
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[ast.Constant(value=str(text))]):
                if name in frame and not (frame[name] == text).any():
                    out.append(f"no row has {name} {text!r}")
    return out


def _parses(expression: str) -> bool:
    try:
        ast.parse(expression, mode="eval")
    except SyntaxError:
        return False
    return True
