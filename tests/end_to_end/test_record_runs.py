"""The record of a run says what it trained on: `swift replay` finds in it what the run has logged."""

import json

import pytest
import torch
from cli_runs import assert_same_run, completion_rows, log_rows, sampled
from safetensors.torch import load_file

from swift import read_rollouts
from swift.cli.main import main
from swift.observability.rollout_record import recorded_steps
from swift.rl.losses import losses

pytestmark = pytest.mark.slow

RUN = {"max_steps": 4, "num_iterations": 2, "beta": 0.04, "learning_rate": 3e-3, "record_rollouts": "all"}
LOSSES = {"cispo": {"epsilon_high": 5}, "sapo": {}, "gspo": {}, "vespo": {}}
WAYS = {
    "top entropies": {"top_entropy_quantile": 0.5},
    "entropy bonus": {"entropy_coef": 0.01},
    "sampler's ratio": {"old_logprobs": "sampler", "beta": 0},
    "corrected": {"rollout_importance_sampling_mode": "token_truncate", "max_tokens_per_micro_batch": 60},
    "masked sequences": {"off_policy_sequence_mask_delta": 0.0001},
    "parts of a rollout": {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "arriving": {
        "infer_backend": "transformers",
        "vllm_mode": "dedicated",
        "async_generate": "true",
        "streaming_partial_batch": "true",
    },
    "excluded": {"overlong_filter": "true"},
}


def again(folder, step, capsys, *settings):
    """What `swift replay --json true` prints of a step."""
    more = ["--set", *settings] if settings else []
    assert main(["replay", str(folder), "--step", str(step), "--json", "true", *more]) == 0
    return json.loads(capsys.readouterr().out)


def assert_equal_to_the_log(folder, capsys, steps=4):
    logged = {row["step"]: row for row in log_rows(folder)}
    assert recorded_steps(folder) == list(range(1, steps + 1))
    for step in recorded_steps(folder):
        told = again(folder, step, capsys)
        assert told["differences"] == []
        assert told["metrics"]["again"]["loss"] == pytest.approx(logged[step]["loss"], rel=1e-6, abs=1e-6)
    return told["metrics"]["again"]


def test_a_step_is_replayed_to_the_digit_and_differs_under_other_settings(cli, capsys):
    folder = cli.finish("run", **RUN)
    assert len(assert_equal_to_the_log(folder, capsys)) > 10
    told = again(folder, 2, capsys, "loss_type=dapo", "epsilon=0.001", "scale_rewards=none")
    assert told["metrics"]["changed"]["loss"] != pytest.approx(told["metrics"]["again"]["loss"], rel=1e-3)
    assert told["metrics"]["changed"]["clip_ratio/region_mean"] > 0
    rewarded = {(row["group_id"], row["index"]): row for row in completion_rows(folder)}
    rows = list(read_rollouts(folder, [1]))
    assert len(rows) == 8
    for row in rows:
        logged = rewarded[row["group_id"], row["index"]]
        assert row["rewards"] == logged["rewards"] and row["advantage"] == logged["advantage"]
        assert len(row["token_ids"]) == logged["completion_tokens"] == len(row["policy_logprobs"])
        assert row["finish_reason"] == logged["finish_reason"] and row["prompt_id"] == logged["prompt_id"]
    assert main(["replay", str(folder), "--step", "1", "--group", rows[0]["group_id"]]) == 0
    out = capsys.readouterr().out
    assert "equal to the log within 1e-06" in out and out.count("; advantage ") == 4


@pytest.mark.long
@pytest.mark.parametrize("loss", losses)
def test_every_loss_is_replayed(cli, capsys, loss):
    more = {"beta": 0} if loss == "fipo" else {}
    assert_equal_to_the_log(cli.finish(loss, **{**RUN, **more}, loss_type=loss, **LOSSES.get(loss, {})), capsys)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_beside_the_loss_is_replayed(cli, capsys, way):
    given = {**RUN, **WAYS[way]}
    if way == "arriving":
        given["num_iterations"] = 1
    assert_equal_to_the_log(cli.finish("run", **given), capsys)


@pytest.mark.long
def test_the_ranks_write_one_record(cli, capsys):
    assert_equal_to_the_log(cli.finish("run", variables={"NPROC_PER_NODE": 2}, **RUN), capsys)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--step 9", "step 9 is not on record; there are: 3 to 4"),
        ("--set loss_type", "--set: loss_type: not understood; write name=value"),
        ("--set loss_type=ppo", "--loss_type: ppo: not a choice"),
        ("--set teacher_kl_coef=1 teacher_model=m", "--set: teacher_model: the run has not computed teacher_logprobs"),
        ("--set entropy_coef=0.1", "--set: entropy_coef, top_entropy_quantile: the run has not computed entropy"),
        ("--group nobody", "--group: nobody: not in step 4; there are: "),
    ],
)
def test_what_cannot_be_replayed_is_told(recorded, capsys, words, problem):
    assert main(["replay", str(recorded), *words.split()]) == 2
    assert problem in capsys.readouterr().err


@pytest.fixture(scope="module")
def recorded(finished):
    return finished(max_steps=4, record_rollouts="last:2", log_entropy="false")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_training_on_a_record_is_the_run_that_made_it(cli, ranks):
    """Tokens are given, not sampled: the weights have the same bits, and what is logged of the training is equal."""
    variables = {"NPROC_PER_NODE": ranks}
    flags = {**RUN, "top_k": 20, "beta": 0, "parity_check": "off"}
    made = cli.finish("made", variables=variables, **flags)
    again = cli.finish("again", variables=variables, **flags, replay_from=made)
    assert_same_run(again, made)
    assert recorded_steps(again) == list(range(1, 5)), "as the flag says"
    other = cli.finish("other", variables=variables, **{**RUN, "replay_from": made, "loss_type": "dapo"})
    assert sampled(other) == sampled(made) and log_rows(other)[-1]["loss"] != log_rows(made)[-1]["loss"]


def test_what_was_only_sampled_can_be_trained_on(cli):
    """Without updates all rollouts are those of the first weights; training on them begins as the run would have."""
    straight = cli.finish("straight", **RUN)
    only = cli.finish("only", **RUN, rollout_only="true")
    first, last = (load_file(only / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4))
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert log_rows(only)[0]["reward"] == log_rows(straight)[0]["reward"]
    assert all(row["policy_logprobs"] is None for row in read_rollouts(only))
    trained = cli.finish("trained", **{**RUN, "replay_from": only})
    assert log_rows(trained)[0]["loss"] == log_rows(straight)[0]["loss"]
    assert log_rows(trained)[-1]["grad_norm"] > 0


def test_a_record_is_not_longer_than_its_run(cli):
    made = cli.finish("made", **{**RUN, "max_steps": 2})
    code, _, err = cli.start("longer", **{**RUN, "replay_from": made}).wait()
    assert code == 4 and "is not on record (steps 1 to 2)" in err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--replay_from nothing --dry_run true", "--replay_from: nothing: no rollouts on record there"),
        ("--replay_from x --dynamic_sample true", "--dynamic_sample: with --replay_from nothing is sampled"),
        ("--replay_from x --use_vllm true", "--use_vllm: with --replay_from nothing is sampled"),
        ("--rollout_only true --record_rollouts off", "--rollout_only: true: records whole rollouts and nothing else"),
        ("--record_rollouts last", "--record_rollouts: last: not understood; valid: last:N, every:N, all, off"),
    ],
)
def test_what_is_not_on_record_is_refused(cli, capsys, words, problem):
    given = ["--model", str(cli.model), "--dataset", str(cli.material / "train.jsonl"), "--reward_funcs", "format"]
    assert main(["rlhf", "--rlhf_type", "grpo", *given, *words.split()]) == 2
    assert problem in capsys.readouterr().err


def test_a_run_without_a_record_says_so(tmp_path, capsys):
    assert main(["replay", str(tmp_path)]) == 2
    assert "no rollouts on record there" in capsys.readouterr().err
