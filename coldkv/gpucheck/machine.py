"""What the card, its driver and its clocks are."""

import shutil
import subprocess

CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")
QUERY = ("driver_version", *CLOCKS, "power.limit", "temperature.gpu")


def no_gpu() -> str | None:
    """Why nothing can run here, in one line; None where torch has a CUDA device."""
    try:
        import torch
    except ImportError as error:
        return f"no GPU check: this Python has no torch ({error})"
    if torch.cuda.is_available():
        return None
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"no GPU check: torch {torch.__version__}, {build}, finds no CUDA device here"


def nvidia_smi() -> dict:
    """Driver, clocks in MHz, power limit in W, temperature in C of the first card; {} where nvidia-smi says nothing."""
    if not shutil.which("nvidia-smi"):
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")] if done.stdout.strip() else []
    if done.returncode or len(values) != len(QUERY):
        return {}
    return {name: value for name, value in zip(QUERY, values, strict=True) if "N/A" not in value}
