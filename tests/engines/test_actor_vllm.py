"""Real vLLM in an actor that is killed in the middle of decoding."""

import os
import signal

import pytest
import torch
from actor_parts import alive, family, pid_of, wait_for
from transformers import AutoModelForCausalLM

from swift.rollout.engines import cluster
from swift.rollout.engines.actor_transport import actor_engine
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.engines.transport import Timeouts
from swift.rollout.weights.policy import PolicyWeights
from swift.types import Request, SamplingParams

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

PROMPTS = [[40 + i, 41, 42, 43] for i in range(4)]


def greedy(prefix):
    return [
        Request(f"{prefix}{p}/{s}", prompt, SamplingParams(max_new_tokens=120, temperature=0.0, seed=s))
        for p, prompt in enumerate(PROMPTS)
        for s in range(4)
    ]


@torch.no_grad()
def changed(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def test_vllm_killed_in_decode_comes_back_with_its_weights_and_every_request_once(
    engine_folders, tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    before = family()  # of other tests in this process
    folder = engine_folders["llama"]
    core = max(os.sched_getaffinity(0))
    worker = actor_engine(
        EngineSpec(
            backend="vllm", model=str(folder), max_model_len=256, max_num_seqs=8, cores=(core,), enforce_eager=True
        ),
        name="engine 0 (cpu:0)",
        log_file=tmp_path / "log",
        timeouts=Timeouts(start_s=300),
        uses=cluster.use(),
        restarts=1,
    )
    try:
        model = changed(folder)
        ack = worker.load_weights(PolicyWeights(model), 1)
        expected = {one.request_id[1:]: one.token_ids for one in worker.generate(greedy("a"))}
        first, came = pid_of(worker), {}
        for completion in worker.generate(greedy("b")):
            assert completion.request_id not in came, "came twice"
            came[completion.request_id] = completion
            if len(came) == 3:
                os.kill(first, signal.SIGKILL)
        assert {name[1:]: one.token_ids for name, one in came.items()} == expected
        assert {version for one in came.values() for version, _, _ in one.versions} == {1}
        assert (worker.counters.restarts, worker.version, ack.version) == (1, 1, 1)
        assert pid_of(worker) != first
        assert not alive(first)
        request = greedy("c")[0]
        (done,) = worker.generate([request])
        ids = torch.tensor([[*request.prompt_ids, *done.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1]
        ours = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        # greedy requests report the distribution at temperature 1
        assert float((ours - torch.tensor(done.logprobs)).abs().max()) < 1e-5
    finally:
        worker.close()
    assert wait_for(lambda: set(family()) <= set(before)), family()
