"""Reward functions by import path: found, refused in one line, and called with what TRL's own trainer passes."""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from dataclasses import replace

import pytest
from refusals import problems_of

from swift.arguments import parse
from swift.data.loading import load_rows
from swift.models.tokenizer import load_chat
from swift.rewards.pipeline import RewardPipeline
from swift.types import Completion, Episode, Prompt, RolloutGroup, TrainerProgress

NUMBERS = itertools.count()

RECORDER = """
import json, os

def record(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    log_extra("seen", [f"sample {i}" for i in range(len(prompts))])
    log_metric("ids", sum(map(len, completion_ids)))
    with open(os.environ["RECORD"], "a") as file:
        file.write(json.dumps({
            "prompts": prompts, "completions": completions, "completion_ids": completion_ids, "columns": columns,
            "state": [trainer_state.global_step, trainer_state.max_steps],
        }) + "\\n")
    return [None if i == 0 else float(len(ids)) for i, ids in enumerate(completion_ids)]

async def awaited(completions, level, **kwargs):
    return [float(one) for one in level]

class Built:
    def __init__(self, bonus=2.0):
        self.bonus = bonus
    def __call__(self, completion_ids, **kwargs):
        return [self.bonus for _ in completion_ids]

class Ours:
    pass

def by_name(completions, finish_reason, group_id):
    return [float(reason == "stop") for reason in finish_reason]

def short(completions, log_extra, **kwargs):
    log_extra("seen", ["one"] * 3)
    return [0.0] * len(completions)

def own_names(completions, log_metric, **kwargs):
    log_metric("loss", 5.0)
    return [0.0] * len(completions)

from swift.plugin import ORM
class InSwiftsWay(ORM):
    def __call__(self, completions, **kwargs):
        return [float(completions == ["a", "b"])] * 2

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A new module in the working folder; returns its name."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)

    def write(source=RECORDER):
        name = f"my_rewards_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    yield write
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("my_rewards_"):
            del sys.modules[name]


def problem(pipeline, name):
    (line,) = problems_of(pipeline, [name])
    assert line.startswith(f"--reward_funcs: {name}: ")
    return line


def test_what_an_import_path_may_not_be(pipeline, module):
    name = module()
    assert "no module 'no_such_module_here'" in problem(pipeline, "no_such_module_here.fn")
    assert f"nearest: {name}" in problem(pipeline, f"{name[:-1]}x.record")
    assert "nearest: record" in problem(pipeline, f"{name}.recrod")
    assert "is int in" in problem(pipeline, f"{name}.number")
    raising = module("x = 1\nraise KeyError(7)")
    assert ".py:2: raised while it was imported: KeyError: 7" in problem(pipeline, f"{raising}.record")
    assert ".py:1: raised while it was imported: ModuleNotFoundError" in problem(pipeline, f"{module('import nope')}.f")
    assert ".py:1: raised while it was imported: SyntaxError" in problem(pipeline, f"{module('def f(:')}.f")
    assert "SystemExit: 3" in problem(pipeline, f"{module('exit(3)')}.f")
    assert "imported: KeyboardInterrupt" in problem(pipeline, f"{module('raise KeyboardInterrupt')}.f")
    assert not [line for line in sys.path if line == "" or line.endswith(name)]


def test_a_local_file_hides_no_library_that_is_imported_later(module, tmp_path):
    from swift.rewards.catalogue import find

    (tmp_path / "this.py").write_text("raise RuntimeError")  # a module of the standard library, too
    find(f"{module()}.record")
    assert sys.path[-1] == str(tmp_path)
    assert str(tmp_path) not in sys.path[:-1]


def test_conventions_of_what_is_imported(pipeline, module, group, progress):
    name = module()
    names = [f"{name}.{one}" for one in ("awaited", "Built", "by_name", "InSwiftsWay")]
    (scores,) = pipeline(names).score([group(["a", "b"], level=3)], progress)
    assert scores.values == [[3.0, 2.0, 1.0, 1.0]] * 2
    assert "define __call__" in problems_of(pipeline, [f"{name}.Ours"])[0]
    (line,) = problems_of(pipeline([f"{name}.awaited"]).check_columns, [group(["a"]).prompt])
    assert "column 'level'" in line


def test_what_a_function_logs_goes_to_the_completions_and_the_metrics(pipeline, module, group, progress, monkeypatch):
    monkeypatch.setenv("RECORD", "record.jsonl")
    name = module()
    rewards = pipeline([f"{name}.record", f"{name}.own_names"])
    groups = [group(["a", "b c"], group_id="g0"), group(["a b c", "d"], group_id="g1")]
    rewards.score(groups, progress)
    assert [one.logged for item in groups for one in item.completions] == [
        {"seen": "sample 0"},
        {"seen": "sample 1"},
    ] * 2
    metrics = rewards.drain_metrics(groups)
    assert metrics["ids"] == 3.5  # the mean of 3 and 4
    assert metrics["logged/loss"] == 5.0
    assert "loss" not in metrics
    (scores,) = pipeline([f"{name}.short"]).score([group(["a", "b"])], progress)
    assert all("contract" in reason for reason in scores.excluded)


def test_turns_after_the_prompt_are_the_completion(pipeline, module, group, progress, monkeypatch, tmp_path):
    monkeypatch.setenv("RECORD", "record.jsonl")
    asked = group(["b"])
    chat = [{"role": role, "content": role} for role in ("user", "assistant", "tool", "assistant")]
    asked.completions[0].episode = Episode(chat, 1, 2)
    pipeline([f"{module()}.record"]).score([asked], progress)
    called = json.loads((tmp_path / "record.jsonl").read_text())
    assert called["prompts"] == [chat[:1]]
    assert called["completions"] == [chat[1:]]


CHAT = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say a."}], "level": 2}
TEXT = {"prompt": "Say b.", "level": 1, "tags": ["x", "y"]}


@pytest.mark.parametrize("row", [CHAT, TEXT], ids=["chat", "text"])
def test_trl_makes_the_same_call(row, module, tmp_path, monkeypatch, nano_folders):
    monkeypatch.setenv("RECORD", "record.jsonl")
    name, folder = module(), nano_folders["qwen2"]
    function = f"{name}.record"
    expected = trls_call(name, row, folder, tmp_path / "record.jsonl")
    (tmp_path / "record.jsonl").unlink()

    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    words = f"--rlhf_type grpo --model {folder} --dataset rows.jsonl --reward_funcs {function} --reward_workers 1"
    args = parse("rlhf", words.split(), {}).args
    (example,) = load_rows(args, "train", purpose="prompt").examples
    prompt = Prompt(example.digest, example.messages, [], example.columns, example.is_chat)
    decode = load_chat(args).decode
    ids = expected["completion_ids"]
    completions = [Completion(str(i), one, [-1.0] * len(one), "stop", decode(one)) for i, one in enumerate(ids)]
    with RewardPipeline(args, seed=1, max_completion_length=4) as rewards:
        (scores,) = rewards.score([RolloutGroup("g", 0, 0, prompt, completions)], TrainerProgress(0, 1, 0.0))
    assert json.loads((tmp_path / "record.jsonl").read_text()) == expected
    assert scores.values == [[None], [float(len(ids[1]))]]


def trls_call(name, row, folder, record):
    """What TRL 1.16's trainer passed in its first step."""
    import importlib

    from datasets import Dataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOConfig, GRPOTrainer
    sys.path.append(str(record.parent))
    settings = GRPOConfig(
        output_dir=str(record.parent / "trl"), use_cpu=True, bf16=False, report_to=[], max_steps=1, num_generations=2,
        per_device_train_batch_size=2, max_completion_length=4, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    function = importlib.import_module(name).record
    GRPOTrainer(str(folder), function, settings, Dataset.from_list([row])).train()
    (line,) = record.read_text().splitlines()
    return json.loads(line)


@pytest.mark.parametrize(
    ("words", "functions", "models", "weights"),
    [
        ("org/judge accuracy --reward_weights 1 2", ["accuracy"], ["org/judge"], [2.0, 1.0]),
        ("accuracy ./rm format --reward_model a/b --reward_weights 1 2 3 4", ["accuracy", "format"], ["./rm", "a/b"],
         [1.0, 3.0, 2.0, 4.0]),
        ("local accuracy", ["accuracy"], ["local"], []),
        ("format folder", ["format", "folder"], [], []),
    ],
)  # fmt: skip
def test_models_may_stand_among_the_functions(words, functions, models, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "config.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    line = f"--rlhf_type grpo --model m --dataset d --reward_funcs {words}"
    resolved = parse("rlhf", line.split(), {})
    args = resolved.args
    assert (args.reward_funcs, args.reward_model, args.reward_weights) == (functions, models, weights)
    assert ("reward models" in str(resolved.provenance["reward_model"]["rule"])) == bool(models)


def test_names_of_trls_own_command_line(pipeline, group, progress):
    texts = ["<think>x</think>4", "4"]
    (scores,) = pipeline(["think_format_reward", "trl.rewards.think_format_reward"]).score([group(texts)], progress)
    assert scores.values == [[1.0, 1.0], [0.0, 0.0]]
    as_text = group(texts)
    as_text.prompt = replace(as_text.prompt, is_chat=False)  # as in TRL, which hands texts to a function for chats
    (scores,) = pipeline(["think_format_reward"]).score([as_text], progress)
    assert scores.excluded == ["exception: think_format_reward"] * 2
