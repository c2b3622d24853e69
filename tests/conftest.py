"""Put the helper modules beside the tests on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def pytest_terminal_summary(terminalreporter):
    """What ran through the CUDA-on-CPU shim, if anything did."""
    if module := sys.modules.get("test_shim"):
        if module.shim_backend.cache_info().currsize:
            terminalreporter.write_line(module.shim_backend().shim.summary())
