"""Wrong inputs about environments, rewards by import path, health and metric names: one line each, and nothing left.

As in test_wrong_inputs.py: what is typed, and fragments that the error lines must contain.
"""

import sys

import pytest
from desk import refused_without_a_trace

MULTI_TURN = "from swift.plugin import Env, MultiTurnScheduler, envs, multi_turns\n"

ENVIRONMENTS = {
    "scheduler nobody registered": ("--multi_turn_scheduler hints", "--multi_turn_scheduler: hints"),
    "scheduler with a typo": (
        lambda d: d.rlhf("--multi_turn_func hint", *plugin(d, "multi_turns['hints'] = lambda rows: rows")),
        "--multi_turn_func: hint: not a choice; valid: | hints",
    ),
    "scheduler that is a number": (
        lambda d: d.rlhf("--multi_turn_scheduler seven", *plugin(d, "multi_turns['seven'] = 7")),
        "--multi_turn_scheduler: seven: is int; register",
    ),
    "scheduler without max_turns": (
        lambda d: d.rlhf(
            "--multi_turn_scheduler bare",
            *plugin(d, "class Bare(MultiTurnScheduler):\n    def __init__(self): pass\nmulti_turns['bare'] = Bare"),
        ),
        "--multi_turn_scheduler: bare: | must take max_turns",
    ),
    "environment nobody registered": ("--gym_env game", "--gym_env: game: not a choice; valid: math_env"),
    "environment with a typo": (
        lambda d: d.rlhf("--gym_env gane", *plugin(d, "envs['game'] = Env")),
        "--gym_env: gane: not a choice; valid: math_env",
    ),
    "an environment that is not named": (
        "--use_gym_env true",
        "--use_gym_env: true: | --gym_env NAME",
    ),
    "an environment that is not wanted": (
        "--use_gym_env false --gym_env math_env",
        "--use_gym_env: false: contradicts --gym_env math_env",
    ),
    "environment with weights sharded over ranks": (
        "--gym_env math_env --fsdp full_shard",
        "--gym_env: math_env: each rank calls it with its own prompts | --vllm_mode dedicated",
    ),
    "an environment and a scheduler that plays none": (
        "--gym_env math_env --multi_turn_scheduler math_tip_trick",
        "--gym_env: math_env: --multi_turn_scheduler math_tip_trick plays no environment",
    ),
    "rewards of a scheduler": (
        "--reward_funcs accuracy environment --multi_turn_scheduler hints",
        "--reward_funcs: environment: nothing rewards",
    ),
}

REWARDS = {
    "no such module": (
        "--reward_funcs no_such.fn",
        "--reward_funcs: no_such.fn: no module 'no_such' in",
    ),
    "no such package": (
        lambda d: module(d, "grades_a", "fn = len", "grades_a.inner.fn"),
        "--reward_funcs: grades_a.inner.fn: no module 'grades_a.inner'",
    ),
    "function of nothing": (lambda d: module(d, "grades_e", "def fn(): ...", "grades_e.fn"), "takes no completions"),
    "module that raises": (
        lambda d: module(d, "grades_f", "x = 1\nraise ValueError('no key')", "grades_f.fn"),
        "grades_f.py:2: raised while it was imported: ValueError: no key",
    ),
    "wrong number of rewards": (
        lambda d: module(d, "grades_k", "def fn(completions, **kwargs): return [1.0]", "grades_k.fn"),
        "grades_k.py:1: returned 1 value for 2 completions",
        5,
    ),
    "function in swift reward-test": (
        lambda d: [
            "reward-test",
            "--dataset",
            d.rows([{"query": "a", "solution": "1"}]),
            "--reward_funcs",
            "no_such.fn",
        ],
        "--reward_funcs: no_such.fn: no module 'no_such'",
    ),
    "function given twice": (
        lambda d: module(d, "grades_l", "def fn(completions, **kwargs): ...", "grades_l.fn", "grades_l.fn"),
        "--reward_funcs: grades_l.fn: given twice",
    ),
    "class that wants a flag nobody has": (
        lambda d: module(
            d,
            "grades_m",
            "class Fn:\n def __init__(self, secret): ...\n def __call__(self, completions): ...",
            "grades_m.Fn",
        ),
        "parameter 'secret' is no flag",
    ),
    "reward model that is no folder": ("--reward_funcs ./gone/rm", "--reward_model: ./gone/rm"),
    "weights for a model among functions": (
        "--reward_funcs a/rm accuracy --reward_weights 1",
        "--reward_weights: 1: 1 weights for 2 rewards; need 2: accuracy a/rm",
    ),
}

HEALTH = {
    "no such rules": ("--health_rules gone.yaml", "--health_rules: gone.yaml: cannot be read"),
    "unknown rules": (
        lambda d: rules(d, "kll: 1\nentropi_low: 2"),
        "kll: no such rule; nearest: kl | nearest: entropy_low",
    ),
    "doctor of no run": (lambda d: ["doctor", "--run", d.folder], "--run: | no logging.jsonl in it"),
}

TABLE = {**ENVIRONMENTS, **REWARDS, **HEALTH}


def plugin(desk, text):
    return "--external_plugins", desk.plugin(MULTI_TURN + text + "\n")


def module(desk, name, text, *functions):
    """A file in the working folder, and a command with functions by their paths."""
    desk.file(f"{name}.py", text + "\n")
    return desk.rlhf("--reward_funcs", *functions)


def rules(desk, text):
    return desk.rlhf("--health_rules", desk.file("rules.yaml", text))


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """What a test imports from its folder is gone after it, and leaves no bytecode there."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path, before = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.startswith(("grades_", "typo_")):
            del sys.modules[name]


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_input_is_told_in_lines_and_leaves_nothing(name, desk, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    refused_without_a_trace(desk, TABLE[name], capfd)
