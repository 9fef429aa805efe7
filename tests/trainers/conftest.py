import pytest
from grpo_parts import make_trainer


@pytest.fixture(scope="session")
def make(nano_folders, tmp_path_factory):
    """Makes GRPO trainers on nano models, each with a folder of its own; see `make_trainer`."""

    def made(arch="qwen2", **settings):
        return make_trainer(nano_folders[arch], tmp_path_factory.mktemp("run"), **settings)

    return made
