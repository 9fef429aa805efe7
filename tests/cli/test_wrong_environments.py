"""Wrong inputs about environments, rewards by import path, health and metric names: one line each, and nothing left.

As in test_wrong_inputs.py: what is typed, and fragments that the error lines must contain.
"""

import sys

import pytest
from desk import contents, refused

MULTI_TURN = "from swift.plugin import Env, MultiTurnScheduler, envs, multi_turns\n"

ENVIRONMENTS = {
    "scheduler nobody registered": (lambda d: d.rlhf("--multi_turn_scheduler hints"), "--multi_turn_scheduler: hints"),
    "scheduler with a typo": (
        lambda d: d.rlhf("--multi_turn_func hint", *plugin(d, "multi_turns['hints'] = lambda rows: rows")),
        "--multi_turn_func: hint: not a choice; valid: hints",
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
    "environment nobody registered": (lambda d: d.rlhf("--gym_env game"), "--gym_env: game: no plugin has"),
    "environment with a typo": (
        lambda d: d.rlhf("--gym_env gane", *plugin(d, "envs['game'] = Env")),
        "--gym_env: gane: not a choice; valid: game",
    ),
    "an environment that is not named": (
        lambda d: d.rlhf("--use_gym_env true"),
        "--use_gym_env: true: | --gym_env NAME",
    ),
    "an environment that is not wanted": (
        lambda d: d.rlhf("--use_gym_env false --gym_env game"),
        "--use_gym_env: false: contradicts --gym_env game",
    ),
    "no turns": (lambda d: d.rlhf("--gym_env game --max_turns 0"), "--max_turns: 0: out of range"),
    "turns in words": (lambda d: d.rlhf("--gym_env game --max_turns few"), "--max_turns: few: not a whole number"),
    "unknown scope": (
        lambda d: d.rlhf("--completion_length_limit_scope per_turn"),
        "--completion_length_limit_scope: per_turn: not a choice | per_round, total",
    ),
    "unknown treatment of rewritten turns": (
        lambda d: d.rlhf("--on_prefix_break ignore"),
        "--on_prefix_break: ignore: not a choice | exclude",
    ),
    "environment with weights sharded over ranks": (
        lambda d: d.rlhf("--gym_env game --fsdp full_shard"),
        "--gym_env: game: each rank calls it with its own prompts | --vllm_mode dedicated",
    ),
    "rewards of a scheduler": (
        lambda d: d.rlhf("--reward_funcs accuracy environment --multi_turn_scheduler hints"),
        "--reward_funcs: environment: nothing rewards",
    ),
}

REWARDS = {
    "no such module": (
        lambda d: d.rlhf("--reward_funcs no_such.fn"),
        "--reward_funcs: no_such.fn: no module 'no_such' in",
    ),
    "a module with a typo": (
        lambda d: module(d, "typo_grades", "fn = len", "typo_grade.fn"),
        "no module 'typo_grade' | nearest: typo_grades",
    ),
    "no such package": (
        lambda d: module(d, "grades_a", "fn = len", "grades_a.inner.fn"),
        "--reward_funcs: grades_a.inner.fn: no module 'grades_a.inner'",
    ),
    "no such function": (
        lambda d: module(d, "grades_b", "def score(completions, **kwargs): ...", "grades_b.scores"),
        "grades_b.py has no 'scores'; nearest: score",
    ),
    "what cannot be called": (lambda d: module(d, "grades_c", "fn = 3", "grades_c.fn"), "grades_c.fn: is int in"),
    "class that cannot be called": (
        lambda d: module(d, "grades_d", "class Fn: ...", "grades_d.Fn"),
        "reward function grades_d.Fn | Fn cannot be called; define __call__",
    ),
    "function of nothing": (lambda d: module(d, "grades_e", "def fn(): ...", "grades_e.fn"), "takes no completions"),
    "module that raises": (
        lambda d: module(d, "grades_f", "x = 1\nraise ValueError('no key')", "grades_f.fn"),
        "grades_f.py:2: raised while it was imported: ValueError: no key",
    ),
    "module that exits": (lambda d: module(d, "grades_g", "exit(3)", "grades_g.fn"), "grades_g.py:1: | SystemExit: 3"),
    "module that is no Python": (
        lambda d: module(d, "grades_h", "def f(:", "grades_h.f"),
        "grades_h.py:1: | SyntaxError",
    ),
    "module that misses another": (
        lambda d: module(d, "grades_i", "import no_such_library", "grades_i.fn"),
        "grades_i.py:1: raised while it was imported: ModuleNotFoundError",
    ),
    "column that rows lack": (
        lambda d: module(d, "grades_j", "def fn(completions, level, **kwargs): ...", "grades_j.fn"),
        "grades_j.fn: needs the column 'level' | columns seen: solution",
    ),
    "wrong number of rewards": (
        lambda d: module(d, "grades_k", "def fn(completions, **kwargs): return [1.0]", "grades_k.fn"),
        "grades_k.py:1: returned 1 value for 2 completions",
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
    "reward model that is no folder": (lambda d: d.rlhf("--reward_funcs ./gone/rm"), "--reward_model: ./gone/rm"),
    "weights for a model among functions": (
        lambda d: d.rlhf("--reward_funcs a/rm accuracy --reward_weights 1"),
        "--reward_weights: 1: 1 weights for 2 rewards; need 2: accuracy a/rm",
    ),
}

HEALTH = {
    "no such rules": (lambda d: d.rlhf("--health_rules gone.yaml"), "--health_rules: gone.yaml: cannot be read"),
    "rules that are a folder": (lambda d: d.rlhf("--health_rules ."), "--health_rules: .: cannot be read"),
    "rules that are a list": (lambda d: rules(d, "- kl"), "must map rules to limits"),
    "rules that are no YAML": (lambda d: rules(d, "kl: [1"), "neither YAML nor JSON"),
    "unknown rules": (
        lambda d: rules(d, "kll: 1\nentropi_low: 2"),
        "kll: no such rule; nearest: kl | nearest: entropy_low",
    ),
    "limit in words": (lambda d: rules(d, "kl: high"), "kl: high: not a limit; give a number, or false"),
    "limit that is infinite": (lambda d: rules(d, "kl: .inf"), "kl: inf: not a limit"),
    "unknown action": (lambda d: d.rlhf("--health_action halt"), "--health_action: halt: not a choice | warn, stop"),
    "unknown names": (
        lambda d: d.rlhf("--metric_names openrlhf"),
        "--metric_names: openrlhf: not a choice | trl, verl",
    ),
    "doctor without a run": (lambda d: ["doctor"], "--run: missing"),
    "doctor of no run": (lambda d: ["doctor", "--run", d.folder], "--run: | no logging.jsonl in it"),
}

TABLE = {**ENVIRONMENTS, **REWARDS, **HEALTH}
CODES = {"wrong number of rewards": 5}
"""Exit codes other than 2."""


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
    command, fragments = TABLE[name]
    words = command(desk)
    before = contents(desk.folder)
    refused(words, fragments, capfd, CODES.get(name, 2))
    assert contents(desk.folder) == before
