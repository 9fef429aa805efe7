"""Each value that a help page offers is taken or refused in a line that names its flag; so is each bound."""

import pytest

from swift.arguments import parse
from swift.arguments.derived import Machine
from swift.arguments.modes import MODES, command_of
from swift.arguments.plugins import settings_class
from swift.arguments.values import convert
from swift.errors import ConfigError
from swift.flags import flags_of

HERE = Machine.detect({})
LEAST = {
    "rlhf": "--rlhf_type grpo --model m --dataset d --reward_funcs accuracy",
    "ebft": "--model m --dataset d",
    "ebft_strided": "--model m --dataset d",
    "gkd": "--model m --dataset d --teacher_model t",
    "seq_cls": "--model m --dataset d --num_labels 3",
    "infer": "--model m",
    "export": "--adapters a --merge_lora true",
    "merge-lora": "--adapters a",
    "reward-test": "--dataset d --reward_funcs accuracy",
    "rollout": "--model m",
    **dict.fromkeys(("doctor", "replay", "show", "view"), "--run r"),
    **dict.fromkeys(("agent-docs", "plan", "config-schema"), ""),
    "import-config": "--file f",
}
"""Mode -> a command line that is accepted; other modes take a model and a dataset."""


def answer(mode, name, value):
    """The settings with a value of a flag, or the lines that refuse it."""
    command, *words = command_of(mode).split()
    least = LEAST.get(mode, "--model m --dataset d").split()
    at = least.index(f"--{name}") if f"--{name}" in least else len(least)
    words += [*least[:at], *least[at + 2 :]]
    try:
        return parse(command, [*words, f"--{name}", str(value)], {}, machine=HERE), []
    except ConfigError as error:
        return None, error.problems


def own_flags(mode):
    """The flags that earlier modes do not have from the same class."""
    earlier = list(MODES)[: list(MODES).index(mode)]
    seen = {(flag.owner, name) for cls in map(settings_class, earlier) for name, flag in flags_of(cls).items()}
    return [flag for name, flag in flags_of(settings_class(mode)).items() if (flag.owner, name) not in seen]


@pytest.mark.parametrize("mode", MODES)
def test_the_least_command_of_each_mode_is_accepted(mode):
    command, *words = command_of(mode).split()
    assert parse(command, [*words, *LEAST.get(mode, "--model m --dataset d").split()], {}, machine=HERE).mode == mode


@pytest.mark.parametrize("mode", MODES)
def test_each_value_is_taken_or_refused_in_a_line_that_names_its_flag(mode):
    for flag in own_flags(mode):
        offered = ["true", "false"] if flag.kind == "bool" else [*flag.choices, *flag.details.values]
        for value in offered:
            resolved, problems = answer(mode, flag.name, value)
            if resolved is None:
                named = any(f"--{flag.name}" in line or f"{value} needs" in line for line in problems)
                assert named, (flag.name, value, problems)
            elif hasattr(resolved.args, flag.name):  # which another mode, that the value chooses, may lack
                taken = getattr(resolved.args, flag.name) == convert(flag, str(value))
                told = (
                    any(f"--{flag.name}" in line for line in resolved.notes) or resolved.provenance[flag.name]["rule"]
                )
                assert taken or told, (flag.name, value)


@pytest.mark.parametrize("mode", MODES)
def test_each_bound_is_in_or_out_of_range(mode):
    for flag in own_flags(mode):
        for name, bound in flag.details.bounds.items():
            inside, out = name in ("ge", "le"), 1 if name in ("lt", "le") else -1
            step = 1 if flag.kind == "int" else max(1e-3, abs(bound) / 1000)
            beyond = bound + out * step if inside else bound
            _, problems = answer(mode, flag.name, beyond)
            assert any(line.startswith(f"--{flag.name}: ") and "out of range" in line for line in problems), flag.name
            _, problems = answer(mode, flag.name, bound if inside else bound - out * step)
            assert not any("out of range" in line and f"--{flag.name}: " in line for line in problems), flag.name
