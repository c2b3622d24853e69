"""`coldkv report`: result files as a table, JSON, CSV, Markdown or HTML, and the regression gate."""

import json
import sys

import click

from coldkv.errors import GateFailure, InputError

ROW_IDENTITY = ("file", "dump", "layer", "plane", "head", "model", "text", "tier", "op", "codec")
FORMATS = ("table", "json", "csv", "md", "html")


@click.command("report")
@click.argument("results", nargs=-1, required=True, metavar="RESULTS...")
@click.option("--format", "fmt", type=click.Choice(FORMATS), default="table", show_default=True, help="Output format.")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option(
    "--rows/--summary",
    "with_rows",
    default=None,
    help="Show every measured plane (eval: every text), or one line per codec. Default: rows for csv, the summary "
    "elsewhere; json always holds both.",
)
@click.option(
    "--baseline",
    metavar="FILE",
    help="Compare with this result file, row by row: exit 1 if any metric is worse or a row is lost.",
)
@click.option(
    "--fail-on",
    "expressions",
    metavar="EXPR",
    multiple=True,
    help="Exit 1 if any row matches, e.g. \"codec == 'e2m1-g64' and nmse_hot > 0.02\". "
    "With the prefix summary: it looks at the lines per codec. Repeatable.",
)
@click.option(
    "--plot",
    metavar="FILE",
    help="Also draw bits per element against KL and NMSE into this .png or .svg. Needs pip install 'coldkv[plot]'.",
)
def command(results, fmt, as_json, with_rows, baseline, expressions, plot) -> None:
    """Show result files, and gate on them.

    RESULTS are files written by --results of `measure`, `eval` or `bench`. Figures are recomputed from the rows.
    """
    from coldkv.report.load import load

    fmt = "json" if as_json else fmt
    files = [load(path) for path in results]
    if plot:
        from coldkv.atomic import check_output
        from coldkv.report.plot import check_plot

        check_output(plot, *results, baseline)
        check_plot(plot, files)
    comparison = _compare(files, baseline) if baseline else None
    gates = [_gate(files, expression) for expression in expressions]
    _show(files, fmt, with_rows, comparison, gates)
    if plot:
        from coldkv.report.plot import write_plot

        write_plot(plot, files)

    failures = []
    if comparison:
        for line in comparison.lines():
            click.echo(line, err=True)
        if not comparison.ok:
            failures.append(comparison.failure())
    for gate in gates:
        for line in gate["warnings"]:
            click.echo(f"warning: --fail-on {gate['expression']!r}: {line}", err=True)
        if gate["rows"]:
            failures.append(f"--fail-on {gate['expression']!r}: {len(gate['rows'])} rows match, first {gate['first']}")
    if failures:
        raise GateFailure("; ".join(failures))


def _compare(files, path):
    from coldkv.report import bench, compare, quality
    from coldkv.report.load import load

    base = load(path)
    other = [file for file in files if file.kind != base.kind]
    if other:
        raise InputError(f"{other[0].path}: is a {other[0].kind} file, the baseline {path} is a {base.kind} file")
    if base.kind == "bench":
        return bench.compare([row for file in files for row in file.rows], base.rows, path)
    if base.kind == "eval":
        return quality.compare([file.doc for file in files], base.doc, path)
    return compare.compare([file.doc for file in files], base.doc, path)


def _gate(files, expression) -> dict:
    from coldkv.report import frame

    target, _, condition = expression.partition(":")
    if target not in ("rows", "summary"):
        target, condition = "rows", expression
    table = frame.rows_frame(files) if target == "rows" else frame.summary_frame(files)
    found = frame.select(table, condition)
    rows = json.loads(found.to_json(orient="records", double_precision=15))
    identity = ROW_IDENTITY if target == "rows" else ("file", "codec")
    mentioned = [column for column in table.columns if column in condition and column not in identity]
    first = ""
    if rows:
        names = [*identity, *mentioned]
        first = ", ".join(f"{name} {rows[0][name]}" for name in names if rows[0].get(name) is not None)
    warnings = frame.never_matching(table, condition)
    return {"expression": expression, "rows": rows, "first": first, "warnings": warnings}


def _show(files, fmt, with_rows, comparison, gates) -> None:
    if fmt == "json":
        out = {
            "schema": "coldkv.report/1",
            "ok": (comparison is None or comparison.ok) and not any(gate["rows"] for gate in gates),
            "files": [_file_json(file) for file in files],
            "baseline": comparison.to_dict() if comparison else None,
            "fail_on": [{"expression": gate["expression"], "rows": gate["rows"]} for gate in gates],
        }
        click.echo(json.dumps(out, indent=1, allow_nan=False))
        return
    if fmt == "csv":
        from coldkv.report import frame

        rows = with_rows is None or with_rows
        table = frame.rows_frame(files) if rows else frame.summary_frame(files)
        click.echo(table.to_csv(index=False), nl=False)
        return

    from coldkv.report import render, sections

    pages = [sections.page(file, with_rows=bool(with_rows)) for file in files]
    if fmt == "md":
        click.echo(render.markdown(pages))
    elif fmt == "html":
        click.echo(render.html_page(pages))
    elif sys.stdout is not None and sys.stdout.isatty():
        render.rich_tables(pages)
    else:
        click.echo(render.plain(pages))


def _file_json(file) -> dict:
    from coldkv.report.sections import notes_of

    found = notes_of(file)
    return {"path": file.path, **file.doc, "notes": [{"level": note.level, "text": note.text} for note in found]}
