"""`swift rlhf` in two processes under ZeRO and FSDP: the run of one without them, through a kill too."""

import json
import shutil

import pytest
from cli_runs import assert_same, completion_rows, error_lines, log_rows
from safetensors.torch import load_file
from trap import set_trap

from swift.models.tiny import build_tiny
from swift.trainers.checkpoint import commit_checkpoint, list_checkpoints, verify

pytestmark = pytest.mark.slow

TWO = {"NPROC_PER_NODE": 2}
SPREAD = {"zero2": {"deepspeed": "zero2"}, "zero3": {"deepspeed": "zero3"}, "fsdp": {"fsdp": "full_shard"}}
ON_SHARDS = {"zero3": {"ds3_gather_for_generation": "false"}}
"""What only reinforcement learning has."""
FLAGS = {"per_device_train_batch_size": 2, "max_steps": 4, "save_steps": 4, "beta": 0.05}


def weights(folder):
    checkpoint = list_checkpoints(folder)[-1]
    verify(checkpoint)
    return load_file(checkpoint / "model.safetensors")


@pytest.mark.long
def test_two_processes_that_spread_the_model_make_the_run_of_one(cli):
    one = cli.finish("one", **{**FLAGS, "per_device_train_batch_size": 4})
    expected = weights(one)
    for name, flags in SPREAD.items():
        folder = cli.finish(name, variables=TWO, **FLAGS, **flags, **ON_SHARDS.get(name, {}))
        assert f"2 x cpu, {({'zero2': 'ZeRO-2', 'zero3': 'ZeRO-3', 'fsdp': 'FSDP'})[name]};" in cli.printed
        assert [row["completion"] for row in completion_rows(folder)] == [
            row["completion"] for row in completion_rows(one)
        ]
        for mine, other in zip(log_rows(folder), log_rows(one), strict=True):
            for key in ("loss", "grad_norm", "kl", "reward", "learning_rate"):
                assert mine[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), (name, key)
        ours = weights(folder)
        assert ours.keys() == expected.keys()
        assert max(float((ours[key] - expected[key]).abs().max()) for key in ours) < 1e-5, name


@pytest.mark.long
@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_shards_on_the_host_make_the_same_run_and_go_on_without(tuner, cli):
    name = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}[tuner]
    flags = {**FLAGS, **SPREAD["fsdp"], "tuner_type": tuner, "save_steps": 2, "variables": TWO}
    plain = cli.finish("plain", **flags)
    host = cli.finish("host", **flags, fsdp_offload_params="true")
    assert "FSDP on the host" in cli.printed
    expected = load_file(plain / "checkpoint-4" / name)
    assert_same(load_file(host / "checkpoint-4" / name), expected)
    cli.finish("host", **flags, resume_from_checkpoint=host / "checkpoint-2")
    assert_same(load_file(host / "checkpoint-4" / name), expected)


@pytest.mark.long
def test_processes_without_a_part_of_an_adapter_train_the_adapter_of_one(cli):
    """Two rows of each lora_A over three processes; the optimizer and its checkpoints must tell empty parts apart."""
    flags = {**FLAGS, "tuner_type": "lora", "lora_rank": 2, "max_steps": 2, "save_steps": 1}
    flags |= {"num_generations": 6, "generation_batch_size": 6}
    one = cli.finish("one", **{**flags, "per_device_train_batch_size": 6})
    folder = cli.finish("three", variables={"NPROC_PER_NODE": 3}, **flags, **SPREAD["fsdp"])
    name = "checkpoint-2/adapter_model.safetensors"
    expected, ours = load_file(one / name), load_file(folder / name)
    assert max(float((ours[key] - expected[key]).abs().max()) for key in expected) < 1e-5
    resumed = {"resume_from_checkpoint": folder / "checkpoint-1"}
    cli.finish("three", variables={"NPROC_PER_NODE": 3}, **flags, **SPREAD["fsdp"], **resumed)
    assert_same(load_file(folder / name), ours)


@pytest.mark.parametrize(
    ("way", "files"),
    [
        pytest.param("zero2", ["mp_rank_*", "zero_pp_rank_*"], marks=pytest.mark.long),
        ("zero3", ["zero_pp_rank_*_model_*", "zero_pp_rank_*_optim_*"]),
        ("fsdp", ["scheduler.pt"]),
    ],
)
def test_a_sharded_checkpoint_that_holds_a_pickle_runs_nothing(way, files, cli):
    flags = {**FLAGS, **SPREAD[way], "max_steps": 1, "save_steps": 1}
    saved = cli.finish(way, **flags) / "checkpoint-1"
    for number, name in enumerate(files):
        folder, owned = cli.folder / f"{way}-{number}", cli.folder / "owned"
        shutil.copytree(saved, folder / saved.name)
        set_trap(folder / saved.name, name, owned)
        resumed = {"max_steps": 2, "resume_from_checkpoint": folder / saved.name}
        code, _, err = cli.start(folder.name, **{**flags, **resumed}).wait()
        assert code == 2, err
        assert "objects that could run code" in " ".join(error_lines(err)), err
        assert not owned.exists(), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("zero2", "global_step1/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("zero3", "global_step1/zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("fsdp", "fsdp_state/shard-00002-model-00001-of-00001.safetensors"),
        ("fsdp", "fsdp_state/values.json"),
    ],
)
def test_shards_that_are_cut_or_of_another_model_are_refused_in_a_line_by_all_ranks(way, name, cli):
    """The manifest fits them: whoever made the checkpoint made it so."""
    flags = {"variables": TWO, **FLAGS, **SPREAD[way], "max_steps": 1, "save_steps": 1}
    saved = cli.finish("own", **flags) / "checkpoint-1"
    larger = build_tiny(cli.folder / "larger", size="tiny")
    others = cli.finish("other", **{**flags, "model": larger}) / "checkpoint-1"
    content = (saved / name).read_bytes()
    for kind, shard in (("cut", content[: len(content) // 2]), ("other's", (others / name).read_bytes())):
        folder = cli.folder / f"{way} {kind}"
        shutil.copytree(saved, folder / "unsealed", ignore=shutil.ignore_patterns("manifest.json"))
        (folder / "unsealed" / name).write_bytes(shard)
        commit_checkpoint(folder / "unsealed", folder / saved.name, step=1)
        resumed = {"max_steps": 2, "resume_from_checkpoint": folder / saved.name}
        code, _, err = cli.start(folder.name, **{**flags, **resumed}).wait()
        assert code == 2, err
        assert "cannot be loaded (" in " ".join(error_lines(err)), err
        assert "Traceback" not in err


@pytest.mark.long
def test_a_kill_under_zero2_and_a_resume_change_nothing(cli):
    flags = {**FLAGS, "deepspeed": "zero2", "max_steps": 8, "save_steps": 2}
    straight = cli.finish("straight", variables=TWO, **flags)
    run = cli.start("killed", variables=TWO, **flags)
    assert run.until(lambda: run.step >= 5 and any(run.folder.glob("checkpoint-4")))
    run.kill()
    folder = cli.finish("killed", variables=TWO, **flags, resume_from_checkpoint="last")
    assert_same(weights(folder), weights(straight))
    assert_same(log_rows(folder), log_rows(straight))
    assert_same(completion_rows(folder), completion_rows(straight))


@pytest.mark.long
@pytest.mark.parametrize("way", ["zero3", "fsdp"])
def test_supervised_tuning_with_a_spread_model_is_that_of_one_process(cli, way):
    rows = [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"it is {7 * i}"}]}
        for i in range(20)
    ]
    (cli.folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "mode": "sft", "dataset": cli.folder / "chats.jsonl", "tuner_type": "full", "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3, "max_steps": 4, "save_steps": 2, "logging_steps": 1,
    }  # fmt: skip
    expected = weights(cli.finish("one", **flags, per_device_train_batch_size=4))
    ours = weights(cli.finish(way, variables=TWO, **flags, per_device_train_batch_size=2, **SPREAD[way]))
    assert max(float((ours[key] - expected[key]).abs().max()) for key in expected) < 1e-5


CHATS = [
    {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"it is {7 * i}"}]}
    for i in range(24)  # three steps fill an epoch
]
OTHERS = {1: {"gradient_accumulation_steps": 4}, 4: {"gradient_accumulation_steps": 1}}
"""The same batches on other numbers of processes."""


@pytest.mark.parametrize(
    ("mode", "way", "processes"),
    [
        ("rlhf", "fsdp", 1),
        *[
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("rlhf", "fsdp", 4), ("rlhf", "ddp", 1), ("sft", "fsdp", 4), ("sft", "ddp", 1))
        ],
    ],
)
def test_other_processes_go_on_with_the_run_of_two(mode, way, processes, cli):
    """A checkpoint that was written while training went on, resumed where the batches are shared in another way."""
    flags = {**FLAGS, "save_steps": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "async_save": "true"}
    flags |= SPREAD.get(way, {})
    if mode == "sft":
        (cli.folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
        flags |= {"mode": "sft", "dataset": cli.folder / "chats.jsonl", "tuner_type": "full", "logging_steps": 1}
        del flags["beta"]
    straight = cli.finish("straight", variables=TWO, **flags)
    folder = cli.folder / "moved"
    shutil.copytree(straight / "checkpoint-2", folder / "checkpoint-2")
    flags |= {**OTHERS[processes], "resume_from_checkpoint": folder / "checkpoint-2"}
    cli.finish("moved", variables={"NPROC_PER_NODE": processes}, **flags)
    expected, ours = weights(straight), weights(folder)
    start = load_file(folder / "checkpoint-2" / "model.safetensors")
    assert max(float((ours[key] - expected[key]).abs().max()) for key in expected) < 1e-5
    assert max(float((ours[key] - start[key]).abs().max()) for key in expected) > 2e-4
    for mine, other in zip(log_rows(folder), log_rows(straight)[-2:], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)
    if mode == "rlhf":
        rows = [[row["completion"] for row in completion_rows(run) if row["step"] > 2] for run in (folder, straight)]
        assert rows[0] == rows[1] and len(rows[0]) > 0
