"""pandas frames of result files, and expressions over them. Imports pandas."""

import ast

import pandas as pd

from coldkv.errors import InputError
from coldkv.evaluation.results import ROW_TYPES as EVAL_TYPES
from coldkv.report.load import ResultFile
from coldkv.results import ROW_TYPES


def rows_frame(files: list[ResultFile]) -> pd.DataFrame:
    """All rows of all files; columns as in the schema, then `file`. Missing numbers are NaN."""
    frame = pd.DataFrame([row | {"file": file.path} for file in files for row in file.rows])
    for column, (kind, _) in (ROW_TYPES | EVAL_TYPES).items():
        if kind is float and column in frame:
            frame[column] = frame[column].astype("float64")
    return frame


def summary_frame(files: list[ResultFile]) -> pd.DataFrame:
    """One line per file and codec. Empty if there are only bench files."""
    lines = [
        line | {"left_hot": _joined(line["left_hot"]), "file": file.path}
        for file in files
        if file.kind in ("results", "eval")
        for line in file.doc["summary"]["codecs"]
    ]
    frame = pd.DataFrame(lines)
    for column in frame.columns:
        if frame[column].isna().all():
            frame[column] = frame[column].astype("float64")
    return frame


def _joined(names: list[str] | str) -> str:
    return names if isinstance(names, str) else ",".join(names)


def select(frame: pd.DataFrame, expression: str) -> pd.DataFrame:
    """The rows of `frame` for which a pandas query is true.

    Raises InputError for an unknown column, bad syntax, or an expression that is not a condition on rows.
    """
    names = ", ".join(frame.columns)
    _only_conditions(expression, names)
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


# What a gate needs. pandas would also follow attributes and calls, and so run whatever code a gate's text holds.
_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.Invert, ast.BinOp,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BitAnd, ast.BitOr, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE,
    ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Name, ast.Load, ast.Constant, ast.List, ast.Tuple,
)  # fmt: skip


def _only_conditions(expression: str, names: str) -> None:
    """Raises InputError unless the text is made of columns, constants, comparisons, and/or/not and + - * /."""
    where = f"--fail-on {expression!r}"
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if "@" in expression:
            raise InputError(f"{where}: '@' is not allowed, only columns: {names}") from None
        if isinstance(error, SyntaxError) and _is_statement(expression):
            raise InputError(f'{where}: expected a condition such as "nmse_hot > 0.02", found a statement') from None
        detail = getattr(error, "msg", None) or type(error).__name__
        raise InputError(f"{where}: not a condition pandas understands: {detail}") from None
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            what = type(node).__name__.lower()
            raise InputError(
                f"{where}: expected columns, numbers, texts and comparisons, found {what}; columns: {names}"
            )
        if isinstance(node, ast.BinOp) and any(
            isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (node.left, node.right)
        ):
            raise InputError(f"{where}: expected arithmetic on numbers, found a text")


def _is_statement(expression: str) -> bool:
    try:
        ast.parse(expression.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


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
