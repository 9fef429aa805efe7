"""The record of a run says what it trained on: `swift replay` finds in it what the run has logged."""

import json

import pytest
from cli_runs import completion_rows, log_rows

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
    "arriving": {"vllm_mode": "dedicated", "async_generate": "true", "streaming_partial_batch": "true"},
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
        assert len(told["metrics"]["again"]) > 5 and told["metrics"]["again"]["loss"] == pytest.approx(
            logged[step]["loss"], rel=1e-6, abs=1e-6
        )


def test_a_step_is_replayed_to_the_digit_and_differs_under_other_settings(cli, capsys):
    folder = cli.finish("run", **RUN)
    assert_equal_to_the_log(folder, capsys)
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


def test_a_run_without_a_record_says_so(tmp_path, capsys):
    assert main(["replay", str(tmp_path)]) == 2
    assert "no rollouts on record there" in capsys.readouterr().err
