"""The engine of `--replay_from` gives completions as they were when they were recorded."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from swift.errors import EngineError
from swift.observability.rollout_record import RolloutRecord
from swift.rollout.saved_state import beside_tokens
from swift.trainers.recorded_engine import RecordedEngine
from swift.types import Completion, Episode, Request, SamplingParams

CHAT = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}, {"role": "tool", "content": "7"}]
PLAYED = Completion(
    "p-0/0", [5, 6, 7], [-0.5, 0.0, -0.25], "stop", "a", [(3, 0, 3)], {"pair": (1, np.float64(0.1))},
    mask=[1, 0, 1], episode=Episode(CHAT, 1, 2, [8, 9], [0.5, None], metrics={"calls": 1.0}),
)  # fmt: skip


@pytest.fixture
def replayed(tmp_path):
    """The completion that comes back for a request, after it was recorded."""

    def again(completion, prompt_ids=(1, 2), trained=None):
        file = RolloutRecord(tmp_path, "all", ["f"])
        row = {
            "group": 0, "group_id": "p-0", "prompt_id": "p", "index": 0, "finish_reason": completion.finish_reason,
            "turns": None, "excluded": None, "advantage": 0.0, "rewards": [1.0], "reward_kl": None,
            "completion": beside_tokens(completion), "prompt_ids": [1, 2], "token_ids": completion.token_ids,
            "trained": trained or [True] * len(completion.token_ids), "sampler_logprobs": completion.full_logprobs,
            "versions": np.asarray(completion.versions).reshape(-1),
        }  # fmt: skip
        file.write(1, [row], {})
        file.close()
        engine = RecordedEngine(str(tmp_path))
        return asyncio.run(engine.generate(Request("p-0/0", list(prompt_ids), SamplingParams(8))))

    return again


def test_a_completion_of_several_turns_comes_back_whole(replayed):
    again = replayed(PLAYED, prompt_ids=(4,))  # the environment's prompt is its own
    assert again == PLAYED and type(again.columns["pair"][1]) is np.float64


def test_a_sample_of_the_engine_alone_needs_its_tokens_alone(replayed):
    plain = replace(PLAYED, columns={}, mask=[], episode=None, text="")
    assert beside_tokens(plain) is None and replayed(plain) == plain
    assert beside_tokens(replace(plain, logged={"seen": 1})) is None


def test_what_a_reward_logs_is_not_recorded(replayed):
    """It is written while samples are made, and another run has other rewards."""
    assert replayed(replace(PLAYED, logged={"seen": 1}), prompt_ids=(4,)) == PLAYED


def test_a_column_may_have_any_name(replayed):
    lost = replace(PLAYED, columns={"lost": True})
    assert replayed(lost, prompt_ids=(4,)) == lost


def test_turns_that_an_older_version_recorded_are_refused(replayed, monkeypatch):
    monkeypatch.setattr(f"{__name__}.beside_tokens", lambda completion: None)
    with pytest.raises(EngineError, match="of which an older version has not recorded enough"):
        replayed(PLAYED, prompt_ids=(4,), trained=[True, False])


def test_another_prompt_is_refused(replayed):
    with pytest.raises(EngineError, match="p-0/0 has another prompt on record; use the same model"):
        replayed(replace(PLAYED, episode=None), prompt_ids=(1, 3))


def test_what_the_record_could_not_hold_is_told(replayed):
    with pytest.raises(EngineError, match=r"its environment has returned a value of type builtins\.object, which"):
        replayed(replace(PLAYED, columns={"odd": object()}))
