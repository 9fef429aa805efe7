"""Runs whose completions have several turns: the same after a resume, on two ranks, and with an engine of its own."""

import pytest
from cli_runs import ROOT, Cli, assert_same_run, completion_rows, log_rows
from safetensors.torch import load_file

from swift import read_rollouts
from swift.models.tiny import build_tiny

pytestmark = pytest.mark.slow

GAME = '''
import asyncio

from swift.plugin import Env, envs


class Guess(Env):
    """The first character's code modulo 8 is the guess."""

    async def reset(self, request):
        self.target, self.tries = int(request.data_dict["solution"]) % 8, 0
        return None, {}, None

    async def step(self, messages):
        self.tries += 1
        guess = ord(messages[-1]["content"][:1] or "a") % 8
        await asyncio.sleep(0)
        if guess == self.target or self.tries == 3:
            return "", 1.0 / self.tries, True, {"tries": self.tries}
        return "lower" if guess > self.target else "higher", -0.1 * abs(guess - self.target), False, {}


envs["guess"] = Guess
'''


@pytest.fixture
def game(cli):
    plugin = cli.folder / "game.py"
    plugin.write_text(GAME)
    return {
        "external_plugins": plugin,
        "reward_funcs": "environment",
        "gym_env": "guess",
        "max_completion_length": 4,
        "max_steps": 4,
        "beta": 0.05,
    }


TOOL = """
from swift.plugin import orms, tool_parsers, tools

CALL = {"function": {"name": "echo", "arguments": {"text": "{content}"}}}
tool_parsers["vowel"] = {
    "start_anchor": "-",
    "fields": {
        "tool_calls": {"open_pattern": "[aeiou]", "close_pattern": "$", "repeats": True, "transform": CALL},
    },
}


@tools.register("echo")
def echo(text: str) -> str:
    '''Say it again.

    Args:
        text: what
    '''
    return "got it" + text


@orms.register("share")
def share(completions, **kwargs):
    return [sum(ord(c) % 2 for c in text) / max(1, len(text)) for text in completions]
"""


@pytest.fixture
def tool(cli):
    """Answers that end with a vowel call a tool."""
    plugin = cli.folder / "tool.py"
    plugin.write_text(TOOL)
    return {
        "external_plugins": plugin,
        "reward_funcs": "share",
        "template": ROOT / "examples/train/grpo/environments/tools.jinja",
        "rollout_tools": "echo",
        "tool_parser": "vowel",
        "stop_words": "a e i o u",
        "max_turns": 3,
        "max_completion_length": 60,
        "max_steps": 3,
    }


def uses_the_tool(folder, limit=1e-5):
    """Every step called tools, and trained on what was sampled."""
    logs, rows = log_rows(folder), completion_rows(folder)
    assert len(logs) == 3
    assert all(row["tools/calls"] > 0 and row["tools/failed"] == 0 for row in logs)
    assert all(row["mismatch/logp_abs_diff_max"] < limit for row in logs)
    assert {"assistant", "tool"} == {turn["role"] for row in rows for turn in row["turns"]}
    results = [turn["content"] for row in rows for turn in row["turns"] if turn["role"] == "tool"]
    assert 0 < len(results) <= round(sum(row["tools/calls"] for row in logs) * 8)  # a full context shows none
    assert all(result.startswith("got it") for result in results)


def test_a_policy_calls_tools(cli, tool):
    folder = cli.finish("tools", **tool)
    uses_the_tool(folder)


@pytest.fixture
def tiny_cli(cli, tmp_path):
    """With a model whose heads are as wide as vLLM's kernels for CPUs want them."""
    with Cli(build_tiny(tmp_path / "tiny", arch="qwen2", size="tiny"), cli.material, cli.folder) as runs:
        yield runs


@pytest.mark.long
@pytest.mark.parametrize("mode", ["colocate", "dedicated", "server"])
def test_tools_are_called_whatever_engine_samples(tiny_cli, tool, serve, mode):
    flags = {"use_vllm": "true", "vllm_enforce_eager": "true", "vllm_max_num_seqs": 16, "vllm_max_model_len": 600}
    if mode == "server":
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        flags = {"vllm_server_base_url": serve(*words, model=tiny_cli.model).url}
    else:
        flags["vllm_mode"] = mode
    folder = tiny_cli.finish(mode, **tool, **flags, max_length=100, gradient_checkpointing="false")
    uses_the_tool(folder)


SCHEDULER = '''
from swift.plugin import MultiTurnScheduler, multi_turns


class Doubts(MultiTurnScheduler):
    """Asks again, or has the answer end otherwise, until one holds a vowel."""

    def check_finished(self, request, choice, turn):
        return any(letter in choice.message.content for letter in "aeiou")

    def step(self, request, choice, turn):
        if turn == 1:
            request.messages.append({"role": "user", "content": "sure?"})
        else:
            request.messages[-1]["content"] += " so"
        return {"infer_request": request, "rollout_infos": {"tries": turn + 1}}


multi_turns["doubts"] = Doubts
'''


@pytest.fixture
def scheduler(cli):
    plugin = cli.folder / "doubts.py"
    plugin.write_text((cli.material / "odd_plugin.py").read_text() + SCHEDULER)
    return {
        "external_plugins": plugin,
        "multi_turn_scheduler": "doubts",
        "max_turns": 3,
        "max_completion_length": 8,
        "beta": 0.05,
    }


KINDS = ["game", pytest.param("tool", marks=pytest.mark.long), pytest.param("scheduler", marks=pytest.mark.long)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_same_to_the_last_bit(cli, kind, request):
    flags = {**request.getfixturevalue(kind), "save_steps": 1, "max_steps": 4}
    straight = cli.finish("straight", **flags)
    run = cli.start("killed", **flags)
    run.reach(2)
    run.kill()
    folder = cli.finish("killed", **flags, resume_from_checkpoint="last")
    assert_same_run(folder, straight, mismatch=1e-6)
    rows = completion_rows(straight)
    assert {(row["group_id"], row["index"]): row["turns"] for row in read_rollouts(straight)} == {
        (row["group_id"], row["index"]): row["turns"] for row in rows
    }
    lengths = {len(row["turns"]) for row in rows}
    assert 1 in lengths and max(lengths) >= 3
    assert all(row["mismatch/logp_abs_diff_max"] < 1e-5 for row in log_rows(straight))
    if kind == "game":
        assert all(row["turns"][-1]["role"] == "assistant" and row["columns"]["tries"] for row in rows)
        assert log_rows(straight)[-1]["rollout/num_turns/max"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_training_on_a_record_plays_nothing_and_is_the_run_that_made_it(cli, kind, request):
    flags = {**request.getfixturevalue(kind), "record_rollouts": "all", "parity_check": "off"}
    made = cli.finish("made", **flags)
    again = cli.finish("again", **flags, replay_from=made)
    assert_same_run(again, made)
    assert max(len(row["turns"]) for row in completion_rows(again)) >= 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_two_ranks_are_one(cli, kind, request):
    flags = {**request.getfixturevalue(kind), "max_steps": 2}
    one = cli.finish("one", **{**flags, "per_device_train_batch_size": 8})
    two = cli.finish("two", **flags, variables={"NPROC_PER_NODE": 2})
    turns = [
        [(row["group_id"], row["index"], row["turns"], row["reward"]) for row in completion_rows(f)] for f in (one, two)
    ]
    assert turns[0] == turns[1]
    weights = [load_file(folder / "checkpoint-2" / "model.safetensors") for folder in (one, two)]
    assert all((weights[0][name] - weights[1][name]).abs().max() < 1e-5 for name in weights[0])  # 1e-3 is an update


@pytest.mark.long
def test_turns_go_to_an_engine_that_samples_ahead(cli, game):
    flags = {
        "vllm_mode": "dedicated",
        "infer_backend": "transformers",
        "async_generate": "true",
        "vllm_sync_interval": 1,
    }
    folder = cli.finish("ahead", **game, **flags)
    assert max(len(row["turns"]) for row in completion_rows(folder)) == 5
    assert all(row["mismatch/logp_abs_diff_max"] < 1.0 for row in log_rows(folder))
