"""Rate against quality as a picture: bits per element against KL (eval files) and NMSE (measure files)."""

import os
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from coldkv.atomic import atomic_path
from coldkv.errors import InputError, ToolError
from coldkv.report.load import ResultFile

SUFFIXES = (".png", ".svg")
# Okabe and Ito's palette without yellow, which is lost on white: told apart with every common colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX*"
LINES = ("-", "--", "-.", ":")
LOWEST = 0.5  # of the smallest figure: where a figure of 0 is drawn, which a log axis cannot show


@dataclass(frozen=True)
class Point:
    """One codec in one place of measurement; `label` with its options, `curve`: what it is connected with."""

    label: str
    curve: str  # the codec's id
    place: str  # text, or dump and tier
    bits: float
    error: float


def check_plot(path: str | os.PathLike, files: list[ResultFile]) -> None:
    """Raises InputError for a name that is neither PNG nor SVG or files without anything to draw, ToolError without
    matplotlib."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise InputError(f"--plot {path}: expected a name ending in .png or .svg")
    if not kl_points(files) and not nmse_points(files):
        raise InputError("--plot: expected files of eval or measure with bits per element, found none")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ToolError(f"--plot: matplotlib cannot be imported ({error})", hint="pip install 'coldkv[plot]'") from None


def kl_points(files: list[ResultFile]) -> list[Point]:
    """Mean KL of every eval row."""
    found = [
        (file, Point(row["codec"], _id(row["codec"]), row["text"], row["bits_per_element"], row["kl_mean"]))
        for file in files
        if file.kind == "eval"
        for row in file.rows
        if row["bits_per_element"] is not None
    ]
    return _told_apart(found)


def nmse_points(files: list[ResultFile]) -> list[Point]:
    """NMSE against the hot tier of every codec and tier of measure files, over the planes that were packed."""
    found = []
    for file in files:
        if file.kind == "results":
            dumps = ", ".join(file.doc["run"]["dump_sha256"])
            for line in file.doc["summary"]["tiers"]:
                if line["bits_per_element"] is not None and line["nmse_hot"] is not None:
                    place = f"{dumps}, {line['tier']}"
                    bits, error = line["bits_per_element"], line["nmse_hot"]
                    found.append((file, Point(line["codec"], _id(line["codec"]), place, bits, error)))
    return _told_apart(found)


def _id(label: str) -> str:
    return label.partition(":")[0]


def _told_apart(found: list[tuple[ResultFile, Point]]) -> list[Point]:
    """The points; where two files measured in the same place, the place names the file too."""
    files = defaultdict(set)
    for file, point in found:
        files[point.place].add(file.path)
    return [
        replace(point, place=f"{file.path}: {point.place}") if len(files[point.place]) > 1 else point
        for file, point in found
    ]


def write_plot(path: str | os.PathLike, files: list[ResultFile]) -> None:
    """Draw one panel per kind of file into `path`, PNG or SVG by suffix, atomically. Errors as `check_plot`."""
    check_plot(path, files)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [
        (points, what)
        for points, what in (
            (kl_points(files), "mean KL to the run without cold pages (nats)"),
            (nmse_points(files), "NMSE to the hot tier"),
        )
        if points
    ]
    codecs = list(dict.fromkeys(point.curve for points, _ in panels for point in points))
    # text stays text in SVG, so that it can be searched and copied
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "coldkv"}):
        figure = Figure(figsize=(7.5 * len(panels), 5.5), layout="constrained")
        FigureCanvasAgg(figure)
        for number, (points, what) in enumerate(panels, start=1):
            _panel(figure.add_subplot(1, len(panels), number), points, what, codecs)
        kind = Path(path).suffix.lower()[1:]
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)


def _panel(axes, points: list[Point], what: str, codecs: list[str]) -> None:
    positive = [point.error for point in points if point.error > 0]
    lowest = LOWEST * min(positive, default=1.0)
    places = list(dict.fromkeys(point.place for point in points))
    curves: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        curves[point.curve, point.place].append(point)
    named: set[str] = set()
    for (codec, place), members in curves.items():
        members.sort(key=lambda point: point.bits)
        number = codecs.index(codec)
        axes.plot(
            [point.bits for point in members],
            [point.error or lowest for point in members],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[(number if len(places) == 1 else places.index(place)) % len(MARKERS)],
            linestyle=LINES[places.index(place) % len(LINES)],
            fillstyle="full" if all(point.error for point in members) else "none",
            label=codec if len(places) == 1 else f"{codec}, {place}",
        )
        for point in members:
            if point.label in named:
                continue  # once is enough to read a curve, and labels of other texts would lie over each other
            named.add(point.label)
            text = point.label if point.error else f"{point.label} (exact: 0)"
            axes.annotate(
                text, (point.bits, point.error or lowest), xytext=(5, 4), textcoords="offset points", fontsize=7,
                color=COLOURS[number % len(COLOURS)], parse_math=False,
            )  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlabel("bits per element, from real bytes")
    axes.set_ylabel(what)
    axes.set_xlim(left=0, right=1.25 * max(point.bits for point in points))
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
    if len(places) == 1:
        axes.set_title(places[0], fontsize=10)
