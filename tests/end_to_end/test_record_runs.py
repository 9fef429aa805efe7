"""The record of a run says what it trained on: `swift replay` finds in it what the run has logged."""

import json
import shutil

import numpy as np
import pytest
import torch
from cli_runs import assert_same_run, completion_rows, log_rows, sampled
from safetensors.torch import load_file
from transformers import AutoTokenizer

from swift import read_rollouts
from swift.cli.main import main
from swift.models.tiny import build_tiny
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


def again(folder, step, capsys, *settings, model=None):
    """What `swift replay --json true` prints of a step."""
    more = (["--set", *settings] if settings else []) + (["--model", str(model)] if model else [])
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


def test_a_kl_in_the_reward_is_replayed_and_weighed_anew(cli, capsys):
    """Both runs sample alike until their first updates differ."""
    reference = build_tiny(cli.folder / "reference", size="nano", seed=1)
    flags = {**RUN, "kl_in_reward": "true", "ref_model": reference, "max_steps": 2}
    folder = cli.finish("run", **flags)
    assert_equal_to_the_log(folder, capsys, steps=2)
    other = cli.finish("other", **{**flags, "beta": 0.5})
    assert sampled(other)[:8] == sampled(folder)[:8]
    metrics = again(folder, 1, capsys, "beta=0.5")["metrics"]
    assert metrics["changed"]["loss"] == pytest.approx(log_rows(other)[0]["loss"], rel=1e-6, abs=1e-6)
    assert metrics["changed"]["loss"] != pytest.approx(metrics["again"]["loss"], rel=1e-2)
    assert main(["replay", str(folder), "--set", "kl_in_reward=false"]) == 2
    assert "--set: beta: the run has not computed ref_logprobs" in capsys.readouterr().err


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
        ("--set kl_in_reward=true beta=0.1", "--set: kl_in_reward: the run has not computed reward_kl, so the record"),
        ("--set entropy_coef=0.1", "--set: entropy_coef, top_entropy_quantile: the run has not computed entropy"),
        ("--group nobody", "--group: nobody: not in step 4; there are: "),
        ("--model checkpoint-9", "checkpoint-9: no such folder; nearest: "),
        ("--model ./nothing", "--model: ./nothing: no such folder"),
        ("--model checkpoint-4 --step 9", "step 9 is not on record; there are: 3 to 4"),
        ("--model checkpoint-4 --set beta=0.1", "--set: beta: the run has not computed ref_logprobs"),
    ],
)
def test_what_cannot_be_replayed_is_told(recorded, capsys, words, problem):
    assert main(["replay", str(recorded), *words.split()]) == 2
    assert problem in capsys.readouterr().err


def test_advantages_are_made_again_only_by_settings_that_make_them(recorded, capsys, monkeypatch):
    of_this_step = {"group": 7.0, "none": 5.0}  # as if those of the run had come from more steps
    monkeypatch.setattr(
        "swift.replay.advantages_of", lambda rows, _, args: [of_this_step[args.scale_rewards]] * len(rows)
    )
    metrics = again(recorded, 4, capsys, "epsilon_high=0.2")["metrics"]
    assert metrics["changed"] == metrics["again"]
    assert again(recorded, 4, capsys, "scale_rewards=none")["metrics"]["changed"] != metrics["again"]


@pytest.mark.parametrize("kind", ["other tokens", "fewer tokens"])
def test_a_model_of_another_vocabulary_is_refused(recorded, capsys, tmp_path, kind):
    checkpoint = shutil.copytree(recorded / "checkpoint-4", tmp_path / "other")
    file = checkpoint / "tokenizer.json"
    written = json.loads(file.read_text())
    vocab = written["model"]["vocab"]
    if kind == "other tokens":
        vocab["t"], vocab["v"] = vocab["v"], vocab["t"]
        problem = (
            f"--model: {checkpoint}: has another vocabulary than the tokens on record; give a checkpoint of the run"
        )
    else:
        config = checkpoint / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 100}))
        problem = "its embedding 100 rows; is the tokenizer that of another model?"
    file.write_text(json.dumps(written))
    assert main(["replay", str(recorded), "--model", str(checkpoint)]) == 2
    assert problem in capsys.readouterr().err


def test_the_tokens_that_moved_are_shown_and_ratios_are_to_the_policy_on_record(recorded, capsys):
    group = next(row["group_id"] for row in read_rollouts(recorded, [3]) if row["policy_logprobs"] is not None)
    words = ["replay", str(recorded), "--step", "3", "--group", group]
    for model, ratio, moved in (("checkpoint-2", "; ratio 1.000000", 0), ("checkpoint-4", "; ratio ", 10)):
        assert main([*words, "--model", model]) == 0
        out = capsys.readouterr().out
        assert out.count(ratio) == 4 and out.count(", token ") == moved and "  grad_norm " in out
        assert ("equal to the log within 1e-06" in out) == (model == "checkpoint-2")
    assert "; ratio 1.000000" not in out and "log-probs that moved most:\n" in out


@pytest.fixture(scope="module")
def recorded(finished):
    return finished(max_steps=4, record_rollouts="last:2", log_entropy="false")


# --- with a model -----------------------------------------------------------------------------------------------------

SAVED = {"max_steps": 3, "save_steps": 1, "record_rollouts": "all", "learning_rate": 3e-3}
POLICIES = {
    "full": {"num_iterations": 2, "beta": 0.04},
    "lora": {"tuner_type": "lora", "beta": 0.04},
    "full without old log-probs": {},
    "lora with old log-probs": {"tuner_type": "lora", "num_iterations": 2},
    "pissa": {"tuner_type": "lora", "init_weights": "pissa", "lora_rank": 4},
    "entropies": {"entropy_coef": 0.01, "top_entropy_quantile": 0.5, "max_tokens_per_micro_batch": 60},
    "corrected": {"num_iterations": 2, "rollout_importance_sampling_mode": "token_truncate", "loss_type": "dapo"},
}
MADE_BY = (None, "checkpoint-1", "checkpoint-2")
"""The model of each step; None is the one that the run starts from."""


def assert_as_logged(found, logged):
    for name in ("loss", "grad_norm"):
        assert found[name] == pytest.approx(logged[name], rel=1e-6, abs=1e-9), name
    assert logged["grad_norm"] != 0


@pytest.mark.parametrize(
    "way", [*list(POLICIES)[:2], *(pytest.param(way, marks=pytest.mark.long) for way in list(POLICIES)[2:])]
)
def test_with_the_model_of_a_step_loss_and_gradient_are_those_of_the_log(cli, capsys, way):
    folder = cli.finish("run", **SAVED, **POLICIES[way])
    for step, (model, logged) in enumerate(zip(MADE_BY, log_rows(folder), strict=True), 1):
        told = again(folder, step, capsys, model=model or cli.model)
        assert told["differences"] == []
        assert_as_logged(told["metrics"]["again"], logged)


@pytest.mark.parametrize("tuner", ["full", pytest.param("lora", marks=pytest.mark.long)])
def test_other_settings_and_other_models_give_what_runs_with_them_log(cli, capsys, tuner):
    """The first update of a rollout has ratio 1 under any clipping, so the second has the same samples and model."""
    flags = {**SAVED, "num_iterations": 2, "max_steps": 2, "tuner_type": tuner}
    folder = cli.finish("run", **flags)
    other = cli.finish("other", **flags, epsilon=0.001, epsilon_high=0.002)
    assert sampled(other) == sampled(folder)
    told = again(folder, 2, capsys, "epsilon=0.001", "epsilon_high=0.002", model="checkpoint-1")
    assert_as_logged(told["metrics"]["changed"], log_rows(other)[1])
    assert told["metrics"]["changed"]["grad_norm"] != pytest.approx(told["metrics"]["again"]["grad_norm"], rel=1e-3)

    told = again(folder, 1, capsys, model=folder / "checkpoint-1")  # it made the second update on the same tokens
    assert_as_logged(told["metrics"]["again"], log_rows(folder)[1])
    before, after = (list(read_rollouts(folder, [step])) for step in (1, 2))
    rows = {(old["group_id"], old["index"]): (old, new) for old, new in zip(before, after, strict=True)}
    changes = [
        abs(new["policy_logprobs"] - old["policy_logprobs"])[old["trained"]]
        for old, new in rows.values()
        if old["policy_logprobs"] is not None
    ]
    assert len(told["moved"]) == 10
    largest = sorted(np.concatenate(changes).tolist(), reverse=True)[:10]
    assert [abs(one["after"] - one["before"]) for one in told["moved"]] == pytest.approx(largest, rel=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(cli.model)
    for one in told["moved"]:
        old, new = rows[one["group_id"], one["index"]]
        place = one["position"]
        assert one["before"] == pytest.approx(old["policy_logprobs"][place], abs=1e-6)
        assert one["after"] == pytest.approx(new["policy_logprobs"][place], abs=1e-5)
        assert one["token"] == tokenizer.decode([old["token_ids"][place]])


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
