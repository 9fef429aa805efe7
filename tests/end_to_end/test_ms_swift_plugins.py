"""Runs with plugin files in ms-swift's manner: rewards, a scheduler that returns tokens, an environment, a judge."""

import pytest
from cli_runs import completion_rows, log_rows

pytestmark = pytest.mark.slow

PLUGIN = '''
import asyncio
from typing import Dict, List, Union

import torch

from swift.infer_engine import RequestConfig, TransformersEngine
from swift.infer_engine.protocol import ChatCompletionResponse, ChatCompletionResponseChoice, RolloutInferRequest
from swift.rewards import ORM, AsyncORM, orms, rm_plugins
from swift.rewards.rm_plugin import DefaultRMPlugin
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
from swift.template import Template
from swift.utils import get_logger, to_device

logger = get_logger()


class Vowels(ORM):
    def __init__(self, args, **kwargs):
        super().__init__(args)
        self.most = args.max_completion_length

    def __call__(self, completions, solution, **kwargs) -> List[float]:
        assert len(kwargs["rollout_infos"]) == len(completions) == len(solution)
        return [sum(letter in "aeiou" for letter in text) / self.most for text in completions]


class Slow(AsyncORM):
    async def __call__(self, completions, messages, **kwargs) -> List[float]:
        await asyncio.sleep(0)
        return [len(chat) / 10 for chat in messages]


class Appends(MultiTurnScheduler):
    """Writes a result behind the first answer, which goes on after it."""

    def __init__(self, infer_engine=None, max_turns=None, *args, **kwargs):
        super().__init__(infer_engine, max_turns, *args, **kwargs)

    def check_finished(
        self, infer_request: "RolloutInferRequest", response_choice: "ChatCompletionResponseChoice", current_turn: int
    ) -> bool:
        assert len(response_choice.logprobs["content"]) == len(response_choice.token_ids)
        return current_turn == 2

    def step(self, infer_request, response_choice, current_turn) -> Dict:
        result = " = 7"
        infer_request.messages[-1]["content"] += result
        ids, added = response_choice.token_ids, self.tokenizer.encode(result, add_special_tokens=False)
        mask = [1] * len(ids) + [0] * len(added)
        return {
            "infer_request": infer_request,
            "response_token_ids": ids + added,
            "response_loss_mask": mask,
            "rollout_infos": {"num_turns": current_turn, "tool_results": result},
        }


class Count(Env):
    """Counts answers up to two."""

    def __init__(self, env_config):
        super().__init__(env_config)
        self.answers = 0

    async def reset(self, config: RolloutInferRequest):
        return f"Say {config.data_dict['solution']}.", {}, "Be brief."

    async def step(self, action):
        self.answers += 1
        return "again", float("e" in action[-1]["content"]), self.answers == 2, {"answers": self.answers}

    async def close(self):
        pass


class Head(DefaultRMPlugin):
    def __init__(self, model, template):
        self.model = model
        self.template: Template = template

    def __call__(self, inputs, **kwargs):
        rows = self.template.data_collator([self.template.encode(row) for row in inputs])
        with torch.inference_mode():
            return self.model(**to_device(rows, self.model.device)).logits[:, 0]


class Judge(DefaultRMPlugin):
    def __init__(self, model, template):
        super().__init__(model, template)
        self.engine = TransformersEngine(self.model, template=self.template, max_batch_size=0)
        self.request_config = RequestConfig(temperature=0, max_tokens=4)

    def __call__(self, inputs, **kwargs):
        chats = [{"messages": [{"role": "user", "content": row["messages"][-1]["content"]}]} for row in inputs]
        results: List[ChatCompletionResponse] = self.engine.infer(chats, self.request_config, use_tqdm=False)
        return torch.tensor([len(result.choices[0].message.content) / 10 for result in results])


orms["vowels"], orms["slow"] = Vowels, Slow
multi_turns["appends"], envs["count"] = Appends, Count
rm_plugins["head"], rm_plugins["judge"] = Head, Judge
'''


@pytest.fixture
def plugin(cli):
    path = cli.folder / "plugin.py"
    path.write_text(PLUGIN)
    return {"external_plugins": path, "max_steps": 2, "max_completion_length": 8}


def test_rewards_a_scheduler_and_judges(cli, plugin, nano_folders, tmp_path):
    from swift.models.tiny import build_tiny

    head = build_tiny(tmp_path / "head", size="nano", seed=3, reward_model=True)
    folder = cli.finish(
        "scheduler",
        **plugin,
        reward_funcs=["vowels", "slow"],
        multi_turn_scheduler="appends",
        max_turns=3,
        reward_model=[head, nano_folders["qwen2"]],
        reward_model_plugin=["head", "judge"],
    )
    logs, rows = log_rows(folder), completion_rows(folder)
    assert len(logs) == 2
    assert all(row["mismatch/logp_abs_diff_max"] < 1e-5 for row in logs)
    names = ["vowels", "slow", "head", nano_folders["qwen2"].name]
    assert all(f"rewards/{name}/mean" in row for row in logs for name in names)
    assert all([turn["role"] for turn in row["turns"]] == ["assistant"] for row in rows)
    assert all(row["columns"]["tool_results"] == " = 7" in row["turns"][0]["content"] for row in rows)


def test_an_environment_by_its_scheduler(cli, plugin):
    folder = cli.finish(
        "gym",
        **plugin,
        reward_funcs="vowels",
        multi_turn_scheduler="gym_scheduler",
        gym_env="count",
        use_gym_env="true",
        loss_scale="last_round",
        max_turns=3,
    )
    logs, rows = log_rows(folder), completion_rows(folder)
    assert all({"rewards/vowels/mean", "rewards/environment/mean"} <= row.keys() for row in logs)
    assert all([turn["role"] for turn in row["turns"]] == ["assistant", "user", "assistant"] for row in rows)
    assert all(row["tokens/trained"] <= 8 * 8 for row in logs)
