"""Inference engines: the contract (`base`), a file or package per backend, and pools of engines elsewhere."""
