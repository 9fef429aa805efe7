"""`swift rlhf --rlhf_type ebft` from the command line: resumed, on two ranks, sharded, sampled ahead, and learning."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import (
    ROOT,
    assert_close,
    assert_resumes,
    assert_same_run,
    completion_rows,
    environment,
    log_rows,
    sampled,
)

from swift.cli.main import main
from swift.models.tiny import build_tiny

pytestmark = pytest.mark.slow

LONG = pytest.mark.long
TWO = {"NPROC_PER_NODE": 2}
EBFT = {
    "rlhf_type": "ebft",
    "external_plugins": None,
    "reward_funcs": None,
    "ebft_feature_layers": "0.5",
    "ebft_ce_coef": 0.1,
    "max_steps": 4,
    "save_steps": 2,
}
VLLM = {"use_vllm": "true", "vllm_enforce_eager": "true", "vllm_max_num_seqs": 16, "max_length": 40}
LORA = {"tuner_type": "lora", "lora_rank": 4, "learning_rate": 1e-2}


@pytest.fixture
def flags(cli):
    """Flags of a run on rows with references, the last of which is too long."""
    rows = [{"prompt": f"Count {n}", "ground_truth": "abc" * (n % 4 + 1)} for n in range(20)]
    rows.append({"prompt": "Count", "ground_truth": "a" * 13})
    path = cli.folder / "references.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {**EBFT, "dataset": path}


@pytest.mark.parametrize(
    "own",
    [
        pytest.param({**LORA, "ebft_whitening": "pooled"}, id="lora"),
        pytest.param({"ebft_whitening": "group", "beta": 0.05}, id="full", marks=LONG),
        pytest.param({"streaming": "true", "shuffle_buffer_size": 4}, id="stream", marks=LONG),
    ],
)
def test_a_resumed_run_is_the_whole_one_bit_for_bit(cli, flags, own):
    straight = cli.finish("straight", **flags, **own)
    assert "streaming" in own or "1 row deleted for the length" in cli.printed
    kl = " + 0.05 KL" if "beta" in own else ""
    assert f"ebft (arXiv:2603.12248): 1 sum -A lp / N, A by rloo + 0.1 cross-entropy of references{kl}" in cli.printed
    rows = log_rows(straight)
    assert all({"ebft/cfm_loss", "ebft/ce_loss", "ebft/rl_loss"} <= row.keys() for row in rows)
    assert {row["ebft/skipped_rows"] for row in rows} == {1.0} or "streaming" in own
    assert all(set(row["rewards"]) == {"energy"} for row in completion_rows(straight))
    assert_resumes(cli, straight, 2, **flags, **own)


TURNS = [{"role": "user", "content": "more"}, {"role": "assistant", "content": "de"}]


@pytest.mark.parametrize("turns", [[], pytest.param(TURNS, marks=LONG)], ids=["answers", "turns"])
def test_a_step_is_replayed_and_a_record_trained_on(cli, flags, capsys, turns):
    rows = [{"prompt": f"Count {n}", "ground_truth": "abc", "remaining_turns": turns} for n in range(8)]
    flags["dataset"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        **flags,
        "max_steps": 2,
        "save_steps": 1,
        "record_rollouts": "all",
        "parity_check": "off",
        "max_completion_length": 40,
    }
    made = cli.finish("made", **given)
    for step, model in ((1, cli.model), (2, "checkpoint-1")):
        logged = log_rows(made)[step - 1]
        for more in ([], ["--model", str(model)]):
            assert main(["replay", str(made), "--step", str(step), "--json", "true", *more]) == 0
            told = json.loads(capsys.readouterr().out)
            assert told["differences"] == []
            for name in ("loss", *(["grad_norm", "ebft/ce_loss"] if more else [])):
                assert told["metrics"]["again"][name] == pytest.approx(logged[name], rel=1e-6, abs=1e-6)
    again = [*("replay", str(made), "--json", "true", "--set")]
    assert main([*again, "ebft_ce_coef=0.2"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    more = metrics["changed"]["loss"] - metrics["again"]["loss"]
    assert more == pytest.approx(0.1 * metrics["logged"]["ebft/ce_loss"], rel=1e-5)
    assert main([*again, "ebft_rl_coef=2"]) == 2
    assert "--set: ebft_rl_coef: 2.0: a replay keeps what the run's has given" in capsys.readouterr().err
    assert_same_run(cli.finish("again", **given, replay_from=made), made)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model whose heads are as wide as vLLM's kernels for CPUs want them."""
    return build_tiny(tmp_path_factory.mktemp("tiny") / "qwen2", arch="qwen2", size="tiny")


@LONG
@pytest.mark.parametrize(
    "own",
    [
        pytest.param(LORA, id="lora"),
        pytest.param({}, id="full"),
        pytest.param({"deepspeed": "zero3"}, id="zero3"),
        pytest.param({"deepspeed": "zero3", **LORA}, id="zero3-lora"),
        pytest.param({"fsdp": "full_shard"}, id="fsdp"),
        pytest.param({"fsdp": "full_shard", **LORA}, id="fsdp-lora"),
    ],
)
def test_two_ranks_make_the_run_of_one(cli, flags, own):
    alone = {name: value for name, value in own.items() if name not in ("deepspeed", "fsdp")}
    more = {"ebft_whitening": "pooled", "gradient_accumulation_steps": 1}
    one = cli.finish("one", **{**flags, **more, **alone, "per_device_train_batch_size": 8})
    two = cli.finish("two", variables=TWO, **{**flags, **more, **own, "per_device_train_batch_size": 4})
    assert [row[4] for row in sampled(two)] == [row[4] for row in sampled(one)]
    assert_close(two, one, "loss", "grad_norm", "reward", "ebft/cfm_loss", "ebft/ce_loss", "ebft/alignment")


@LONG
@pytest.mark.parametrize("more", [{"in_flight_updates": "true"}, {"prefetch_depth": 2, "vllm_sync_interval": 2}])
def test_a_dedicated_engine_samples_ahead(cli, flags, more):
    ahead = {"vllm_mode": "dedicated", "infer_backend": "transformers", "async_generate": "true", **more}
    folder = cli.finish("ahead", **flags, **ahead)
    rows = log_rows(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["grad_norm"] > 0 and row["ratio/mean"] == 1 for row in rows)
    assert rows[-1]["off_policy/max"] >= 1


@LONG
@pytest.mark.parametrize("own", [{"vllm_mode": "colocate", "offload_model": "true"}, {"vllm_mode": "dedicated"}])
def test_vllm_samples_what_is_compared(cli, flags, tiny, own):
    """Log-probs are the trainer's, a resumed run ends alike, and equal completions have the rewards of any engine."""
    given = {**flags, **VLLM, **own, "model": tiny}
    straight = cli.finish("straight", **given)
    rows = log_rows(straight)
    assert max(row["mismatch/logp_abs_diff_max"] for row in rows) <= 1e-5
    assert all(row["grad_norm"] > 0 and row["ratio/mean"] == 1 for row in rows)
    assert_resumes(cli, straight, 2, **given)
    greedy = {**given, "top_k": 1, "max_steps": 1}
    theirs = cli.finish("greedy", **greedy)
    ours = cli.finish("own", **{**greedy, **dict.fromkeys(("use_vllm", *own, *VLLM.keys() - {"max_length"}))})
    assert [row[4] for row in sampled(theirs)] == [row[4] for row in sampled(ours)]
    assert_close(theirs, ours, "reward", "ebft/alignment", "ebft/cfm_loss", "ebft/ce_loss")


@LONG
def test_conversations_train_every_turn(cli, flags):
    rows = [{"prompt": f"Count {n}", "ground_truth": "abc", "remaining_turns": TURNS} for n in range(8)]
    flags["dataset"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {**flags, "max_completion_length": 40, "ebft_embed_method": "completion_mean"}
    folder = cli.finish("talk", **given)
    rows = log_rows(folder)
    assert all(row["rollout/num_turns/mean"] > 1 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    again = cli.finish("again", **given)
    assert_same_run(again, folder)


@LONG
@pytest.mark.timeout(900)
def test_held_out_completions_come_closer_to_their_references(tmp_path):
    """The example script: a model that has seen few worked sums, on prompts that it is not trained on."""
    environ = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    script = ["bash", "examples/train/ebft/structured.sh", str(tmp_path)]
    subprocess.run(script, cwd=ROOT, env=environ, check=True, timeout=800, stdout=subprocess.DEVNULL)
    before, after = (log_rows_of_evaluation(tmp_path / name)[-1] for name in ("before", "trained"))
    assert after["eval_ebft/cfm_loss"] < 0.7 * before["eval_ebft/cfm_loss"]
    assert after["eval_ebft/alignment"] > before["eval_ebft/alignment"]


def log_rows_of_evaluation(folder):
    return [row for row in log_rows(folder) if "eval_reward" in row]
