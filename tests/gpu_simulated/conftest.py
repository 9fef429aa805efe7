"""Fixtures of whole runs on the simulated GPU."""

from gpu_runs import on_gpu

__all__ = ["on_gpu"]
