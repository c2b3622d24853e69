"""What `scripts/gpu_check` does on a machine with a GPU: goldens, agreement with the host, sanitizer, throughput.

One file per step, `run.py` for their order and the time they may take, `document.py` for the file they leave.
"""
