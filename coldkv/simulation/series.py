"""Time series of the runs: written as CSV while they run, read back to be drawn."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from coldkv.atomic import atomic_path
from coldkv.errors import InputError, ToolError
from coldkv.simulation.engine import Sample

COLUMNS = ["run", "policy", *(field.name for field in fields(Sample))]
SUFFIXES = (".png", ".svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")  # as report/plot.py
PANELS = (("tokens", "tokens of running sequences"), ("waiting", "requests waiting"), ("device_bytes", "device GiB"))


class SeriesWriter:
    """Rows of COLUMNS into a text file object; `run` counts the runs from 0."""

    def __init__(self, file, policies: Sequence[str]):
        self.policies = policies
        self._writer = csv.writer(file, lineterminator="\n")
        self._writer.writerow(COLUMNS)

    def __call__(self, run: int, sample: Sample) -> None:
        values = asdict(sample)
        values["time_s"] = f"{sample.time_s:.3f}"
        self._writer.writerow([run, self.policies[run], *values.values()])


def check_plot(path: str) -> None:
    """InputError for a name that is neither PNG nor SVG, ToolError without matplotlib."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise InputError(f"--plot {path}: expected a name ending in .png or .svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ToolError(f"--plot: matplotlib cannot be imported ({error})", hint="pip install 'coldkv[plot]'") from None


def draw(series: str, path: str, labels: Sequence[str]) -> None:
    """Draw the CSV file `series` into `path`: tokens, queue and device bytes over time, a line per run."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: list[dict[str, list[float]]] = [{name: [] for name in COLUMNS} for _ in labels]
    with open(series, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name in ("time_s", *(name for name, _ in PANELS)):
                lines[int(row["run"])][name].append(float(row[name]))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "coldkv"}):
        figure = Figure(figsize=(9, 8), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(PANELS), 1, sharex=True)
        for axis, (name, what) in zip(axes, PANELS, strict=True):
            for number, (line, label) in enumerate(zip(lines, labels, strict=True)):
                unit = 2**30 if name == "device_bytes" else 1
                values = [value / unit for value in line[name]]
                style = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.2}
                axis.step(line["time_s"], values, where="post", label=label, **style)
            axis.set_ylabel(what)
            axis.set_ylim(bottom=0)
            axis.grid(True, color="#dddddd", linewidth=0.6)
        axes[-1].set_xlabel("seconds of the trace")
        axes[0].legend(fontsize=8, frameon=False, loc="best")
        kind = Path(path).suffix.lower()[1:]
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
