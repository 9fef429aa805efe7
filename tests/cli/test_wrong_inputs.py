"""Wrong inputs, end to end through `main`: each gives one-line errors, the documented code, and leaves nothing behind.

One row per input: what is typed, and fragments that the error lines must contain. What the settings alone tell is in
tests/arguments/test_wrong_settings.py.
"""

import itertools
import json
import math

import pytest
from desk import IMPORT, ROWS, cut_in_half, refused, refused_without_a_trace
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from trap import trap, trapped_archive

from swift.models.tiny import build_tiny


def config(desk, text, name="run.yaml"):
    return ["rlhf", desk.file(name, text)]


LONG = "1" * 5000  # more digits than Python reads
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4096\n"
BOMB = "beta: &a [1, 1, 1]\n" + "".join(f"{b}: &{b} [{f'*{a}, ' * 9}]\n" for a, b in itertools.pairwise("abcdefghi"))

BASE = "rlhf_type: grpo\nmodel: m\ndataset: d.jsonl\nreward_funcs: accuracy\n"


def adapter(desk, size="nano"):
    """A LoRA adapter of a model of this size."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = desk.model if size == "nano" else build_tiny(desk.folder / "base", size=size)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules="all-linear"))
    peft.save_pretrained(desk.folder / "adapter")
    return desk.folder / "adapter"


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def damaged_model(desk, damage):
    folder = desk.copy_model()
    damage(folder)
    return folder


def with_json(name, content):
    """Damages a model folder: one of its files holds this instead."""
    return lambda folder: (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def with_nan(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def jinja(desk, text):
    return desk.rlhf("--template", desk.file("chat.jinja", text + "{{ messages[0].content }}"))


MODES = {
    "no mode": (lambda d: [], "mode: none given | rlhf, sft"),
    "mode of ms-swift": (lambda d: ["deploy"], "mode: deploy: not a mode of swift | swift rollout"),
}

FLAGS = {
    "settings of no optimizer": (
        "--optim_args seven",
        "--optim_args: seven | --optim adamw_torch_fused",
    ),
    "settings that the optimizer ignores": ("--optim_args betas=7", "--optim_args: betas=7"),
    "a schedule without its settings": (
        "--lr_scheduler_type warmup_stable_decay --max_steps 4",
        "--lr_scheduler_type: warmup_stable_decay: needs settings | num_decay_steps | --lr_scheduler_kwargs",
    ),
    "settings of another schedule": (
        lambda d: d.rlhf("--lr_scheduler_kwargs", '{"cycles": 2}'),
        "--lr_scheduler_kwargs | --lr_scheduler_type cosine",
    ),
    "parts of a batch that feeds several steps": (
        lambda d: d.rlhf(
            "--streaming_partial_batch true --vllm_mode dedicated --infer_backend transformers",
            "--per_device_train_batch_size 4 --generation_batch_size 8 --num_generations 4",
        ),
        "--streaming_partial_batch: true | 2 optimizer steps | --generation_batch_size 4",
    ),
    "a staleness that the replay buffer exceeds": (
        "--max_staleness 4 --replay_buffer_size 4",
        "--max_staleness: 4 | --replay_max_age 32",
    ),
    "a staleness that carried groups exceed": (
        "--max_staleness 1 --dynamic_sample true",
        "--max_staleness: 1 | --dynamic_sample",
    ),
    "unknown backend": ("--infer_backend vlm", "--infer_backend: vlm | nearest: vllm"),
    "ahead without devices of its own": (
        "--async_generate true --infer_backend transformers",
        "--async_generate: true | --vllm_mode dedicated",
    ),
    "too little staleness": ("--max_staleness 1 --num_iterations 4", "--max_staleness: 1 | raise it"),
    "a seed of more than 32 bits": ("--seed 4294967296", "--seed: 4294967296 | at most 4294967295"),
    "an integer of 5,000 digits": (lambda d: d.rlhf("--max_steps", LONG), "--max_steps"),
    "an integer of 5,000 digits in a map": (lambda d: d.rlhf("--columns", f'{{"a": {LONG}}}'), "--columns"),
}

CONFIGS = {
    "more aliases than memory": (lambda d: config(d, BOMB), "run.yaml | aliases"),
    "a list in itself": (lambda d: config(d, BASE + "stop_words: &a [*a]\n"), "run.yaml | aliases"),
    "lists without end": (lambda d: config(d, f"stop_words: {'[' * 3000}{']' * 3000}"), "run.yaml | too deeply"),
    "an integer of 5,000 digits in YAML": (lambda d: config(d, f"{BASE}columns: {{a: {LONG}}}"), "run.yaml:5: columns"),
    "an integer of 5,000 digits in JSON": (lambda d: config(d, f'{{"beta": {LONG}}}', "run.json"), "run.json:1"),
}

DATA = {
    "broken line": (
        lambda d: d.rlhf("--dataset", d.file("x.jsonl", '{"query": "a", "solution": "b"}\n' * 16 + '{"query"\n')),
        "x.jsonl:17",
    ),
    "a row with an integer of 5,000 digits": (
        lambda d: d.rlhf("--dataset", d.file("x.jsonl", f'{{"query": "a", "solution": {LONG}}}\n' * 8)),
        "x.jsonl:1 | digits",
    ),
    "pointer of Git LFS instead of rows": (
        lambda d: d.rlhf("--dataset", d.file("x.jsonl", POINTER)),
        "x.jsonl | git lfs pull",
    ),
    "empty file": (lambda d: d.rlhf("--dataset", d.file("x.jsonl", "")), "x.jsonl"),
    "no prompt column": (lambda d: d.rlhf("--dataset", d.rows([{"text": "a", "solution": "c"}] * 4)), "text | query"),
    "no validation file": ("--val_dataset nowhere.jsonl", "--val_dataset: nowhere.jsonl"),
    "missing system file": ("--system nowhere.txt", "--system: nowhere.txt"),
    "splitting a stream": (
        "--streaming true --split_dataset_ratio 0.1",
        "--split_dataset_ratio: 0.1",
    ),
    "sft without answers": (
        lambda d: d.sft("--dataset", d.rows([{"messages": [{"role": "user", "content": "hi"}]}] * 3)),
        "rows.jsonl",
    ),
}

REWARDS = {
    "function twice": ("--reward_funcs format format", "--reward_funcs | format"),
    "function for samplers": ("--reward_funcs math", "--reward_funcs: math | accuracy"),
    "no gold column": (
        lambda d: d.rlhf("--dataset", d.rows([{"query": "a", "answer": "b"}] * 9)),
        'accuracy | answer | --columns \'{"answer":"solution"}\'',
    ),
    "empty gold": (lambda d: d.rlhf("--dataset", d.rows([{"query": "a", "solution": ""}] * 9)), "'solution' is empty"),
    "reserved column": (
        lambda d: d.rlhf("--dataset", d.rows([{**row, "trainer_state": 1} for row in ROWS])),
        "trainer_state",
    ),
    "no such plugin": ("--external_plugins gone.py", "--external_plugins: gone.py"),
    "plugin that raises": (
        lambda d: d.rlhf("--external_plugins", d.plugin("x = 1\nraise KeyError('boom')\n")),
        "my_plugin.py:2 | KeyError: 'boom'",
    ),
    "plugin that ends the process": (
        lambda d: d.rlhf("--external_plugins", d.plugin("import os\nos._exit(0)\n")),
        "my_plugin.py:2 | os._exit(0)",
    ),
    "function that fails on everything": (
        lambda d: d.rlhf(*d.reward("raise KeyError('boom')", "failing")),
        "--reward_funcs: failing | KeyError: 'boom' (plugin_failing.py:4)",
        5,
    ),
    "function that knows no number": (
        lambda d: d.rlhf(*d.reward("return [float('nan')] * len(completions)", "unsure")),
        "--reward_funcs: unsure | returned nan",
        5,
    ),
    "function that hangs": (
        lambda d: d.rlhf(*d.reward("__import__('time').sleep(999)", "hanging"), "--reward_timeout 0.5"),
        "--reward_funcs: hanging | time-out after 0.5 s",
        5,
    ),
    "plugins that register one name": (
        lambda d: d.rlhf("--external_plugins", *(d.plugin(IMPORT + "orms['f'] = len\n", f"{n}/p.py") for n in "ab")),
        "--external_plugins | 'f', which",
    ),
    "parameter that nobody gives": (
        lambda d: d.rlhf(*d.entry("def needy(completions, verdict, **kw):\n    return [0.0]\n", "needy")),
        "needy | verdict | solution",
    ),
    "class that cannot be built": (
        lambda d: d.rlhf(*d.entry("class built(ORM):\n    def __init__(self, alpha_beta):\n        pass\n", "built")),
        "reward function built | 'alpha_beta'",
    ),
    "wrong number of rewards": (
        lambda d: d.rlhf(*d.reward("return [1.0] * (len(completions) + 1)", "longer")),
        "--reward_funcs: longer: | plugin_longer.py:3: returned 3 values for 2 completions",
        5,
    ),
    "rewards that are texts": (
        lambda d: d.rlhf(*d.reward("return ['good'] * len(completions)", "wordy")),
        "--reward_funcs: wordy",
        5,
    ),
    "reward model without a head": (lambda d: d.rlhf("--reward_model", d.model), "--reward_model"),
    "reward-test without completions": (
        lambda d: ["reward-test", "--reward_funcs", "format", "--dataset", d.rows(ROWS), "--completions", "gone.jsonl"],
        "--completions: gone.jsonl",
    ),
}

BATCHES = {
    "window no multiple of G": (
        "--per_device_train_batch_size 3",
        "C=3 | valid G: 3; or a=8 | or b=8",
    ),
    "more than the context": (
        "--max_length 1020",
        "--max_length: 1020 | --max_completion_length 8 | 1024",
    ),
}

MODELS = {
    "no such folder": ("--model ./no-such-model", "--model | no-such-model"),
    "folder without config": (lambda d: d.rlhf("--model", d.folder), "--model | config.json"),
    "tokenizer of another model": (
        lambda d: d.sft("--model", damaged_model(d, lambda f: edit_config(f, vocab_size=200))),
        "--model | tokenizer has ids up to | embedding 200 rows",
    ),
    **{
        f"{name} of {value}, {'rehearsed' if words else 'run'}": (
            lambda d, name=name, value=value, words=words: d.rlhf(
                "--model", damaged_model(d, lambda f: edit_config(f, layer_types=None, **{name: value})), *words
            ),
            f"copy | config.json | {said}",
        )
        for name, value, said in (
            ("hidden_size", 0, "another shape"),
            ("vocab_size", 10**9, "another shape"),
            ("intermediate_size", 10**12, "another shape"),
            ("num_hidden_layers", 10**9, "num_hidden_layers 1000000000"),
        )
        for words in ((), ("--dry_run true",))
    },
    "pad token beyond the vocabulary": (
        lambda d: d.rlhf("--model", damaged_model(d, lambda f: edit_config(f, pad_token_id=10**6)), "--dry_run true"),
        "--model | config.json: pad_token_id 1000000",
    ),
    "template that counts without end": (
        lambda d: jinja(d, "{% for i in range(10**9) %}{{ i }}{% endfor %}"),
        "template | Range too big",
    ),
    "template that divides by zero": (lambda d: jinja(d, "{{ 1 // 0 }}"), "template | zero"),
    "unknown template": ("--template nonsense", "--template: nonsense"),
    "adapter that is none": (lambda d: d.rlhf("--adapters", d.folder), "--adapters | adapter_config.json"),
    "infer from nothing": (lambda d: ["infer", "--model", d.folder / "gone"], "--model | gone"),
    "merge of nothing": (
        lambda d: ["merge-lora", "--model", d.model, "--adapters", d.folder / "gone"],
        "--adapters | gone",
    ),
}

DAMAGED = {
    # what is done to the folder of the model, and fragments
    "broken config": (with_json("config.json", "{"), "config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    "torn weights": (lambda f: cut_in_half(f / "model.safetensors"), "--model | weights cannot be loaded"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("token*")], "tokenizer"),
    "tokenizer without its vocabulary": (
        lambda f: (f / "tokenizer.json").unlink(),
        "--model | knows no text | tokenizer.json",
    ),
    "config that is a list": (with_json("config.json", [1]), "config.json | object"),
    "config of a wrong type": (with_json("config.json", {"model_type": 3}), "--model | config.json"),
    "config with an integer of 5,000 digits": (with_json("config.json", f'{{"a": {LONG}}}'), "config.json | digits"),
    "tokenizer config that is a list": (with_json("tokenizer_config.json", [1]), "--model | tokenizer"),
    "tokenizer that is a list": (with_json("tokenizer.json", [1]), "--model | tokenizer"),
    "pointer of Git LFS instead of weights": (
        with_json("model.safetensors", POINTER),
        "--model | model.safetensors | git lfs pull",
    ),
    "weights that are not numbers": (with_nan, "--model | model.norm.weight | not finite"),
}


def with_adapter(mode, damage):
    """A command that takes an adapter with wrong values in its config, or another damage."""

    def words(desk):
        folder = adapter(desk)
        if callable(damage):
            damage(folder / "adapter_model.safetensors")
        else:
            file = folder / "adapter_config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
        merge = ["merge-lora", "--model", desk.model, "--adapters", folder, "--output_dir", desk.output]
        return merge if mode == "merge" else desk.rlhf("--adapters", folder, mode)

    return words


def with_value(value):
    """Damages the file of an adapter: every tensor ends with this."""

    def write(file):
        tensors = load_file(file)
        for tensor in tensors.values():
            tensor.view(-1)[-1] = value
        save_file(tensors, file, {"format": "pt"})

    return write


def experts(desk):
    """A folder of a tiny mixture of experts."""
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=263, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, eos_token_id=258, pad_token_id=256,
    )  # fmt: skip
    folder = desk.copy_model("experts")
    (folder / "config.json").unlink()
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


DRY = "--dry_run true"
ADAPTERS = {
    "scale that is no number": (with_adapter("merge", {"lora_alpha": math.nan}), "--adapters | lora_alpha: nan"),
    "scale without end": (with_adapter(DRY, {"lora_alpha": 1e308}), "--adapters | lora_alpha: 1e+308"),
    "scale of a module without end": (
        with_adapter(DRY, {"alpha_pattern": {"q_proj": math.inf}}),
        "--adapters | alpha_pattern: q_proj: inf",
    ),
    "rank above its tensors": (with_adapter(DRY, {"r": 10**9}), "--adapters | r: 1000000000: 1 to"),
    "names that are none": (
        with_adapter(DRY, {"target_parameters": 3}),
        "--adapters | target_parameters: 3: it should",
    ),
    "folder that is none": (
        with_adapter("merge", {"base_model_name_or_path": 3}),
        "--adapters | base_model_name_or_path",
    ),
    "kind that is none": (with_adapter(DRY, {"peft_type": ["LORA"]}), "--adapters | peft_type: ['LORA']: no kind"),
    "pattern that is a list": (with_adapter(DRY, {"alpha_pattern": [3]}), "--adapters | alpha_pattern: [3]: it should"),
    "rank of a module above its tensors": (
        with_adapter(DRY, {"rank_pattern": {"q_proj": 10**9}}),
        "--adapters | rank_pattern: q_proj",
    ),
    "start of many iterations": (
        with_adapter(DRY, {"init_lora_weights": "pissa_niter_9999999"}),
        "--adapters | init_lora_weights: pissa_niter_9999999",
    ),
    "layers that are copied": (
        with_adapter(DRY, {"layer_replication": [[0, 10**9]]}),
        "--adapters | layer_replication",
    ),
    "targets that are no expression": (with_adapter(DRY, {"target_modules": "(q_proj"}), "--adapters | (q_proj"),
    "targets that take for ever": (
        with_adapter(DRY, {"target_modules": r"(([a-z0-9_.])+)+\$"}),
        "--adapters | target_modules | takes more than",
    ),
    "ranks that take for ever": (
        with_adapter("merge", {"rank_pattern": {r"([a-z_.0-9]+)+\$": 2}}),
        "--adapters | rank_pattern | takes more than",
    ),
    "NaN in an adapter to merge": (with_adapter("merge", with_value(math.nan)), "--adapters | lora_A | not finite"),
    "NaN in an adapter to train": (with_adapter("--seed 1", with_value(math.nan)), "--adapters | lora_A | not finite"),
    "merge beyond the type": (with_adapter("merge", with_value(3e38)), "--adapters | merging gives | not finite"),
    "adapters of experts for vLLM": (
        lambda d: d.rlhf("--model", experts(d), "--use_vllm true --vllm_enable_lora true", DRY),
        "--vllm_enable_lora | mlp.experts.down_proj | false sends merged weights",
    ),
    "torn adapter": (with_adapter(DRY, cut_in_half), "--adapters | adapter_model.safetensors"),
}

CHECKPOINTS = {
    "no checkpoint": (lambda d: d.rlhf("--resume_from_checkpoint", d.model), "--resume_from_checkpoint"),
    "output that is read-only": ("--output_dir /proc/run", "--output_dir: /proc/run"),
    "output of a dry run that is read-only": (
        "--output_dir /proc/run --dry_run true",
        "--output_dir: /proc/run",
    ),
    "output of sft that is read-only": (lambda d: d.sft("--output_dir /proc/run"), "--output_dir: /proc/run"),
    "output that is full": (
        lambda d: ["merge-lora", "--model", d.model, "--adapters", adapter(d), "--output_dir", d.model],
        "--output_dir | exists and is not empty",
    ),
    "adapter of another shape": (lambda d: d.rlhf("--adapters", adapter(d, size="tiny")), "--adapters"),
}


TABLE = {**MODES, **FLAGS, **CONFIGS, **DATA, **REWARDS, **BATCHES, **MODELS, **ADAPTERS, **CHECKPOINTS}


TAKES_LONG = {"ranks that take for ever"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in TAKES_LONG else ()) for name in TABLE]
)
def test_a_wrong_input_is_told_in_lines_and_leaves_nothing(name, desk, capfd):
    refused_without_a_trace(desk, TABLE[name], capfd)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_model_is_told_in_lines_and_leaves_nothing(name, desk, capfd):
    damage, fragments = DAMAGED[name]
    refused_without_a_trace(desk, (lambda desk: desk.rlhf("--model", damaged_model(desk, damage)), fragments), capfd)


def pickled_weights(desk, owned):
    folder = desk.copy_model("pickled")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(trapped_archive(owned))
    return folder


def pickled_adapter(desk, owned):
    folder = adapter(desk)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(trapped_archive(owned))
    return folder


def pickled_tokenizer(desk, owned):
    folder = desk.copy_model("pickled")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(trap(owned))
    return folder


def repository_code(desk, owned):
    folder = desk.copy_model("coded")
    (folder / "own.py").write_text(f"open({str(owned)!r}, 'w')\nclass Own: pass\n")
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.Own"})
    return folder


def pickled_rows(desk, owned, name):
    (desk.folder / name).write_bytes(trap(owned))
    return desk.folder / name


PAIRS = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(8)]
OTHERS_FILES = {
    "weights": lambda d, o: d.rlhf("--model", pickled_weights(d, o)),
    "weights of sft": lambda d, o: d.sft("--model", pickled_weights(d, o)),
    "weights of a reward model": lambda d, o: d.rlhf("--reward_model", pickled_weights(d, o)),
    "weights of a reference": lambda d, o: d.rlhf("--beta 0.1", "--ref_model", pickled_weights(d, o)),
    "weights of a reference of dpo": lambda d, o: d.train(
        "rlhf", {"--rlhf_type": "dpo", "--ref_model": pickled_weights(d, o)}, ["--dataset", d.rows(PAIRS)], ()
    ),
    "weights of a teacher": lambda d, o: d.train(
        "rlhf", {"--rlhf_type": "gkd", "--teacher_model": pickled_weights(d, o)}, (), ()
    ),
    "an adapter": lambda d, o: d.rlhf("--adapters", pickled_adapter(d, o)),
    "an adapter to infer with": lambda d, o: ["infer", "--adapters", pickled_adapter(d, o)],
    "an adapter to export": lambda d, o: ["export", "--merge_lora", "true", "--adapters", pickled_adapter(d, o)],
    "an adapter to merge": lambda d, o: ["merge-lora", "--adapters", pickled_adapter(d, o)],
    "a tokenizer": lambda d, o: d.rlhf("--model", pickled_tokenizer(d, o)),
    "code": lambda d, o: d.rlhf("--model", repository_code(d, o)),
    "code to infer with": lambda d, o: ["infer", "--model", repository_code(d, o)],
    **{
        f"rows in {name}": lambda d, o, name=name: d.rlhf("--dataset", pickled_rows(d, o, name))
        for name in ("rows.pt", "rows.pkl", "rows.arrow", "rows.parquet", "rows.jsonl")
    },
}


@pytest.mark.parametrize("name", OTHERS_FILES)
def test_files_of_others_are_refused_and_run_nothing(name, desk, capfd):
    owned = desk.folder / "owned"
    refused(OTHERS_FILES[name](desk, owned), f"{desk.folder}", capfd)
    assert not owned.exists()
