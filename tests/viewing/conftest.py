import pytest
from run_folders import make_folder


@pytest.fixture
def folder(tmp_path):
    """A run that has just begun."""
    return make_folder(tmp_path / "run")
