"""Fixtures of plans."""

import gc

import pytest


@pytest.fixture(autouse=True)
def few_objects():
    """Plans collect garbage, which takes long where libraries have left many objects."""
    gc.freeze()
    yield
    gc.unfreeze()
