"""`--dry_run true`: says the plan, writes nothing, and finds what a run would fail on."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from swift.arguments import parse
from swift.cli.main import main
from swift.models.tiny import build_tiny
from swift.trainers.grpo.arguments import max_prompt_length


@pytest.fixture
def folder(desk):
    rows = [{"query": f"{n} + 1?", "solution": str(n + 1), "level": n} for n in range(101)]
    desk.rows(rows)
    turns = [(("user", row["query"]), ("assistant", row["solution"])) for row in rows[:10]]
    desk.rows([{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in turns], "chats.jsonl")
    return desk.folder


def rlhf(model, *words):
    command = (
        f"rlhf --rlhf_type grpo --model {model} --dataset rows.jsonl --reward_funcs accuracy format --dry_run true"
    )
    return [*command.split(), "--per_device_train_batch_size", "16", *words]


def test_it_prints_settings_placement_batches_columns_and_rewards(tiny_model, folder, capsys):
    assert main(rlhf(tiny_model, "--train_type", "full")) == 0
    text = capsys.readouterr().out
    assert '= "full"  (command line: --train_type)' in text
    assert "= 1e-05  (1e-5 with tuner_type full)" in text
    assert "placement: in_process; 1 training process on" in text
    assert "2 prompts x 8 completions; 101 rows, 50 steps per epoch, 150 steps in all" in text
    assert "the last 1 row of each epoch left out" in text
    assert "prompt <- query; to rewards: solution, level" in text
    assert "reward accuracy: weight 1; ground truths of the first rows: 1 1 1 1; empty answers: 0 0 0 0" in text


def test_control_characters_of_columns_are_written_out(tiny_model, folder, capsys):
    rows = [json.loads(line) | {"\x1b[2Jlevel": 1} for line in Path("rows.jsonl").read_text().splitlines()]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(rlhf(tiny_model)) == 0
    text = capsys.readouterr().out
    assert "\\x1b[2Jlevel" in text and "\x1b" not in text


def test_so_are_those_of_values_and_of_where_they_come_from(tiny_model, folder, capsys):
    (folder / "a\x1b[31m\nb.yaml").write_text('run_name: "x\\n\\e[2J\\x9b1m"\n')
    words = rlhf(tiny_model)
    assert main([words[0], "a\x1b[31m\nb.yaml", *words[1:]]) == 0
    out, err = capsys.readouterr()
    assert r'= "x\n\u001b[2J\x9b1m"  (file: run_name (a\x1b[31m\nb.yaml:1))' in out
    assert "\x1b" not in out + err and "\x9b" not in out


def test_rows_may_be_streamed_beside_evaluation_rows(tiny_model, folder, capsys):
    assert main(rlhf(tiny_model, "--streaming", "true", "--max_steps", "3", "--val_dataset", "rows.jsonl")) == 0
    assert "streaming, 3 steps" in capsys.readouterr().out


def test_it_promises_no_length_of_an_epoch_where_groups_are_replaced(tiny_model, folder, capsys):
    assert main(rlhf(tiny_model, "--dynamic_sample", "true", "--max_resample_times", "1")) == 0
    text = capsys.readouterr().out
    assert "101 rows, 25 to 50 steps per epoch, because replaced groups draw rows too, 150 steps in all" in text
    assert "left out" not in text


@pytest.mark.parametrize(("stage", "refused"), [(3, True), (2, False)])
def test_a_rollout_function_is_refused_where_a_deepspeed_file_spreads_the_weights(
    tiny_model, folder, capsys, stage, refused
):
    (folder / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    (folder / "rounds.py").write_text("def mine(prompts, rollout):\n    return {}\n")
    ended = main(rlhf(tiny_model, "--deepspeed", "zero.json", "--rollout_func", "rounds.py:mine"))
    said = capsys.readouterr().err
    assert ended == (2 if refused else 0), said
    line = (
        "--rollout_func: rounds.py:mine: each rank calls it with its own prompts, and stage 3 of --deepspeed zero.json"
    )
    assert (line in said) == refused


def test_it_writes_nothing(tiny_model, folder):
    before = sorted(path for path, _, _ in os.walk(folder))
    main(rlhf(tiny_model))
    assert sorted(path for path, _, _ in os.walk(folder)) == before
    assert sorted(path.name for path in folder.iterdir()) == ["chats.jsonl", "rows.jsonl"]


def test_it_counts_the_processes_that_a_launch_would_start(tiny_model, folder, monkeypatch, capsys):
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    monkeypatch.setattr("swift.trainers.engines.count_accelerators", lambda: (0, "cpu"))
    assert main(rlhf(tiny_model)) == 0
    text = capsys.readouterr().out
    assert "2 training processes on cpu:0, cpu:1" in text
    assert "4 prompts x 8 completions; 101 rows, 25 steps per epoch, 75 steps in all" in text


def test_it_says_with_how_many_processes_an_elastic_run_goes_on(tiny_model, folder, monkeypatch, capsys):
    monkeypatch.setenv("NPROC_PER_NODE", "4")
    monkeypatch.setattr("swift.trainers.engines.count_accelerators", lambda: (0, "cpu"))
    assert main(rlhf(tiny_model, "--elastic", "true")) == 0
    assert "elastic: of 4 processes, 1 or 2 or 3 can go on with the run" in capsys.readouterr().out
    assert main(rlhf(tiny_model, "--elastic", "true", "--sequence_parallel_size", "4")) == 2
    assert "--elastic: true: fewer than 4 processes cannot share the batches of this run" in capsys.readouterr().err


def test_json_is_one_object(tiny_model, folder, capsys):
    assert main(rlhf(tiny_model, "--json", "true", "--beta", "0")) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["settings"]["beta"] == {"value": 0.0, "source": "command line", "given_as": "--beta", "rule": None}
    assert any(line.startswith("placement: ") for line in plan["plan"])


def test_numbers_of_weights_are_not_read(tiny_model, folder):
    for name in ("policy", "reference"):
        file = shutil.copytree(tiny_model, folder / name) / "model.safetensors"
        tensors = load_file(file)
        save_file({name: one.fill_(float("nan")) for name, one in tensors.items()}, file, metadata={"format": "pt"})
    assert main(rlhf("policy", "--beta", "0.1", "--ref_model", "reference")) == 0


@pytest.mark.parametrize(
    ("words", "longest"),
    [
        ("--max_length 100 --vllm_max_model_len 64", 63),
        ("--max_length 100 --vllm_max_model_len 164", 100),
        ("--vllm_max_model_len 64", 63),
        ("--max_length 100", 100),
    ],
)
def test_a_prompt_leaves_room_for_a_token_in_the_engine(words, longest, tiny_model):
    flags = f"--use_vllm true --max_completion_length 64 {words}"
    assert max_prompt_length(parse("rlhf", [*rlhf(tiny_model)[1:], *flags.split()], {}).args) == longest


BATCH = (
    "from swift.plugin import ORM, orms\nclass Whole(ORM):\n    scope = 'batch'\n"
    "    def __call__(self, completions, **kw):\n        return [0.0] * len(completions)\norms['whole'] = Whole\n"
)
REFUSED = {
    "training on parts without an engine of its own": (
        "--streaming_partial_batch true", 2, "--streaming_partial_batch: true: the rollout engine samples in"
    ),
    "redrawing groups with a reward of batches": (
        "--dynamic_sample true --external_plugins whole_plugin.py --reward_funcs whole",
        2,
        "--dynamic_sample: true: groups are scored one by one, but whole must see the whole batch",
    ),
    "modules that the model does not have": ("--target_modules no_proj", 2, "--target_modules: no_proj: "),
    "no room for a prompt": (
        "--max_length 8 --max_completion_length 2000", 2, "--max_completion_length: 2000: leaves no room for a prompt"
    ),
    "an adapter of another shape": ("--adapters larger", 2, "--adapters: "),
    "an adapter of another shape, merged": ("--adapters larger --tuner_type full", 2, "--adapters: "),
    "several adapters": ("--adapters own own", 2, "--adapters: "),
    "settings that the adapter does not have": ("--adapters own --lora_rank 3", 2, "--lora_rank: 3: --adapters"),
    "an adapter of another kind": ("--adapters own --tuner_type vera", 2, "--adapters: "),
    "blocks that do not divide a layer": (
        "--tuner_type boft --boft_block_size 3", 2, "--tuner_type: boft: in_features (32) must be divisible"
    ),
    "more directions than a layer has": (
        "--init_weights pissa --lora_rank 64", 2, "--lora_rank: 64: --init_weights pissa finds 32 directions"
    ),
    "a reference that is not there": ("--ref_model ./none --beta 0.1", 2, "--ref_model: ./none: no such folder"),
    "a reference that is a reward model": (
        "--ref_model judge --beta 0.1", 2, "judge: 1 weights of the architecture are not in its safetensors"
    ),
    "a reference of fewer tokens": ("--ref_model few --beta 0.1", 2, "--ref_model: few: knows 262 tokens"),
    "a reference that cannot move": (
        "--ref_model larger_model --beta 0.1 --sync_ref_model true --tuner_type full",
        2,
        "--sync_ref_model: true: the reference has",
    ),
    "missing weights": ("--model missing", 2, "missing: 1 weights of the architecture are not in its"),
    "weights of another shape": ("--model misshaped", 2, "misshaped: weights of another shape than config.json says"),
    "a file of weights that is cut": ("--model cut", 2, "cut"),
    "a metric that no evaluation gives": (
        "--metric_for_best_model rewards/none/mean --split_dataset_ratio 0.1",
        2,
        "--metric_for_best_model: rewards/none/mean: not measured",
    ),
    "a folder with checkpoints": ("--add_version false --output_dir full", 2, "--output_dir: "),
    "quantised weights that are to learn": ("--model quantised --tuner_type full", 3, "--model: "),
}  # fmt: skip


@pytest.fixture
def models(folder, tiny_model):
    """Adapters, quantised weights and a folder with checkpoints, by the names in `REFUSED`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    larger = build_tiny(folder / "larger_model")
    build_tiny(folder / "judge", "llama", reward_model=True)
    for name in ("missing", "misshaped", "cut", "few"):
        file = shutil.copytree(tiny_model, folder / name) / "model.safetensors"
        tensors = load_file(file)
        if name == "missing":
            del tensors["model.norm.weight"]
        elif name == "misshaped":
            tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        elif name == "few":
            tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:262].clone()
            config = json.loads((file.parent / "config.json").read_text())
            (file.parent / "config.json").write_text(json.dumps(config | {"vocab_size": 262}))
        save_file(tensors, file, metadata={"format": "pt"})
    content = (folder / "cut" / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(content[:-100])
    for name, base in (("own", tiny_model), ("larger", larger)):
        config = LoraConfig(r=2, target_modules=["q_proj"])
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder / name)
    shutil.copytree(tiny_model, folder / "quantised")
    config = json.loads((folder / "quantised" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "quantised" / "config.json").write_text(json.dumps(config))
    (folder / "full" / "checkpoint-1").mkdir(parents=True)


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses_what_the_run_refuses(name, tiny_model, folder, capsys):
    (folder / "whole_plugin.py").write_text(BATCH)
    words, code, line = REFUSED[name]
    command = rlhf(tiny_model, *words.split())
    if "--reward_funcs" in words:
        del command[command.index("accuracy") - 1 : command.index("format") + 1]
    assert main(command) == code
    told = capsys.readouterr().err
    assert line in told.partition("swift: error: ")[2]
    assert " -" not in told.partition("use at most")[2], "a length is never negative"
    assert main([*command, "--dry_run", "false"]) == code
    assert line in capsys.readouterr().err.partition("swift: error: ")[2]


METHODS = {
    "blocks in a model without rotary positions": (
        "rlhf --rlhf_type ebft --ebft_mode strided --dataset texts.jsonl --model gpt2 --tuner_type full",
        "blocks of strided EBFT need packed attention",
    ),
    "the router's loss of a model without experts": (
        "sft --dataset chats.jsonl --router_aux_loss_coef 0.5", "--router_aux_loss_coef: 0.5: the model is no mixture"
    ),
    "the router's loss of a policy without experts": (
        "rlhf --rlhf_type grpo --dataset rows.jsonl --reward_funcs format --router_aux_loss_coef 0.5",
        "--router_aux_loss_coef: 0.5: the model is no mixture",
    ),
    "the router's loss in a preference method without experts": (
        "rlhf --rlhf_type dpo --dataset pairs.jsonl --router_aux_loss_coef 0.5",
        "--router_aux_loss_coef: 0.5: the model is no mixture",
    ),
    "replayed routes of a policy without experts": (
        "rlhf --rlhf_type grpo --dataset rows.jsonl --reward_funcs format --moe_router_replay trainer",
        "--moe_router_replay: trainer: the experts of --model cannot be replayed (it is no mixture of experts)",
    ),
    "a metric that no evaluation gives": (
        "sft --dataset chats.jsonl --split_dataset_ratio 0.5 --metric_for_best_model nothing",
        "--metric_for_best_model: nothing: not measured; there are: ",
    ),
    "a metric that no evaluation of one of several sets gives": (
        "sft --dataset chats.jsonl --val_dataset chats.jsonl chats.jsonl --metric_for_best_model chats_nothing",
        "--metric_for_best_model: chats_nothing: not measured; there are: ",
    ),
    "a reference of another architecture that is to move": (
        "rlhf --rlhf_type dpo --dataset pairs.jsonl --ref_model gpt2 --sync_ref_model true --tuner_type full",
        "--sync_ref_model: true: the reference has another architecture than the policy",
    ),
    "a reference without a head": (
        "rlhf --rlhf_type dpo --dataset pairs.jsonl --ref_model judge", "judge: 1 weights of the architecture are not"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_it_refuses_models_that_a_method_cannot_use(name, tiny_model, folder, desk, capsys):
    from transformers import GPT2Config, GPT2LMHeadModel

    build_tiny(folder / "judge", "llama", reward_model=True)
    sizes = {"vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    shutil.copytree(tiny_model, folder / "gpt2")
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=258)).save_pretrained(folder / "gpt2")
    desk.rows([{"prompt": f"{n}?", "chosen": "a", "rejected": "b"} for n in range(4)], "pairs.jsonl")
    desk.rows([{"prompt": f"Count {n}", "completion": "abc" * n} for n in range(1, 5)], "texts.jsonl")
    words, line = METHODS[name]
    command = [*words.split(), *(["--model", str(tiny_model)] if " --model gpt2" not in words else [])]
    for dry in ("true", "false"):
        assert main([*command, "--max_steps", "1", "--report_to", "none", "--dry_run", dry]) == 2
        assert line in capsys.readouterr().err.partition("swift: error: ")[2]


def test_a_teacher_needs_no_rewards_but_the_tokens_of_the_policy(tiny_model, folder, capsys):
    file = Path(shutil.copytree(tiny_model, folder / "teacher"), "tokenizer.json")
    words = f"rlhf --rlhf_type grpo --model {tiny_model} --teacher_model teacher --dataset rows.jsonl --dry_run true"
    words = [*words.split(), "--num_generations", "1", "--per_device_train_batch_size", "8"]
    assert main(words) == 0
    assert "8 prompts x 1 completion;" in capsys.readouterr().out
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "--teacher_model: teacher: 2 tokens of the policy's tokenizer are others there ('a' is" in told
    assert main([*words, "--val_dataset", "rows.jsonl"]) == 2
    assert "--eval_strategy: steps: evaluation measures rewards; give --reward_funcs" in capsys.readouterr().err


def test_the_first_command_of_the_readme_needs_no_further_flag(tiny_model, folder, capsys):
    words = (
        f"rlhf --rlhf_type grpo --model {tiny_model} --dataset rows.jsonl --reward_funcs accuracy format --dry_run true"
    )
    assert main(words.split()) == 0
    assert "batch: 8 completions per step" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["rlhf", "sft"])
def test_what_is_needed_to_spread_the_model_is_checked_too(tiny_model, folder, capsys, mode):
    sft = ["sft", "--model", str(tiny_model), "--dataset", "chats.jsonl", "--dry_run"]
    words = rlhf(tiny_model) if mode == "rlhf" else sft
    assert main([*words, "--deepspeed", "nonsense.json"]) == 2
    assert "--deepspeed: nonsense.json: neither a preset nor a file" in capsys.readouterr().err


def test_heads_that_a_tensor_parallel_group_cannot_share_are_code_2(tiny_model, folder, capsys):
    words = ["--use_vllm", "true", "--vllm_mode", "dedicated"]
    words += ["--vllm_tensor_parallel_size", "3", "--num_infer_workers", "3"]
    assert main(rlhf(tiny_model, *words)) == 2
    assert "--vllm_tensor_parallel_size: 3: does not divide the 4 attention heads" in capsys.readouterr().err


def test_a_reward_model_that_cannot_read_the_rows_is_refused_and_its_weights_are_not_read(
    tiny_model, folder, capsys, tmp_path_factory
):
    judge = build_tiny(tmp_path_factory.mktemp("judges") / "judge", reward_model=True)
    (judge / "model.safetensors").write_bytes(b"no tensors")
    words = ["rlhf", "--rlhf_type", "grpo", "--model", str(tiny_model), "--dataset", "rows.jsonl", "--dry_run", "true"]
    words += ["--system", "Be brief.", "--reward_model", str(judge)]
    assert main(words) == 0
    jinja = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}{{ messages }}"
    (judge / "chat_template.jinja").write_text(jinja)
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "--reward_model: judge: can score none of the first conversations of --dataset" in error
    assert f"{judge} refuses them: no system turn; correct the template in {judge}, or the rows" in error


def test_sft_has_one_too(tiny_model, folder, capsys):
    assert main(["sft", "--model", str(tiny_model), "--dataset", "chats.jsonl", "--dry_run"]) == 0
    text = capsys.readouterr().out
    assert "placement: in_process" in text
    assert "10 rows" in text
    assert sorted(path.name for path in folder.iterdir()) == ["chats.jsonl", "rows.jsonl"]


def test_routes_of_a_vllm_on_a_cpu_are_refused(tiny_model, folder, capsys):
    words = ["--moe_router_replay", "rollout", "--use_vllm", "true", "--vllm_mode", "colocate"]
    assert main(rlhf(tiny_model, *words)) == 2
    assert "--moe_router_replay: rollout: vLLM returns no experts on a CPU; --infer" in capsys.readouterr().err
