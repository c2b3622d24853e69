"""Runs the CUDA kernels of kernels/ on the CPU: every thread a fiber, every access checked (runtime/cuda_on_cpu.h).

`backend.py` is the backend over them, `cases.py` what the tests run; `primitives.cu` and `faults/` are kernels that
test the shim itself.
"""
