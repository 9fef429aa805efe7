"""NeMo Gym's agents with a policy server of ours: what they hand back is what the policy sampled."""

import pytest
import sources
import torch
from nemo_gym_servers import TOOL_RESULT, NemoGym
from oracle import load, logprobs_of
from server_parts import LocalServer

from swift.models.arguments import CheckpointArguments
from swift.models.tokenizer import load_chat
from swift.rollout.round_result import fault
from swift.rollout.sources.multi_turn.source import TrajectorySource
from swift.rollout.sources.multi_turn.trajectory import Limits
from swift.rollout.sources.nemo_gym import gym as play
from swift.rollout.sources.nemo_gym.servers import find_servers
from swift.types import Prompt, Request, SamplingParams


@pytest.fixture
def source(nano_folders):
    server = LocalServer(nano_folders["qwen2"])
    inner = server.engine()
    with NemoGym(policy=server.url) as gym:
        agents = find_servers(gym.url, kind="agents", limit_s=5)
        player = play.NemoGym("run", "odd_agent", 30.0, "policy", [], agents)
        template = load_chat(CheckpointArguments(model=str(nano_folders["qwen2"])))
        player.attach(inner, len(template.tokenizer))
        one = TrajectorySource(inner, template, Limits(9, "per_round", 500), player, "--rollout_source: nemo_gym")
        yield one
        one.close()
    inner.close()
    server.stop()


def test_an_assembled_sample_has_the_log_probs_of_the_policy(source, nano_folders):
    model, template = load(nano_folders["qwen2"]), source.template
    messages = [{"role": "user", "content": "How many?"}]
    prompt = Prompt("p", messages, template.encode_prompt(messages), {"responses_create_params": {"input": messages}})
    sampling = SamplingParams(max_new_tokens=6, temperature=0.8)
    wanted = [Request(f"p-0/{i}", prompt.token_ids, sampling, prompt) for i in range(4)]
    done = sources.sampled(source, wanted)
    for one in done:
        assert (fault(one), one.episode.num_turns, one.episode.prompt_ids) == (None, 2, [])
        expected = logprobs_of(model, prompt.token_ids, one.token_ids, 0.8)
        sampled = torch.tensor(one.mask, dtype=torch.bool)
        assert float((torch.tensor(one.logprobs) - expected)[sampled].abs().max()) < 1e-5
        written = [token for token, kept in zip(one.token_ids, one.mask, strict=True) if not kept]
        assert template.decode(written) == TOOL_RESULT
    assert len({tuple(one.token_ids) for one in done}) == 4
