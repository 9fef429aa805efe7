"""Settings of `--rollout_source atropos`: what follows from it, other names, and what it excludes."""

import shlex
import sys
from pathlib import Path

import pytest
from command_lines import CPU, problems, rlhf

from swift.arguments import parse
from swift.errors import ConfigError

GOOD = "--rlhf_type grpo --model m --rollout_source atropos --max_steps 5 "
OWN = GOOD + f"--atropos_env '{sys.executable} e.py serve' "
SERVED = GOOD + "--vllm_server_host 10.0.0.2 "


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The message API."""
    monkeypatch.setattr("swift.rollout.sources.atropos.processes.library", lambda: Path("atropos"))


def read(text):
    return parse("rlhf", shlex.split(text), CPU).args


def test_the_rest_follows():
    args = read(OWN)
    assert (args.reward_funcs, args.temperature, args.vllm_mode, args.use_vllm) == (
        ["environment"],
        1.0,
        "server",
        True,
    )
    assert args.rollout_importance_sampling_mode == "token_truncate"
    assert read(OWN + "--infer_backend transformers").use_vllm is False
    assert read(OWN + "--temperature 0.7 --reward_funcs environment accuracy").temperature == 0.7
    assert read(SERVED).vllm_mode == "server"


def test_commands_are_one_word_each():
    args = read(GOOD + "--atropos_env 'sh a.sh serve' 'sh b.sh serve --env.group_size 8'")
    assert args.atropos_env == ["sh a.sh serve", "sh b.sh serve --env.group_size 8"]


def test_flags_of_the_example_trainer_are_aliases():
    args = read(SERVED.replace("max_steps", "training-steps") + "--kl-coef 0.1 --clip-eps 0.3 --atropos-ratio rollout "
                "--atropos_require_logprobs true")  # fmt: skip
    assert (args.max_steps, args.beta, args.epsilon, args.old_logprobs) == (5, 0.1, 0.3, "sampler")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD, "--rollout_source: atropos: environments sample with a policy server; give --vllm_server_host"),
        (OWN + "--dataset d.jsonl", "--dataset: d.jsonl: prompts are those of the environments; leave it out"),
        (OWN.replace("--max_steps 5", ""), "--max_steps: -1: environments have no end; give --max_steps"),
        (OWN + "--vllm_mode colocate", "--vllm_mode: colocate: environments sample with a server; --vllm_mode server"),
        (OWN + "--vllm_mode dedicated", "--vllm_mode: dedicated: environments sample with a server"),
        (OWN + "--gym_env math_env", "--rollout_source: atropos: together with --gym_env: math_env"),
        (OWN + "--rollout_func f.py:g", "--rollout_source: atropos: together with --rollout_func: f.py:g"),
        (OWN + "--val_dataset v.jsonl", "--val_dataset: v.jsonl: environments evaluate themselves; leave it out"),
        (OWN + "--split_dataset_ratio 0.1", "--split_dataset_ratio: 0.1: environments evaluate themselves"),
        (OWN + "--old_logprobs sampler", "--old_logprobs: sampler: needs the sampler's log-probs of every sample"),
        (OWN + "--kl_in_reward true", "--kl_in_reward: true: needs the sampler's log-probs of every sample"),
        (OWN + "--reroll_start_fraction 0.5", "--reroll_start_fraction: 0.5: environments choose the prompts; use 1"),
        (OWN + "--in_flight_updates true", "--in_flight_updates: true: environments, not this run, sample"),
        (GOOD + "--atropos_env no-such serve", "--atropos_env: no-such: no such program; correct the command"),
        (GOOD + '--atropos_env "\'"', "--atropos_env: ': No closing quotation; correct the quotation marks"),
        (OWN + "--atropos_timeout 0", "--atropos_timeout: 0: out of range"),
        (OWN + "--rollout_source gym", "--rollout_source: gym: not a choice; valid: engine, atropos"),
        (OWN + "--atropos_env", "--atropos_env: none: no value; give one"),
        (OWN + "--weight_bridge shared_vllm --tuner_type full", "--weight_bridge: shared_vllm: servers have a copy of"),
    ],
)
def test_what_it_excludes(text, said):
    found = problems("rlhf", *shlex.split(text))
    assert any(problem.startswith(said) for problem in found), found


def test_without_atroposlib_there_is_no_message_api_of_our_own(monkeypatch):
    monkeypatch.setattr("swift.rollout.sources.atropos.processes.library", lambda: None)
    with pytest.raises(ConfigError, match="needs atroposlib, which is not installed; pip install -r requirements/atro"):
        read(OWN)
    read(OWN + "--atropos_url http://h:1")


@pytest.mark.parametrize("setting", ["atropos_url http://h:1", "atropos_timeout 5", "use_env_advantages true"])
def test_without_atropos_its_settings_have_no_effect(setting):
    notes = rlhf(*f"--{setting}".split()).notes
    assert any(setting.split()[0] in note and "rollout_source atropos" in note for note in notes)
