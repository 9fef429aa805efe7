"""The parity check against a real vLLM in this process: it passes as it is, and three planted faults are refused."""

from __future__ import annotations

import os

import pytest
import torch
from parity_engines import Alone, load, plain, publisher_for, scorer, some_prompts

from swift.errors import ResourceError
from swift.models.tiny import build_tiny
from swift.rollout.engines.spec import EngineSpec, build_engine
from swift.rollout.parity import ParityCheck
from swift.rollout.weight_sync.base import Ack, Bucket, WeightUpdate

pytestmark = pytest.mark.slow
ENDS = (258, 256)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model with a tied head, and vLLM on it."""
    from swift.rollout.engines.vllm import require

    try:
        require()
    except ResourceError as error:
        pytest.skip(str(error))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    folder = build_tiny(tmp_path_factory.mktemp("model"), "qwen2", "tiny")
    engine = build_engine(
        EngineSpec(
            backend="vllm",
            model=str(folder),
            eos_token_ids=ENDS,
            max_model_len=256,
            max_num_seqs=32,
            enforce_eager=True,
        )
    )
    yield load(folder), engine
    engine.close()


@pytest.fixture
def check(served):
    model, engine = served
    sampling = plain(temperature=0.9)
    publisher = publisher_for(engine, model)
    yield ParityCheck(
        engine,
        score=scorer(model, 0.9),
        unscaled=scorer(model, 1.0),
        model=model,
        publisher=publisher,
        prompts=some_prompts(),
        sampling=sampling,
        ranks=Alone(),
        end_token_ids=ENDS,
    )
    vars(engine).pop("begin_update", None)
    vars(engine).pop("reset_caches", None)
    publisher.refresh()


def test_a_real_engine_passes_all_stages(check):
    state = torch.get_rng_state().tolist()
    report = check.run()
    assert report.verdict == "pass", report.line()
    assert len(report.stages) == 3
    assert check.engine.version == 0
    assert check.now().verdict == "pass"
    assert torch.get_rng_state().tolist() == state


class Swallowed(WeightUpdate):
    """Confirms everything and passes nothing on: a publication that does nothing."""

    def __init__(self, engine, manifest, version):
        super().__init__("vllm", manifest, version)
        self.owner = engine

    def _deliver(self, bucket):
        pass

    def _finish(self):
        self.owner.version = self.version
        return Ack(self.version, self.sent, self.sent_bytes, self.digest.hexdigest(), 0.0)

    def abort(self):
        pass


class OldHead(Swallowed):
    """Sends the head as it was at first, as if the tied one had been forgotten."""

    def __init__(self, engine, manifest, version, head):
        super().__init__(engine, manifest, version)
        self.inner, self.head = type(engine).begin_update(engine, manifest, version), head

    def _deliver(self, bucket):
        self.inner.send(Bucket([(n, self.head if n == "lm_head.weight" else t) for n, t in bucket.tensors]))

    def _finish(self):
        self.inner.commit()
        return super()._finish()


def test_stale_weights_are_refused(check):
    check.engine.begin_update = lambda manifest, version: Swallowed(check.engine, manifest, version)
    report = check.run()
    assert report.error().startswith("--parity_check: with noise: ")
    assert "the engine still samples with its old weights" in report.error()


def test_a_tied_head_that_is_not_sent_is_refused(check):
    head = check.model.lm_head.weight.detach().clone()
    check.engine.begin_update = lambda manifest, version: OldHead(check.engine, manifest, version, head)
    report = check.run()
    assert report.error().startswith("--parity_check: with noise: ")
    assert "the head, which is tied to the embedding" in report.error() or "embedding" in report.error()


def test_a_cache_kept_across_a_publication_is_refused(check, monkeypatch):
    add_request = check.engine._llm.add_request

    def without_salt(request_id, prompt, *rest, **named):
        del prompt["cache_salt"]
        return add_request(request_id, prompt, *rest, **named)

    check.engine.reset_caches = lambda: None
    assert check.run().verdict == "pass"  # versions are told apart by the salt
    monkeypatch.setattr(check.engine._llm, "add_request", without_salt)
    report = check.run()
    assert report.verdict == "refuse", report.line()
    assert "(KV or prefix cache) outlives a publication" in report.error()
