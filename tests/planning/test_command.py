"""`swift plan` as a command, from configurations of models that are not here."""

import json
import re
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from swift.arguments import parse
from swift.arguments.derived import Machine
from swift.arguments.ebft_strided import StridedArguments
from swift.cli.main import main
from swift.models.policy import check_policy
from swift.planning.command import plan_of
from swift.planning.devices import known_as
from swift.planning.grpo import kept_by

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
    "num_local_experts": 32, "num_experts_per_tok": 4, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "Qwen3-0.6B": (QWEN3, 596_049_920),
    "Qwen3-8B": (
        QWEN3 | {
            "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288,
            "tie_word_embeddings": False,
        },
        8_190_735_360,
    ),
    "Qwen2.5-7B": (QWEN2, 7_615_616_512),
    "Qwen2.5-0.5B": (
        QWEN2 | {
            "vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
            "num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True,
        },
        494_032_768,
    ),
    "Llama-3.1-8B": (LLAMA, 8_030_261_248),
    "Llama-3.1-70B": (
        LLAMA | {
            "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
        },
        70_553_706_496,
    ),
    "Mistral-7B": (LLAMA | {"model_type": "mistral", "vocab_size": 32000}, 7_241_732_096),
    "Qwen3-30B-A3B": (
        QWEN3 | {
            "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "intermediate_size": 6144, "tie_word_embeddings": False,
        },
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        QWEN3 | {
            "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
            "num_key_value_heads": 4, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
            "intermediate_size": 12288, "tie_word_embeddings": False,
        },
        235_093_634_560,
    ),
    "gpt-oss-20b": (GPT_OSS, 20_914_757_184),
    "gpt-oss-120b": (GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}, 116_829_156_672),
    "Gemma-2-2B": (
        {
            "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
        },
        2_614_341_888,
    ),
}  # fmt: skip
TINY = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
RUN = "--rlhf_type grpo --reward_funcs accuracy --dataset rows.jsonl --beta 0 --tuner_type full --num_generations 8"


@pytest.fixture
def folder(tmp_path):
    """A folder with a configuration and nothing else."""

    def make(config):
        made = AutoConfig.for_model(**config)
        made.save_pretrained(tmp_path)
        return tmp_path

    return make


@pytest.fixture
def plan(folder, capsys):
    """Runs the command on a configuration; its exit code, and what it says."""

    def run(config, words):
        code = main(["plan", *words.split(), "--model", str(folder(config))])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_published_models(folder, family):
    config, count = FAMILIES[family]
    words = f"{RUN} --model {folder(config)}".split()
    policy = check_policy(parse("rlhf", words, {}, machine=Machine(True, 2)).args, weights=False)
    assert sum(parameter.numel() for parameter in policy.parameters()) == count
    assert all(parameter.is_meta for parameter in policy.parameters())


@pytest.mark.slow
def test_a_published_peak_is_met(plan):
    """0.6B, full tuning, 16k tokens: 12.5 GiB on an H100, as prime-rl's documentation has it."""
    flags = "--per_device_train_batch_size 8 --max_completion_length 1984 --max_tokens_per_micro_batch 16384"
    code, out, _ = plan(QWEN3, f"{RUN} {flags} --device h100-80gb --json true")
    found = json.loads(out)
    assert code == 0 and found["fits"] and found["micro_batch_tokens"] > 16_000
    peak = max(found["phases"][name]["total"] for name in ("forward, backward", "update"))
    assert peak / 2**30 == pytest.approx(12.5, rel=0.15)


LONG = (
    "--device h100-80gb --num_devices 8 --max_completion_length 32768 --max_length 40000 --use_vllm true "
    "--vllm_mode colocate --sleep_level 1 --per_device_train_batch_size 1 --json true"
)


@pytest.mark.long
def test_32k_tokens_of_8b_fit_on_eight_devices_that_share_model_and_rows(plan):
    config, _ = FAMILIES["Qwen3-8B"]
    code, out, _ = plan(config, f"{RUN} {LONG} --fsdp full_shard --sequence_parallel_size 8")
    found = json.loads(out)
    assert code == 0 and found["fits"]
    # 12 bytes a parameter on eight devices: masters in float32 with two moments
    shards = 12 * found["parameters"] / 8
    assert shards < found["phases"]["update"]["trainer"] < 1.6 * shards
    assert found["micro_batch_tokens"] > 8 * 8192


@pytest.mark.slow
def test_a_mixture_of_experts_computes_with_those_that_are_chosen(plan):
    config, count = FAMILIES["Qwen3-30B-A3B"]
    config = config | {"num_hidden_layers": 4}
    flags = "--device h200 --num_devices 8 --fsdp full_shard --per_device_train_batch_size 4 --json true"
    code, out, err = plan(config, f"{RUN} {flags} --max_completion_length 512")
    assert code == 0, err
    found = json.loads(out)
    assert found["parameters"] < count / 8
    dense = found["parameters"] * 6 * found["micro_batch_tokens"] * found["micro_batches"]
    assert 0 < found["flops"] < 0.5 * dense, "8 of 128 experts see a token"


HYBRID = {
    "model_type": "qwen3_5_text", "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512,
}  # fmt: skip


def test_a_sequence_of_a_hybrid_keeps_states_and_few_keys(folder):
    made = AutoConfig.for_model(**HYBRID)
    found, bytes_of_states = kept_by(made, 4)
    heads, size = made.linear_num_value_heads, made.linear_key_head_dim
    convolved = 2 * made.linear_num_key_heads * size + heads * made.linear_value_head_dim
    assert found == 1
    assert bytes_of_states == 3 * (
        4 * heads * size * made.linear_value_head_dim + 2 * convolved * made.linear_conv_kernel_dim
    )
    assert kept_by(AutoConfig.for_model(**QWEN2), 28) == (28, 0)


def test_hybrids_are_planned(plan):
    code, out, _ = plan(HYBRID, f"{RUN} --device l40s --per_device_train_batch_size 8 --json true")
    found = json.loads(out)
    assert code == 0 and found["fits"] and found["micro_batch_tokens"] > 1000


def test_models_on_padded_rows_are_refused_in_a_line(plan):
    code, out, err = plan({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}, f"{RUN} --device l40s")
    assert code == 2 and out == ""
    assert "cannot be traced yet (no rotary positions: models on padded rows are not planned yet)" in err


def test_what_libraries_print_is_not_in_the_json(plan, monkeypatch):
    def talking(*given):
        print("a library was imported")
        return plan_of(*given)

    monkeypatch.setattr("swift.planning.command.plan_of", talking)
    code, out, err = plan(QWEN2, f"{RUN} --device l4 --json true")
    assert code == 0 and json.loads(out)["title"] and "a library was imported" in err


@pytest.mark.parametrize("setting", ["--max_pixels 9", "--vit_lr 0.1", "--images_per_prompt 2"])
def test_settings_of_towers_need_one(plan, setting):
    code, _, err = plan(QWEN2, f"{RUN} {setting} --device l4")
    name, value = setting.split()
    assert code == 2 and f"{name}: {value}" in err and "the model has no vision tower here; leave it out" in err


SFT = "sft --dataset rows.jsonl --tuner_type full --row_tokens 64"


@pytest.mark.parametrize("command", [RUN, pytest.param(SFT, marks=pytest.mark.long)])
def test_a_model_that_sees_is_planned_with_the_passes_of_its_tower(vlm_folders, capsys, command):
    folder = vlm_folders("qwen2_5_vl")
    capsys.readouterr()  # of what made the model
    words = ["plan", *command.split(), "--model", str(folder), "--device", "l4", "--image_pixels", "3136"]
    flops = {}
    for number in (0, 1, 2):
        assert main([*words, "--images_per_prompt", str(number), "--json", "true"]) == 0
        found = json.loads(capsys.readouterr().out)
        flops[number] = found["flops"]
    tensors = load_file(folder / "model.safetensors")
    assert found["parameters"] == sum(one.numel() for one in tensors.values())
    assert "; 2 images of 56 x 56 pixels in each prompt, " in found["title"]
    assert flops[0] < flops[1] < flops[2]


def test_images_are_those_of_a_processor_and_leave_room(vlm_folders, plan, capsys):
    folder = vlm_folders("qwen2_5_vl")
    words = ["plan", *RUN.split(), "--model", str(folder), "--device", "l4"]
    assert main([*words, "--prompt_tokens", "10"]) == 2
    said = capsys.readouterr().err
    assert "--prompt_tokens: 10: its images have " in said and "smaller ones (--image_pixels)" in said
    config = json.loads((folder / "config.json").read_text())
    code, _, err = plan(config, f"{RUN} --device l4")
    assert code == 2 and "sought tokenizer.json" in err and "plan without images with --images_per_prompt 0" in err
    code, out, _ = plan(config, f"{RUN} --device l4 --images_per_prompt 0")
    assert code == 0 and "pixels" not in out.splitlines()[0]


def test_images_that_see_themselves_in_a_way_that_is_not_known_are_refused(vlm_folders, capsys, monkeypatch):
    monkeypatch.setattr("swift.models.attention.choice.SEE_THEMSELVES", set())
    code = main(["plan", *RUN.split(), "--model", str(vlm_folders("gemma3")), "--device", "l4"])
    reason = "(tokens of an image see each other: models on padded rows are not planned yet)"
    assert code == 2 and reason in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "devices", "most_s"),
    [("Llama-3.1-70B", 64, 60), ("Qwen3-235B-A22B", 256, 90)],
)
def test_the_largest_models_are_planned_in_a_minute(plan, family, devices, most_s):
    config, _ = FAMILIES[family]
    flags = f"--device h100-80gb --num_devices {devices} --max_completion_length 8192 --per_device_train_batch_size 1"
    servers = "--use_vllm true --vllm_mode server --vllm_server_host 10.0.0.1 --fsdp full_shard --json true"
    began = time.process_time()
    code, out, _ = plan(config, f"{RUN} {flags} {servers} --sequence_parallel_size 8")
    assert code == 0 and json.loads(out)["fits"]
    assert time.process_time() - began < most_s


@pytest.mark.slow
@pytest.mark.long
def test_what_does_not_fit_is_said_with_what_makes_room(plan):
    flags = "--per_device_train_batch_size 8 --max_completion_length 512 --device rtx4090 --use_vllm true"
    code, out, _ = plan(QWEN2, f"{RUN} {flags} --max_steps 100 --price_per_hour 0.5 --vllm_gpu_memory_utilization 0.4")
    assert code == 0
    assert "parameters: 7,615,616,512, of which 7,615,616,512 are trained" in out
    assert "does not fit: " in out and "to make room: " in out and "--tuner_type lora" in out
    assert "run: 100 steps, " in out and " at 0.5 an hour and device" in out


SMALL = QWEN3 | {"num_hidden_layers": 2, "vocab_size": 32000}
ROWS = "--dataset rows.jsonl --device h100-80gb --per_device_train_batch_size 2 --gradient_accumulation_steps 4"


MORE = [(method, tuner) for method in ("ipo", "orpo", "simpo", "cpo", "rm") for tuner in ("full", "lora")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "tuner"),
    [
        ("dpo", "lora"),
        ("kto", "full"),
        ("prm", "lora"),
        *(pytest.param(*one, marks=pytest.mark.long) for one in MORE),
    ],
)
def test_methods_of_trl_are_planned(plan, method, tuner):
    code, out, err = plan(SMALL, f"rlhf --rlhf_type {method} {ROWS} --tuner_type {tuner} --json true")
    assert code == 0, err
    found = json.loads(out)
    assert found["fits"] and list(found["phases"]) == ["forward, backward", "update"]
    answers = 2 if method not in ("kto", "prm") else 1
    assert found["micro_batch_tokens"] == answers * 2 * 2048 and found["micro_batches"] == 4
    assert found["flops"] > 0 and found["seconds"] > 0


@pytest.mark.slow
@pytest.mark.long
def test_packed_rows_hold_what_there_is_room_for(plan):
    packed = f"sft {ROWS} --tuner_type lora --packing true --packing_length 8192 --row_tokens 1000 --num_rows 640"
    code, out, err = plan(SMALL, packed)
    assert code == 0, err
    assert "rows of 1,000 tokens, 500 of them the prompt's, 8 in each packed row" in out
    assert "step: 8 packed rows; on each device 4 micro-batches of at most 16,000 tokens" in out
    assert "run: 30 steps" in out, "640 rows in 80 packed ones, three times"
    long = f"sft {ROWS} --tuner_type lora --packing true --packing_length 8192 --row_tokens 8000"
    work = [json.loads(plan(SMALL, f"{words} --json true")[1])["flops"] for words in (packed, long)]
    assert work[0] < work[1], "rows do not attend to each other"


@pytest.mark.slow
def test_prompts_that_no_loss_counts_take_no_logits(plan):
    flops = [
        json.loads(plan(SMALL, f"{mode} {ROWS} --tuner_type full --prompt_tokens {prompt} --json true")[1])["flops"]
        for mode, prompt in (("sft", 1000), ("sft", 10), ("pt", 1000))
    ]
    assert flops[0] < 0.9 * flops[1] and flops[2] == pytest.approx(flops[1], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["", *(pytest.param(f"--{way} true", marks=pytest.mark.long) for way in ("packing", "padding_free"))]
)
def test_rows_and_model_are_shared_by_eight(plan, way):
    words = f"sft {ROWS} --tuner_type full {way} --max_length 16384 --num_devices 8 --fsdp full_shard --json true"
    alone, shared = (json.loads(plan(SMALL, f"{words} --sequence_parallel_size {size}")[1]) for size in (1, 8))
    passes = [found["phases"]["forward, backward"]["trainer"] for found in (shared, alone)]
    assert passes[0] < 0.8 * passes[1]
    assert shared["flops"] < 0.5 * alone["flops"], "layers are shared; each computes the loss of the whole row"
    assert shared["phases"]["update"]["trainer"] < 1.7 * 12 * shared["parameters"] / 8


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "way"),
    [
        ("zero3", "full_shard"),
        ("zero3_offload", "full_shard --fsdp_offload_params true"),
        ("zero2", "shard_grad_op"),
        ("zero2_offload", "shard_grad_op --fsdp_offload_params true"),
    ],
)
def test_zero_is_planned_as_the_shards_of_fsdp(plan, stage, way):
    zero, fsdp = (
        plan(SMALL, f"{RUN} --device h200 --num_devices 8 --json true --{flag}")[1]
        for flag in (f"deepspeed {stage}", f"fsdp {way}")
    )
    zero, fsdp = json.loads(zero), json.loads(fsdp)
    assert zero["advice"][0].startswith(f"--deepspeed {stage}: planned as --fsdp {way}")
    assert zero["host_bytes"] == fsdp["host_bytes"] and bool(zero["host_bytes"]) == stage.endswith("offload")
    weights = 2 * zero["parameters"]
    shards = 0 if stage.endswith("offload") else 2 * weights // 8
    always, in_passes = (weights, 10**9) if stage.startswith("zero2") else (shards, shards + weights)
    for phase, held in zero["phases"].items():
        more = in_passes if phase == "forward, backward" else always
        assert held["trainer"] == fsdp["phases"][phase]["trainer"] + more, phase


@pytest.mark.long
def test_what_does_not_fit_leaves_for_the_host(plan):
    wide = SMALL | {"hidden_size": 4096, "intermediate_size": 65536, "num_hidden_layers": 12}
    rows = f"sft {ROWS.replace('h100-80gb', 'l4')} --row_tokens 20000"
    words = f"{rows} --tuner_type full --num_devices 8 --fit true --json true"
    code, out, err = plan(wide, words)
    assert code == 0, err
    found = json.loads(out)["fit"]
    assert "--fsdp_offload_params true" in found["command"] and found["host_bytes"] > 1 << 30


def test_blocks_that_do_not_fit_a_document_are_refused(plan):
    code, _, err = plan(SMALL, f"rlhf --rlhf_type ebft --ebft_mode strided {ROWS} --row_tokens 10")
    assert code == 2 and "--row_tokens: 10: no block of " in err


@pytest.mark.parametrize("whitening", ["none", pytest.param("pooled", marks=pytest.mark.long)])
def test_strided_ebft_is_planned(plan, whitening):
    flags = f"--tuner_type full --row_tokens 200 --json true --ebft_whitening {whitening}"
    code, out, err = plan(SMALL, f"rlhf --rlhf_type ebft --ebft_mode strided {ROWS} {flags}")
    assert code == 0, err
    found = json.loads(out)
    blocks = int(re.search(r"documents of 200 tokens with (\d+) blocks", found["title"])[1])
    defaults = StridedArguments
    assert found["micro_batch_tokens"] == 2 * (
        200 + blocks * defaults.ebft_n_samples_per_prompt * defaults.ebft_generate_max_len
    )
    assert found["micro_batches"] == 4 and found["flops"] > 0 and found["fits"]


def test_the_same_rows_in_more_passes_fit(plan):
    words = f"sft {ROWS.replace('h100-80gb', 'rtx4090').replace('size 2', 'size 32')} --tuner_type lora"
    code, out, err = plan(SMALL, f"{words} --row_tokens 40000 --fit true")
    assert code == 0, err
    typed = out.split("fits with: ")[1].splitlines()[0].split()
    rows, passes = (
        int(typed[typed.index(f"--{name}") + 1])
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    assert rows < 32 and rows * passes == 32 * 4


@pytest.mark.slow
@pytest.mark.parametrize("tuner", ["full", pytest.param("lora", marks=pytest.mark.long)])
def test_ebft_has_features_and_references_beside_completions(plan, tuner):
    words = f"--rlhf_type ebft {ROWS} --tuner_type {tuner} --json true --max_tokens_per_micro_batch 4096"
    plain, learnt = (json.loads(plan(SMALL, f"{words} --ebft_ce_coef {weight}")[1]) for weight in (0, 0.1))
    assert plain["phases"]["features"]["trainer"] > 0 and plain["step_seconds"]["features"] > 0
    assert learnt["micro_batches"] > plain["micro_batches"] and learnt["flops"] > plain["flops"]
    held = [found["phases"]["update"]["trainer"] for found in (plain, learnt)]
    assert held[0] == held[1]


def test_a_teacher_or_another_reference_is_held_beside_the_policy(plan, tmp_path_factory):
    """Weights of 16 bits and no gradients; the teacher has another architecture than the policy."""
    made, teacher = AutoConfig.for_model(**{**LLAMA, **TINY}), tmp_path_factory.mktemp("teacher")
    made.save_pretrained(teacher)
    with torch.device("meta"):
        size = 2 * sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(made).parameters())
    words = f"{RUN} --device h100-80gb --json true --max_tokens_per_micro_batch 4096"
    plain = json.loads(plan(QWEN2 | TINY, words)[1])["phases"]
    for flags in (f"--teacher_model {teacher}", f"--ref_model {teacher} --beta 0.1"):
        found = json.loads(plan(QWEN2 | TINY, f"{words} {flags}")[1])["phases"]
        assert found["update"]["trainer"] - plain["update"]["trainer"] == pytest.approx(size, rel=1e-4), flags


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (f"{RUN} --device h1000", "--device: h1000: unknown; nearest: h100-80gb"),
        (RUN, "--device: none given, and no GPU is visible here; valid: h100-80gb, "),
        (
            "--rlhf_type gkd --teacher_model teacher --dataset rows.jsonl --device h200",
            "plan: gkd: has a teacher beside the model, which is not planned yet",
        ),
        (
            "--rlhf_type dpo --dataset rows.jsonl --device h200 --precompute_ref_log_probs true",
            "--precompute_ref_log_probs: true: is not planned yet; plan without it, which needs more",
        ),
        (
            "--rlhf_type dpo --dataset rows.jsonl --device h200 --packing true",
            "--packing: true: streams of pairs are not planned yet; plan without it, which needs more",
        ),
        (
            "sft --dataset rows.jsonl --device h200 --row_tokens 50000",
            "--row_tokens: 50000: rows of more than 40960 tokens are left out by the run",
        ),
        (
            "sft --dataset rows.jsonl --device h200 --row_tokens 500 --max_model_len 400",
            "--row_tokens: 500: rows of more than 400 tokens are left out by the run",
        ),
        (
            "sft --dataset rows.jsonl --device h200 --row_tokens 500 --prompt_tokens 500",
            "--prompt_tokens: 500: leaves nothing of the 500 tokens of a row; see --row_tokens",
        ),
        (
            "sft --dataset rows.jsonl --device h200 --compare true",
            "--compare: true: compares placements of vLLM, and this run has no rollouts; leave it out",
        ),
        (
            f"{RUN} --device h200 --deepspeed zero1",
            "--deepspeed: zero1: not planned; zero2 and zero3 are, as --fsdp, also with _offload",
        ),
        (
            f"{RUN} --device h200 --num_devices 8 --sequence_parallel_size 3",
            "--sequence_parallel_size: 3: does not divide the 8 processes of this run; valid: 1, 2, 4, 8",
        ),
        (
            f"{RUN} --device h200 --num_devices 32 --sequence_parallel_size 32 --per_device_train_batch_size 1",
            "--sequence_parallel_size: 32: the model of --model has 16 heads",
        ),
        (
            f"{RUN} --device h200 --optim adafactor",
            "--optim: adafactor: its memory is not known here; plan with one of",
        ),
        (f"{RUN} --device h200 --num_generatoins 4", "--num_generatoins: 4: unknown flag; nearest: num_generations"),
        (f"{RUN} --device h200 --num_devices 0", "--num_devices: 0: out of range"),
    ],
)
def test_what_is_not_planned_is_refused_in_a_line(plan, command, problem):
    code, out, err = plan(QWEN3, command)
    assert code == 2 and out == ""
    assert problem in err


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H20", None),
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_driver_has(name, known):
    assert known_as(name) == known


@pytest.mark.long
def test_an_engine_without_room_for_a_completion_does_not_fit(plan):
    flags = "--device a100-40gb --use_vllm true --vllm_gpu_memory_utilization 0.3 --max_completion_length 512"
    code, out, _ = plan(QWEN2, f"{RUN.replace('full', 'lora')} {flags} --per_device_train_batch_size 8 --json true")
    found = json.loads(out)
    assert code == 0 and not found["fits"]
    assert "keys and values do not hold 1024 tokens" in found["problem"]


def test_a_model_without_a_configuration_is_refused(tmp_path, capsys):
    code = main(["plan", *RUN.split(), "--device", "h200", "--model", str(tmp_path)])
    assert code == 2
    assert "sought config.json there and found none" in capsys.readouterr().err


def test_the_help_is_that_of_the_plan(capsys):
    assert main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--price_per_hour" in out and "--num_generations" not in out


@pytest.mark.slow
@pytest.mark.long
def test_weights_without_masters_take_4_bytes_less_and_autocast_computes_in_16_bits(plan):
    config = FAMILIES["Qwen3-8B"][0] | {"num_hidden_layers": 1}
    found = {}
    for name, flags in {
        "masters": "--torch_dtype bfloat16",
        "rounded": "--torch_dtype bfloat16 --master_weights bf16_stochastic",
        "autocast": "--torch_dtype float32 --autocast bfloat16",
        "float32": "--torch_dtype float32",
    }.items():
        code, out, err = plan(config, f"{RUN} --tuner_type full --beta 0 --device h200 --json true {flags}")
        assert code == 0, err
        found[name] = json.loads(out)

    def trainer(name, phase="rollout"):
        return found[name]["phases"][phase]["trainer"]

    parameters = found["masters"]["trained_parameters"]
    assert trainer("masters") - trainer("rounded") == pytest.approx(4 * parameters, rel=0.01)
    assert trainer("autocast") == trainer("float32") == pytest.approx(12 * parameters, rel=0.02)
    passes = {name: one["step_seconds"]["passes"] for name, one in found.items()}
    assert passes["autocast"] < 0.5 * passes["float32"]
