"""Inference engines: one contract (`base`), one file per backend; only that file imports its backend."""
