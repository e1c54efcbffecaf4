"""One command for a device: does all of it run here, is it right, and how fast (`launch/gpu_check.py`, docs/gpu.md)."""
