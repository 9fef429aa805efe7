"""`swift rlhf` as tests of settings type it: a good command line, and words after it."""

from refusals import problems_of

from swift.arguments import parse

RLHF = ["--rlhf_type", "grpo", "--model", "org/tiny", "--dataset", "d.jsonl", "--reward_funcs", "accuracy"]
CPU = {"CUDA_VISIBLE_DEVICES": ""}


def rlhf(*words, environ=None):
    """The resolved settings; `words` may begin with a config file."""
    before = [words[0]] if words and not words[0].startswith("-") else []
    return parse("rlhf", [*before, *RLHF, *words[len(before) :]], {**CPU, **(environ or {})})


def problems(mode, *words):
    """What a wrong command line is told."""
    return problems_of(parse, mode, list(words), CPU)


def refused(*words):
    """What a line says that is wrong by these words alone."""
    return problems("rlhf", *RLHF, *words)
