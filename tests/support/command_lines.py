"""`swift rlhf` as tests of settings type it: a good command line, and words after it."""

import pytest

from swift.arguments import parse
from swift.errors import ConfigError

RLHF = ["--rlhf_type", "grpo", "--model", "org/tiny", "--dataset", "d.jsonl", "--reward_funcs", "accuracy"]
CPU = {"CUDA_VISIBLE_DEVICES": ""}


def rlhf(*words, environ=None):
    """The resolved settings; `words` may begin with a config file."""
    before = [words[0]] if words and not words[0].startswith("-") else []
    return parse("rlhf", [*before, *RLHF, *words[len(before) :]], {**CPU, **(environ or {})})


def problems(mode, *words):
    """What a wrong command line is told."""
    with pytest.raises(ConfigError) as error:
        parse(mode, list(words), CPU)
    assert error.value.exit_code == 2
    return error.value.problems


def refused(*words):
    """What a line says that is wrong by these words alone."""
    return problems("rlhf", *RLHF, *words)
