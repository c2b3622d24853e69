"""Pages as text: aligned columns, rich tables on a terminal, Markdown, HTML. No renderer knows what a column means."""

import html

from coldkv.report.sections import Page, Section


def plain(pages: list[Page]) -> str:
    """Aligned text for pipes and logs; lines are as long as they need to be."""
    blocks = []
    for page in pages:
        facts = "\n".join(f"  {name:<8} {value}" for name, value in page.facts)
        blocks.append(page.title + ("\n" + facts if facts else ""))
        blocks += [f"{section.title}\n{_aligned(section)}" for section in page.sections]
        if page.notes:
            blocks.append("\n".join(f"{note.level}: {note.text}" for note in page.notes))
    return "\n\n".join(blocks)


def rich_tables(pages: list[Page]) -> None:
    """Print to a terminal on stdout; rich itself obeys NO_COLOR and the terminal's width."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for page in pages:
        console.print(page.title, style="bold", markup=False)
        for name, value in page.facts:
            console.print(f"  {name:<8} {value}", markup=False)
        for section in page.sections:
            table = Table(title=section.title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
            for column in section.columns:
                left = column in section.left
                table.add_column(column, justify="left" if left else "right", overflow="fold")
            for row in section.rows:
                table.add_row(*(cell.replace("[", "\\[") for cell in row))
            console.print(table)
        for note in page.notes:
            style = "yellow" if note.level == "warning" else "dim"
            console.print(f"{note.level}: {note.text}", style=style, markup=False)


def markdown(pages: list[Page], *, level: int = 2) -> str:
    """GitHub-flavoured Markdown; headings start at `level`."""
    blocks = []
    for page in pages:
        blocks.append(f"{'#' * level} {page.title}")
        if page.facts:
            blocks.append("\n".join(f"- {name}: {_md(value)}" for name, value in page.facts))
        for section in page.sections:
            rule = [":--" if column in section.left else "--:" for column in section.columns]
            lines = [section.columns, rule, *section.rows]
            table = "\n".join("| " + " | ".join(_md(cell) for cell in line) + " |" for line in lines)
            blocks += [f"**{section.title}**", table]
        blocks += [f"{note.level.capitalize()}: {_md(note.text)}." for note in page.notes]
    return "\n\n".join(blocks)


def html_page(pages: list[Page]) -> str:
    """One self-contained HTML document."""
    body = []
    for page in pages:
        body.append(f"<h1>{html.escape(page.title)}</h1>")
        if page.facts:
            items = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in page.facts)
            body.append(f"<dl>{items}</dl>")
        for section in page.sections:
            body.append(f"<h2>{html.escape(section.title)}</h2>\n{_html_table(section)}")
        body += [f'<p class="{note.level}">{note.level}: {html.escape(note.text)}</p>' for note in page.notes]
    style = (
        "body{font:15px system-ui,sans-serif;margin:2em;max-width:80em}table{border-collapse:collapse}"
        "td,th{padding:.25em .7em;border-bottom:1px solid #ccc;text-align:right}td.l,th.l{text-align:left}"
        "dl{display:grid;grid-template-columns:max-content auto;gap:.2em 1em}dd{margin:0}.warning{color:#a40}"
    )
    head = f'<meta charset="utf-8"><title>coldkv report</title><style>{style}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>"


def _aligned(section: Section) -> str:
    lines = [section.columns, *section.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(section.columns))]
    left = [column in section.left for column in section.columns]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in lines
    )


def _md(cell: str) -> str:
    return cell.replace("|", "\\|")


def _html_table(section: Section) -> str:
    def line(tag: str, cells: list[str]) -> str:
        marks = [' class="l"' if column in section.left else "" for column in section.columns]
        inner = "".join(f"<{tag}{mark}>{html.escape(c)}</{tag}>" for c, mark in zip(cells, marks, strict=True))
        return f"<tr>{inner}</tr>"

    rows = "\n".join(line("td", row) for row in section.rows)
    return f"<table>\n<thead>{line('th', section.columns)}</thead>\n<tbody>\n{rows}\n</tbody></table>"
