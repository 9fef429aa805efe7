"""What `swift plan` foresees is what runs on the simulated GPU allocate, within a tenth."""

import base64
import contextlib
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import vlms
from gpu_runs import EBFT, GRPO, LONG, TOKENS, on_gpu
from hybrids import hybrid
from transformers import AutoConfig, AutoModelForCausalLM

from swift.arguments import parse
from swift.arguments.derived import Machine
from swift.models.tiny import build_tiny, build_tokenizer
from swift.planning import command, grpo, kernels, trl_step
from swift.planning.devices import DEVICES
from swift.planning.images import draw_images
from swift.rollout.samples import TrainSample

__all__ = ["on_gpu"]

QUIET = "--log_entropy false"
"""Entropies for the log would be computed in every tenth step, of which one is traced, and none is measured."""
WITHOUT = GRPO.replace(" --num_generations 4", "").replace(f" --max_completion_length {TOKENS}", "")
RUNS = {
    "grpo": f"{WITHOUT.replace(' --max_tokens_per_micro_batch 60', '')} {QUIET}",
    "ebft": f"rlhf --rlhf_type ebft {EBFT.replace(' --max_completion_length 16', '')} {QUIET}",
    "strided": "rlhf --rlhf_type ebft --ebft_mode strided --gradient_accumulation_steps 2 --dataset_shuffle false",
    "sft": "sft --gradient_accumulation_steps 3 --dataset_shuffle false",
    **{method: f"rlhf --rlhf_type {method} --gradient_accumulation_steps 2 --dataset_shuffle false" for method in (
        "dpo", "ipo", "kto", "orpo", "simpo", "cpo", "rm",
    )},
}  # fmt: skip
TUNING = {
    "tuner_type": ["full", "lora"],
    "torch_dtype": ["float32", "bfloat16"],
    "gradient_checkpointing": ["true", "false"],
    "vocabulary": [263, 263, 5000],
    "optim": ["adamw_torch_fused", "adamw_torch_fused", "adamw_torch", "adamw_cpu"],
}
ROLLOUTS = {
    "beta": [0, 0.04],
    "max_completion_length": [16, 32, 48],
    "max_tokens_per_micro_batch": [150, 400, 2000],
}
ROWS = {"per_device_train_batch_size": [1, 2, 4], "max_length": [80, 120, 400]}
CHOICES = {
    "grpo": TUNING | ROLLOUTS | {"num_generations": [2, 4, 8], "top_entropy_quantile": [1.0, 1.0, 0.5]},
    "ebft": TUNING | ROLLOUTS | {"ebft_ce_coef": [0, 0.1], "ebft_embed_method": ["last_token", "mean_pooling"]},
    "sft": TUNING | ROWS | {"packing": ["false", "false", "true"]},
    **dict.fromkeys(("dpo", "ipo", "orpo", "simpo", "cpo", "rm"), TUNING | ROWS),
    "kto": TUNING | ROWS | {"per_device_train_batch_size": [2, 4]},
}


def settings(method, seed, count):
    """Random ones."""
    draw = random.Random(f"{method} {seed}")
    return [(method, {name: draw.choice(values) for name, values in CHOICES[method].items()}) for _ in range(count)]


@pytest.fixture
def model(tmp_path):
    """Makes a small model with a vocabulary of a given size."""

    def make(vocabulary, arch=None):
        folder = build_tiny(tmp_path / "model", size="tiny")
        if arch is not None:
            sizes = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 263}
            hybrid(arch, **sizes).save_pretrained(folder)
            return folder
        config = AutoConfig.from_pretrained(folder)
        if vocabulary > config.vocab_size:
            config.vocab_size = vocabulary
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return make


class Recorded:
    """The samples of a step of a run; where one micro-batch holds them, all set the threshold of the top entropies."""

    def __init__(self, found, args, images):
        self.images = images.ids if images else []
        self.of = {name: found[name] for name in ("samples", "references")}
        rows = found["samples"]
        prompts = {group: prompt for group, prompt, _, _ in rows}
        tokens = sum(prompts.values()) + sum(length - 1 for _, _, length, _ in rows)
        if args.top_entropy_quantile < 1 and tokens <= args.max_tokens_per_micro_batch:
            self.of["samples"] = [(*sizes, advantage or 1.0) for *sizes, advantage in rows]
        self.prompts, self.num_generations = len(prompts), args.num_generations
        self.prompt_tokens, self.completion_tokens = max(prompts.values()), max(length for _, _, length, _ in rows)

    def samples(self):
        return self._samples("samples")

    def references(self):
        return self._samples("references")

    def _samples(self, name):
        return [
            TrainSample(
                group=group,
                prompt_ids=np.array([*self.images, *[group] * (prompt - len(self.images))], np.int32),
                token_ids=np.zeros(length, np.int32),
                sampler_logprobs=np.zeros(length, np.float32),
                trained=np.ones(length, bool),
                advantage=advantage,
            )
            for group, prompt, length, advantage in self.of[name]
        ]


def rows_of(path, tokens):
    """Chats, pairs and answers of so many tokens by the template of the tiny model; how many are the prompt's."""
    tokenizer, asked = build_tokenizer(), [{"role": "user", "content": "say it"}]
    prompt = len(tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"])
    said = [*asked, {"role": "assistant", "content": ""}]
    answer = "a" * (tokens - len(tokenizer.apply_chat_template(said)["input_ids"]))
    row = {"messages": [*asked, {"role": "assistant", "content": answer}], "rejected_response": f"b{answer[1:]}"}
    shorter = row | {
        "messages": [*asked, {"role": "assistant", "content": answer[1:]}],
        "rejected_response": answer[2:],
    }
    with path.open("w") as file:  # so that padded rows have a mask
        for number in range(24):
            file.write(json.dumps((shorter if number % 2 else row) | {"label": number % 2 == 0}) + "\n")
    return prompt


SIDE, QUESTION, ANSWER = 224, "say it", 100
"""Of a row with an image: its side in pixels, its text, and tokens of its answer."""
TOWER = {"depth": 4, "hidden_size": 128, "num_heads": 4, "intermediate_size": 512}
"""Of a model whose tower takes more than a tenth of its passes."""


def seeing(folder, family, monkeypatch):
    """A small model with a tower, whose processor leaves images as large as they are."""
    monkeypatch.setattr(vlms, "QWEN_TOWER", vlms.QWEN_TOWER | TOWER)
    vlms.build_vlm(folder, family)
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    if "longest_edge" in settings["size"]:
        file.write_text(json.dumps(settings | {"size": settings["size"] | {"longest_edge": SIDE * SIDE}}))
    return folder


def image_rows(path):
    """Chats and pairs about an image each."""
    with path.open("w") as file:
        for number in range(24):
            shown = base64.b64encode(vlms.image(number, SIDE, SIDE)).decode()
            answer = "a" * (ANSWER - number % 2)  # so that padded rows have a mask
            said = [{"role": "user", "content": f"<image>{QUESTION}"}, {"role": "assistant", "content": answer}]
            row = {"messages": said, "rejected_response": f"b{answer[1:]}", "images": [f"data:;base64,{shown}"]}
            file.write(json.dumps(row) + "\n")


def documents(path, tokens):
    """Texts of so many tokens."""
    path.write_text("\n".join(json.dumps({"text": "a" * tokens}) for _ in range(24)))


def compare(on_gpu, model, monkeypatch, method, given, **more):
    """Bytes that were measured and foreseen; `more`: asked of the plan."""
    given = dict(given)
    family, arch, vocabulary = (given.pop(name, None) for name in ("family", "arch", "vocabulary"))
    folder = seeing(on_gpu.folder / "model", family, monkeypatch) if family else model(vocabulary, arch)
    words = f"{RUNS[method]} {' '.join(f'--{name} {value}' for name, value in given.items())}"
    asked = SimpleNamespace(
        prompt_tokens=8, row_tokens=None, num_rows=None, price_per_hour=None, images_per_prompt=None, image_pixels=None
    )
    dataset = on_gpu.folder / "long.jsonl"
    if family:
        asked.image_pixels = SIDE * SIDE
        image_rows(dataset)
    elif method == "strided":
        asked.prompt_tokens, asked.row_tokens = None, given["max_length"]
        documents(dataset, asked.row_tokens)
    elif "max_length" in given:
        asked.row_tokens = given["max_length"] // 2 if given.get("packing") == "true" else given["max_length"]
        asked.prompt_tokens = rows_of(dataset, asked.row_tokens)
    else:
        dataset = None
    code, err, found = on_gpu(words, model=folder, dataset=dataset, steps=2)
    assert code == 0, err[-3000:]
    plugin = on_gpu.folder / "plugin.py"
    mode, *words = [*words.format(plugin=plugin).split(), "--model", str(folder), "--dataset", str(plugin)]
    resolved = parse(mode, words, {}, machine=Machine(True, 2))
    if family:
        images = draw_images(resolved.args, asked, AutoConfig.from_pretrained(folder)).ids
        asked.prompt_tokens = len(images) + len(QUESTION) + 1 + len("assistant\n")
        asked.row_tokens = asked.prompt_tokens + ANSWER + 2  # the end of the turn
    vars(asked).update(more)
    # as on the simulated GPU: masked SDPA, no Triton
    monkeypatch.setattr(kernels, "kernel_of", lambda args: None)
    monkeypatch.setattr(kernels, "fused_scans", lambda trace: contextlib.nullcontext())
    monkeypatch.setattr(trl_step, "kernel_of", lambda args: None)
    monkeypatch.setattr(trl_step, "fused_head", lambda trace: contextlib.nullcontext())
    monkeypatch.setattr(grpo, "shape_of", lambda args, completions, tokens, images: Recorded(found, args, images))
    cost = command.plan_of(resolved, DEVICES["h100-80gb"], 1, asked).cost
    bytes_ = [
        (found["training_bytes"], cost.training),
        (found["update_bytes"], cost.update),
        (found["resident_bytes"], cost.resident),
    ]
    return [*bytes_, *([(found["feature_bytes"], cost.features)] if cost.features else [])]


@pytest.mark.parametrize(("method", "given"), [*settings("grpo", 1, 1), *settings("dpo", 1, 1)])
def test_some_settings(on_gpu, model, monkeypatch, method, given):
    for measured, foreseen in compare(on_gpu, model, monkeypatch, method, given):
        assert foreseen == pytest.approx(measured, rel=0.1)


FORKED = {
    "vocabulary": 263,
    "optim": "adamw_torch_fused",
    "torch_dtype": "bfloat16",
    "tuner_type": "full",
    "beta": 0.04,
}
FORKED |= {"num_generations": 4, "max_completion_length": 32, "max_tokens_per_micro_batch": 400}


@pytest.mark.parametrize("arch", ["lfm2", *(pytest.param(arch, marks=LONG) for arch in ("qwen3_5_text", "nemotron_h"))])
@pytest.mark.parametrize("recomputes", ["false", pytest.param("true", marks=LONG)])
def test_completions_that_continue_from_states(on_gpu, model, monkeypatch, arch, recomputes):
    given = FORKED | {"arch": arch, "gradient_checkpointing": recomputes}
    for measured, foreseen in compare(on_gpu, model, monkeypatch, "grpo", given):
        assert foreseen == pytest.approx(measured, rel=0.1)


DORA = {"use_dora": "true", "tuner_type": "lora", "num_generations": 4, "max_completion_length": 32, "beta": 0}
DORA |= {"max_tokens_per_micro_batch": 400, "vocabulary": 263, "optim": "adamw_torch_fused"}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("recomputes", ["false", "true"])
def test_dora(on_gpu, model, monkeypatch, dtype, recomputes):
    given = DORA | {"torch_dtype": dtype, "gradient_checkpointing": recomputes}
    for measured, foreseen in compare(on_gpu, model, monkeypatch, "grpo", given):
        assert foreseen == pytest.approx(measured, rel=0.1)


MANY = {"grpo": 26, "ebft": 8, "sft": 8, "dpo": 8, "ipo": 1, "kto": 3, "orpo": 2, "simpo": 1, "cpo": 1, "rm": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "given"),
    [*settings("grpo", 1, 2)[1:], *settings("sft", 1, 1)]
    + [one for method, count in MANY.items() for one in settings(method, 2, count)],
)
def test_sixty_settings(on_gpu, model, monkeypatch, method, given):
    for measured, foreseen in compare(on_gpu, model, monkeypatch, method, given):
        assert foreseen == pytest.approx(measured, rel=0.1)


SEEING = {"family": "qwen2_5_vl", "tuner_type": "full", "torch_dtype": "bfloat16", "optim": "adamw_torch_fused"}
SEEING |= {"freeze_vit": "false", "freeze_aligner": "false", "gradient_checkpointing": "false"}
SAMPLED = {"num_generations": 4, "max_completion_length": 16, "max_tokens_per_micro_batch": 400, "beta": 0}
PADDED = {"per_device_train_batch_size": 2, "max_length": 400}
FROZEN = {"freeze_vit": "true", "freeze_aligner": "true"}
TRAINED = [
    ("grpo", SAMPLED),
    ("dpo", PADDED),
    *(
        pytest.param(*one, marks=LONG)
        for one in (
            ("grpo", SAMPLED | {"family": "qwen3_vl", "tuner_type": "lora", "beta": 0.04}),
            ("grpo", SAMPLED | {"family": "gemma3"}),
            ("sft", PADDED | {"family": "gemma3", "packing": "true"}),
            ("grpo", SAMPLED | {"gradient_checkpointing": "true", "torch_dtype": "float32"}),
            ("sft", PADDED),
            ("sft", PADDED | {"family": "qwen3_vl", "packing": "true"}),
            ("sft", PADDED | {"gradient_checkpointing": "true", "tuner_type": "lora"}),
            ("dpo", PADDED | {"family": "qwen3_vl", "tuner_type": "lora"}),
        )
    ),
]


@pytest.mark.parametrize(("method", "given"), TRAINED)
def test_passes_of_a_tower_that_is_trained(on_gpu, model, monkeypatch, method, given):
    for measured, foreseen in compare(on_gpu, model, monkeypatch, method, SEEING | given):
        assert foreseen == pytest.approx(measured, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("grpo", SAMPLED | {"beta": 0.04}),
        ("grpo", SAMPLED | {"family": "qwen3_vl", "tuner_type": "lora"}),
        ("sft", PADDED),
        ("dpo", PADDED | {"family": "qwen3_vl", "tuner_type": "lora"}),
    ],
)
def test_passes_of_a_frozen_tower(on_gpu, model, monkeypatch, method, given):
    for measured, foreseen in compare(on_gpu, model, monkeypatch, method, SEEING | FROZEN | given):
        assert foreseen == pytest.approx(measured, rel=0.1)


@pytest.mark.long
def test_a_plan_without_images_misses_the_tower(on_gpu, model, monkeypatch):
    measured, foreseen = compare(on_gpu, model, monkeypatch, "sft", SEEING | PADDED, images_per_prompt=0)[0]
    assert foreseen < 0.8 * measured


OFFLOADED = {"fsdp": "full_shard", "fsdp_offload_params": "true", "vocabulary": 263, "optim": "adamw_torch_fused"}
OFFLOADED |= {"torch_dtype": "bfloat16", "tuner_type": "full", "gradient_checkpointing": "false"}


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("grpo", FORKED | OFFLOADED),
        *(
            pytest.param(*one, marks=LONG)
            for one in (
                ("grpo", FORKED | OFFLOADED | {"fsdp_offload_params": "false"}),
                ("grpo", FORKED | OFFLOADED | {"tuner_type": "lora", "gradient_checkpointing": "true"}),
                ("sft", PADDED | OFFLOADED),
                ("sft", PADDED | OFFLOADED | {"fsdp": "shard_grad_op", "gradient_checkpointing": "true"}),
                ("dpo", PADDED | OFFLOADED | {"vocabulary": 5000}),
            )
        ),
    ],
)
def test_shards_on_the_host(on_gpu, model, monkeypatch, method, given):
    passes, *between = compare(on_gpu, model, monkeypatch, method, given)
    assert passes[1] == pytest.approx(passes[0], rel=0.1)
    for measured, foreseen in between:  # of shards on the host the device has next to nothing then
        assert foreseen == pytest.approx(measured, abs=0.1 * passes[0])


ZERO = {name: value for name, value in (FORKED | OFFLOADED).items() if not name.startswith("fsdp")} | {"beta": 0}


@pytest.mark.long
@pytest.mark.parametrize("stage", ["zero2", "zero3", "zero2_offload", "zero3_offload"])
def test_shards_of_deepspeed(on_gpu, model, monkeypatch, stage):
    """Its engine updates at the end of the passes."""
    passes, update, resident = compare(on_gpu, model, monkeypatch, "grpo", ZERO | {"deepspeed": stage})
    assert max(passes[1], update[1]) == pytest.approx(passes[0], rel=0.1)
    assert resident[1] == pytest.approx(resident[0], abs=0.1 * max(resident[0], passes[0] * (stage == "zero3_offload")))


STRIDED = {"vocabulary": 263, "optim": "adamw_torch_fused", "torch_dtype": "bfloat16", "tuner_type": "full"}
STRIDED |= {"per_device_train_batch_size": 2, "max_length": 120, "gradient_checkpointing": "false"}


@pytest.mark.parametrize(
    "given",
    [
        {"ebft_ce_coef": 0.1},
        *(
            pytest.param(one, marks=LONG)
            for one in (
                {"tuner_type": "lora", "torch_dtype": "float32"},
                {"gradient_checkpointing": "true", "vocabulary": 5000},
                {"ebft_stride": 4, "ebft_whitening": "pooled", "ebft_embed_method": "mean_pooling"},
                {"ebft_rl_coef": 0, "ebft_ce_coef": 1.0, "optim": "adamw_cpu"},
            )
        ),
    ],
)
def test_blocks_of_strided_ebft(on_gpu, model, monkeypatch, given):
    for measured, foreseen in compare(on_gpu, model, monkeypatch, "strided", STRIDED | given):
        assert foreseen == pytest.approx(measured, rel=0.1)
