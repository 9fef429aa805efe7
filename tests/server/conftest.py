"""A server that tests share: a tied model, with a key and a weights folder."""

import pytest
from server_parts import KEY, LocalServer, scripted_service

from swift.rollout.server.access import Lease


@pytest.fixture(scope="session")
def weights_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="session")
def server(nano_folders, weights_folder):
    """qwen2 nano, whose head is its embedding, in this process."""
    one = LocalServer(nano_folders["qwen2"], key=KEY, weights_folder=weights_folder)
    yield one
    one.stop()


@pytest.fixture
def http(server):
    """A client with the key."""
    with server.client() as client:
        yield client


@pytest.fixture
def made(tmp_path):
    """Makes what the routes share, over scripted engines."""
    services = []

    def make(*engines, lifetime_s=60.0, **settings):
        services.append(scripted_service(engines, tmp_path, **settings))
        services[-1].lease = Lease(lifetime_s)
        return services[-1]

    yield make
    for service in services:
        service.close()


@pytest.fixture
def engine(server):
    """A trainer's end; the lease is given back."""
    one = server.engine()
    yield one
    one.close()
