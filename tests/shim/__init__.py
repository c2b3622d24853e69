"""Runs the CUDA kernels of kernels/ on the CPU: every thread is a fiber, every access is checked (runtime/cuda_on_cpu.h).

`backend.py` is the backend over them, `cases.py` what the tests run, `primitives.cu` and `faults/` kernels that test the
shim itself.
"""
