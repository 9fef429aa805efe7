"""Each backend as a fixture; the cases of one run after the other on the same engine."""

from __future__ import annotations

import pytest
from actor_parts import family, scripted_engine_in_actor
from conformance_checks import LONG, likeliest
from conformance_parts import BACKENDS, Subject, missing
from engine_traces import shared_cluster
from oracle import load, with_noise
from processes import wait_for


@pytest.fixture(scope="session")
def engine_folders(tmp_path_factory):
    """Models whose norms and biases are no ones and zeros, so that every kind of weight shows."""
    from swift.models.tiny import build_tiny

    folders = {}
    for arch in ("qwen2", "llama"):
        folder = build_tiny(tmp_path_factory.mktemp("engines") / arch, arch=arch, size="tiny", init_std=0.1)
        with_noise(load(folder), seed=5, scale=0.02).save_pretrained(folder)
        folders[arch] = folder
    return folders


def marks_of(backend, case):
    """Starts and ends of actors take long: `test_actor_weights.py` and `test_actor_faults.py` have short ones."""
    if backend.name == "transformers":
        return []
    long = backend.name in ("actor-transformers", "actor-vllm", "pool")
    return [pytest.mark.slow, *([pytest.mark.long] if long else [])]


def pytest_generate_tests(metafunc):
    """Every case runs on the engines of this process, the cases marked `transport` on all backends."""
    if "shared_subject" not in metafunc.fixturenames:
        return
    case = metafunc.function.__name__.removeprefix("test_")
    everywhere = getattr(metafunc.function, "transport", False)
    chosen = [
        pytest.param(backend, id=backend.name, marks=marks_of(backend, case))
        for backend in BACKENDS
        if (everywhere or backend.place == "here")
        # the first case says which backends cannot run here
        if case.startswith("c01") or missing(backend) is None
    ]
    metafunc.parametrize("shared_subject", chosen, indirect=True, scope="session")


@pytest.fixture(scope="session")
def shared_subject(request, engine_folders, tmp_path_factory):
    """Each backend in turn, all cases of one after the other."""
    backend = request.param
    why = missing(backend)
    if why is not None:
        pytest.skip(f"{backend.name}: {why}")
    one = Subject(backend, engine_folders[backend.arch], tmp_path_factory.mktemp("logs"))
    yield one
    one.close()


@pytest.fixture
def subject(shared_subject):
    """The backend, with the weights it was built with."""
    yield shared_subject
    shared_subject.make_whole()


@pytest.fixture(scope="session")
def endless(shared_subject):
    """A prompt whose likeliest completion of LONG tokens has no end token."""
    model, eos = shared_subject.model, shared_subject.eos
    for start in range(40, 80):
        prompt = [start, 41, 42, 43]
        if eos not in likeliest(model, prompt, LONG, until=eos):
            return prompt
    pytest.fail("every greedy completion ends; change the model")


@pytest.fixture(scope="session")
def ray_cluster():
    return shared_cluster()


@pytest.fixture
def start(tmp_path):
    """Makes scripted engines in actors and ends them."""
    made = []

    def make(**kwargs):
        made.append(scripted_engine_in_actor(tmp_path, **kwargs))
        return made[-1]

    yield make
    for worker in made:
        worker.close()
    assert wait_for(lambda: not family()), family()
