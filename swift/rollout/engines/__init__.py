"""Inference engines: one contract (`base`), one file or package per backend; only it imports its backend."""
