import pytest
from desk import Desk

from swift.models.tiny import build_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny", size="nano")


@pytest.fixture
def desk(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launch = "NPROC_PER_NODE NNODES NODE_RANK MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
    for name in [*launch.split(), "SWIFT_DEBUG", "USE_HF"]:
        monkeypatch.delenv(name, raising=False)
    return Desk(tmp_path, tiny_model)
