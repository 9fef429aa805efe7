"""The calculator and the guessing game of examples/train/grpo/environments: they can be won, and are learned."""

import asyncio
import os
import random
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import ROOT, log_rows

from swift.plugin import RolloutInferRequest, envs, tools
from swift.plugin.loader import load_external_plugins

FOLDER = ROOT / "examples/train/grpo/environments"


@pytest.fixture(scope="module")
def plugins():
    return load_external_plugins([str(FOLDER / f"{name}.py") for name in ("calculator", "guess")])


def test_the_calculator_multiplies_and_says_what_it_wants(plugins):
    assert tools["calculate"](" 47 * 83") == "3901"
    with pytest.raises(ValueError, match="two whole numbers"):
        tools["calculate"]("47+83")


def test_a_player_who_halves_finds_nearly_every_letter(plugins):
    async def won(target):
        game, letters, rewards = envs["guess"](), "abcdefgh", []
        await game.reset(RolloutInferRequest([], {"solution": target}, "g/0"))
        over = False
        while not over:
            guess = letters[len(letters) // 2]
            said, reward, over, _ = await game.step([{"role": "assistant", "content": guess}])
            before, _, after = letters.partition(guess)
            letters = after if said == "later" else before
            rewards.append(reward)
        return sum(rewards), len(rewards)

    results = [asyncio.run(won(target)) for target in "abcdefgh"]
    assert sum(reward for reward, _ in results) == 7
    assert max(turns for _, turns in results) == 3


def test_imitating_the_teacher_is_not_enough(plugins):
    calculator, guess = plugins
    draw = random.Random(1)
    chats = [calculator.chat(47, 83, draw)["messages"] for _ in range(4000)]
    assert 0.15 < sum(chat[-1]["content"] == "<answer>3901</answer>" for chat in chats) / len(chats) < 0.25
    games = [guess.game(draw)["messages"] for _ in range(4000)]
    early = sum(len(game) < 2 * guess.TURNS for game in games) / len(games)  # won before the last guess
    assert 0.2 < early < 0.4


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "before"), [("calculator", 0.3), ("guess", 0.45)])
@pytest.mark.parametrize("engine", [(), ("--use_vllm", "true", "--vllm_enforce_eager", "true")], ids=["own", "vllm"])
def test_an_example_is_learned(name, before, engine, tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def rewards(folder, *flags):
        env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OUT": str(tmp_path / folder)}
        subprocess.run(["bash", str(FOLDER / f"{name}.sh"), *engine, *flags], env=env, cwd=tmp_path, check=True)
        return [row["reward"] for row in log_rows(tmp_path / folder)]

    unlearned = ("--max_steps", "8", "--logging_steps", "1", "--learning_rate", "1e-12")
    assert statistics.fmean(rewards("before", *unlearned)) <= before
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert rewards("learned")[-1] >= 0.8
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < 480  # four minutes of two cores
