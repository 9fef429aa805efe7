"""Sleep, offload and publishing in groups of layers change no bit of a whole run with vLLM in the trainer's process."""

import json
import re

import pytest
from cli_runs import Cli, assert_same_run, log_rows

from swift.models.tiny import build_tiny

pytestmark = pytest.mark.slow

RUN = {
    "max_steps": 5, "save_steps": 5, "max_length": 40, "gradient_checkpointing": "false", "use_vllm": "true",
    "vllm_enforce_eager": "true", "vllm_max_num_seqs": 16, "tuner_type": "lora", "lora_dropout": 0.1,
    "learning_rate": 1e-2, "val_dataset": None, "eval_steps": 2,
}  # fmt: skip
FLAGS = {
    "sleep_level": 1, "offload_model": "true", "offload_optimizer": "true", "gc_collect_after_offload": "true",
    "move_model_batches": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """vLLM on a CPU needs heads of at least 32."""
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny", size="tiny")


@pytest.fixture(scope="module")
def plain(model, material, tmp_path_factory):
    """The run without any of it."""
    _, folder = material
    with Cli(model, folder, tmp_path_factory.mktemp("plain")) as runs:
        return runs.finish("plain", **RUN | {"val_dataset": folder / "val.jsonl"})


def rank_log(folder):
    return (folder / "logs" / "attempt-1" / "rank-0.log").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_run_that_sleeps_and_offloads_equals_the_plain_run(cli, model, plain, level):
    val = cli.material / "val.jsonl"
    flags = {**RUN, **FLAGS, "sleep_level": level, "val_dataset": val, "model": model}
    folder = cli.finish(f"level{level}", **flags)
    assert_same_run(folder, plain)
    assert len({row["loss"] for row in log_rows(folder) if "loss" in row}) == 5
    log = rank_log(folder)
    steps = re.findall(r"mem step=(\d+) phase=generate dev=cpu .* engine_w=\d+ engine_kv=\d+ freed=", log)
    assert steps == ["0", "1", "2", "2", "3", "4", "4", "5"], "five rollouts and three evaluations"
    asleep = re.findall(r"mem step=\d+ phase=after .* engine_kv=(\d+) ", log)
    assert set(asleep) == {"0"}, "the KV cache is released while the trainer works"
    assert log.count("moves nothing on a CPU, where host and device are the same memory") == 1
    assert ("weights stay resident" in log) == (level == 2)
    raw = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    assert all(row["memory/rss_mib_max"] > 100 for row in raw if "loss" in row)


@pytest.mark.long
def test_adapters_alone_reach_an_engine_that_sleeps_between_steps(cli, model):
    """They come while the weights are awake and the KV cache is not."""
    lora = {"lora_dropout": 0, "vllm_enable_lora": "true", "vllm_max_lora_rank": 8, "max_steps": 4, "save_steps": 4}
    sleep = FLAGS | {"sleep_level": 2, "move_model_batches": None}
    folder = cli.finish("sleeping", **RUN | lora | sleep, model=model)
    gaps = [row["mismatch/logp_abs_diff_max"] for row in log_rows(folder) if row.get("frac_reward_zero_std", 1) < 1]
    assert len(gaps) > 1 and max(gaps) <= 1e-5
    assert "base weights are kept: only adapters are synced" in rank_log(folder)
