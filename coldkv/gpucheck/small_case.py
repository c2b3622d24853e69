"""A small run of every kernel, for compute-sanitizer: `python -m coldkv.gpucheck.small_case`. Prints one JSON line.

Every buffer is its own allocation, so that an access past its end is one that the sanitizer sees.
"""

import json
import os
import sys


def main() -> int:
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    from coldkv.backends import CpuBackend, CudaBackend
    from coldkv.gpucheck.agreement import SMALL_SHAPES, compare
    from coldkv.gpucheck.clock import Deadline

    result = compare(CudaBackend(), CpuBackend(), Deadline(1e9), SMALL_SHAPES)
    print(json.dumps(result))
    return 1 if result["mismatches"] else 0


if __name__ == "__main__":
    sys.exit(main())
