"""The steps of the GPU check in order, each within its time; the file is written anew after every one."""

import sys
import time
from pathlib import Path

import torch

from coldkv._version import __version__
from coldkv.errors import ColdkvError
from coldkv.gpucheck import agreement, document, machine, replay, sanitizer, throughput
from coldkv.gpucheck.clock import Deadline
from coldkv.native_cuda import cuda_home
from coldkv.results import git_revision

AGREEMENT_SECONDS, TIMING_SECONDS = 60, 90


class Check:
    """One run: `engine` against the goldens of `table` and against `reference`, results at `path`.

    `budget_s` seconds for everything, `built_s` of which the build has taken. `on_gpu` False rehearses the same steps,
    smaller, without device copy and sanitizer.
    """

    def __init__(self, engine, reference, table, path: Path, budget_s: float, *, on_gpu: bool, built_s: float = 0.0):
        self.engine, self.reference, self.table, self.path, self.on_gpu = engine, reference, table, path, on_gpu
        self.deadline = Deadline(budget_s - built_s)
        self.doc = document.empty(self._run(budget_s, built_s))

    def _run(self, budget_s: float, built_s: float) -> dict:
        run = {
            "version": __version__,
            "git": git_revision(),
            "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "argv": sys.argv[1:],
            "backend": self.engine.name,
            "device": "cpu",
            "torch": torch.__version__,
            "built_by": self.engine._library.built_by,
            "build_seconds": round(built_s, 1),
            "budget_seconds": budget_s,
        }
        if self.on_gpu:
            card = torch.cuda.get_device_properties(torch.cuda.current_device())
            run |= {
                "device": card.name,
                "capability": f"{card.major}.{card.minor}",
                "multiprocessors": card.multi_processor_count,
                "l2_bytes": card.L2_cache_size,
                "memory_bytes": card.total_memory,
                "cuda": torch.version.cuda,
                "nvidia_smi_before": machine.nvidia_smi(),
            }
        return run

    def steps(self) -> list[tuple]:
        """(name, least seconds worth beginning with, work)."""
        steps = [("golden", 5, self._golden), ("agreement", 5, self._agreement), ("timing", 20, self._timing)]
        return steps + [("sanitizer", 10, self._sanitizer)] if self.on_gpu else steps

    def run(self) -> dict:
        """All steps; returns the document. A step that raises is a failure of its own, and the next one is tried."""
        for name, least, work in self.steps():
            if self.deadline.left() < least:
                self.doc["skipped"].append(f"{name}: {max(0, self.deadline.left()):.0f} s of the budget left")
                continue
            begun = self.deadline.used()
            try:
                work()
            except (ColdkvError, RuntimeError, OSError) as error:
                text = error.one_line() if isinstance(error, ColdkvError) else " ".join(str(error).split())[:400]
                self.doc["errors"][name] = f"{type(error).__name__}: {text}"
            self.doc["run"][f"{name}_seconds"] = round(self.deadline.used() - begun, 1)
            self._write()
            print(f"gpu_check: {name}: {self.line(name)}", file=sys.stderr, flush=True)
        self.doc["finished"] = True
        self.doc["ok"] = not document.failures(self.doc)
        self._write()
        return self.doc

    def _write(self) -> None:
        document.write(self.path, self.doc)

    def _golden(self) -> None:
        found = self.doc["golden"] = replay.replay(self.engine, self.table, self.deadline)
        if found["rows"] < found["of"]:
            self.doc["skipped"].append(f"golden: {found['of'] - found['rows']} of {found['of']} rows, no time left")

    def _agreement(self) -> None:
        self.doc["agreement"] = agreement.compare(
            self.engine, self.reference, self.deadline.part(AGREEMENT_SECONDS), self.shapes()
        )

    def shapes(self):
        return agreement.SHAPES if self.on_gpu else agreement.SMALL_SHAPES

    def _timing(self) -> None:
        until = self.deadline.part(TIMING_SECONDS)
        if self.on_gpu:
            self.doc["copy_gbps"] = throughput.device_copy_gbps()
            rows, skipped = throughput.measure(self.engine, until)
            self.doc["run"]["nvidia_smi_after"] = machine.nvidia_smi()
        else:
            rows, skipped = throughput.measure(self.engine, until, cases=(("int8", 64), ("nvfp4", 64)), repeat=2)
        self.doc["rows"], self.doc["skipped"] = rows, self.doc["skipped"] + skipped

    def _sanitizer(self) -> None:
        self.doc["sanitizer"] = sanitizer.run(sanitizer.find(cuda_home()), self.deadline)

    def line(self, step: str) -> str:
        """What a step came to, in words."""
        if step in self.doc["errors"]:
            return self.doc["errors"][step]
        if step == "timing":
            copy = self.doc["copy_gbps"]
            return f"{len(self.doc['rows'])} operations" + (f", device copy {copy:.0f} GB/s" if copy else "")
        if step == "sanitizer":
            return ", ".join(f"{tool} {result['outcome']}" for tool, result in self.doc["sanitizer"].items())
        part = self.doc[step]
        done = f"{part['rows']} of {part['of']} rows" if "of" in part else f"{part['cases']} cases"
        return f"{done}, {len(part['mismatches'])} mismatches"
