"""A server that tests share: a tied model, with a key and a weights folder."""

import pytest
from server_parts import KEY, Server


@pytest.fixture(scope="session")
def weights_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(nano_folders, weights_folder, tmp_path_factory):
    """qwen2 nano, whose head is its embedding."""
    one = Server(
        nano_folders["qwen2"],
        tmp_path_factory.mktemp("server"),
        "--weights_folder",
        str(weights_folder),
        "--vllm_max_model_len",
        "512",
        key=KEY,
    )
    yield one
    assert one.stop() == 0, one.text()[-3000:]
    assert one.left() == []


@pytest.fixture
def http(server):
    """A client with the key."""
    with server.client() as client:
        yield client


@pytest.fixture
def engine(server):
    """A trainer's end; the lease is given back."""
    one = server.engine()
    yield one
    one.close()
