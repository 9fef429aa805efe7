"""Wrong inputs, end to end through `main`: each gives one-line errors, the documented code, and leaves nothing behind.

One row per input: what is typed, the exit code, and fragments that the error lines must contain.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from swift.cli.main import main
from swift.models.tiny import build_tiny

ROWS = [{"query": f"What is {n} + 1?", "solution": str(n + 1)} for n in range(20)]

IMPORT = "from swift.plugin import ORM, orms\n"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny", size="nano")


@dataclass
class Desk:
    """A place to write wrong files, and command lines that are right but for one thing."""

    folder: Path
    model: Path
    setenv: Callable[[str, str], None]

    @property
    def output(self):
        return self.folder / "output"

    def file(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    def rows(self, rows, name="rows.jsonl"):
        return self.file(name, "".join(json.dumps(row) + "\n" for row in rows))

    def plugin(self, text, name="my_plugin.py"):
        return self.file(name, text)

    def reward(self, body, name="mine"):
        """Flags of a plugin with one reward function."""
        text = f"{IMPORT}\ndef {name}(completions, **kwargs):\n    {body}\n\norms[{name!r}] = {name}\n"
        return "--external_plugins", self.plugin(text, f"plugin_{name}.py"), "--reward_funcs", name

    def copy_model(self, name="copy"):
        return Path(shutil.copytree(self.model, self.folder / name))

    def train(self, mode, flags, words, without):
        defaults = {
            "--model": self.model,
            "--dataset": None,
            "--output_dir": self.output,
            "--max_steps": 1,
            "--report_to": "none",
            **flags,
        }
        if "--dataset" in words or "--dataset" in without:
            defaults.pop("--dataset")
        else:
            defaults["--dataset"] = self.rows(ROWS)
        kept = [str(word) for item in defaults.items() if item[0] not in without for word in item]
        return [mode, *kept, *map(str, words)]

    def rlhf(self, *words, without=()):
        flags = {
            "--rlhf_type": "grpo",
            "--reward_funcs": "accuracy",
            "--per_device_train_batch_size": 8,
            "--max_completion_length": 8,
        }
        if "--reward_funcs" in words or "--reward_model" in words:
            flags.pop("--reward_funcs")
        return self.train("rlhf", flags, words, without)

    def sft(self, *words, without=()):
        return self.train("sft", {}, words, without)


@pytest.fixture
def desk(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "RANK", "WORLD_SIZE", "SWIFT_DEBUG", "USE_HF"):
        monkeypatch.delenv(name, raising=False)
    return Desk(tmp_path, tiny_model, monkeypatch.setenv)


def config(desk, text, name="run.yaml"):
    return ["rlhf", desk.file(name, text)]


BASE = "rlhf_type: grpo\nmodel: m\ndataset: d.jsonl\nreward_funcs: accuracy\n"


def checkpoint(desk, **settings):
    """A folder that looks like a checkpoint of a run with these settings."""
    folder = desk.folder / "old" / "v0-20260101-000000" / "checkpoint-5"
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(settings))
    return folder


def adapter(desk, size="nano"):
    """A LoRA adapter of a model of this size."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = desk.model if size == "nano" else build_tiny(desk.folder / "base", size=size)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules="all-linear"))
    peft.save_pretrained(desk.folder / "adapter")
    return desk.folder / "adapter"


def damaged_model(desk, damage):
    folder = desk.copy_model()
    damage(folder)
    return folder


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


MODES = {
    "no mode": (lambda d: [], 2, ["mode: none given", "rlhf, sft"]),
    "unknown mode": (lambda d: ["rlfh"], 2, ["mode: rlfh: unknown", "nearest: rlhf"]),
    "mode of ms-swift": (lambda d: ["deploy"], 2, ["mode: deploy: known in ms-swift, not supported here", "rlhf, sft"]),
}

FLAGS = {
    "no rlhf_type": (lambda d: d.rlhf(without=["--rlhf_type"]), 2, ["--rlhf_type: missing", "valid: grpo"]),
    "misspelt rlhf_type": (lambda d: d.rlhf("--rlhf_type", "grop"), 2, ["--rlhf_type: grop", "grpo"]),
    "no reward": (lambda d: d.rlhf(without=["--reward_funcs"]), 2, ["--reward_funcs", "--reward_model"]),
    "misspelt flag": (lambda d: d.rlhf("--num_generation", "4"), 2, ["--num_generation: ", "num_generations"]),
    "out of range": (lambda d: d.rlhf("--top_p", "1.5"), 2, ["--top_p: 1.5: out of range"]),
    "zero temperature": (lambda d: d.rlhf("--temperature", "0"), 2, ["--temperature: 0: out of range"]),
    "group of one": (lambda d: d.rlhf("--num_generations", "1"), 2, ["--num_generations: 1: out of range"]),
    "negative rate": (lambda d: d.rlhf("--learning_rate", "-1"), 2, ["--learning_rate: -1: out of range"]),
    "no number": (lambda d: d.rlhf("--learning_rate", "fast"), 2, ["--learning_rate: fast: not a number"]),
    "not finite": (lambda d: d.rlhf("--beta", "nan"), 2, ["--beta: nan: not a finite number"]),
    "no whole number": (lambda d: d.rlhf("--max_steps", "1.5"), 2, ["--max_steps: 1.5: not a whole number"]),
    "no boolean": (lambda d: d.rlhf("--strict", "maybe"), 2, ["--strict: maybe: not a boolean"]),
    "no choice": (lambda d: d.rlhf("--loss_type", "dapoo"), 2, ["--loss_type: dapoo: not a choice", "dapo"]),
    "flag without value": (lambda d: d.rlhf("--beta"), 2, ["--beta"]),
    "two values": (lambda d: d.rlhf("--beta", "0", "1"), 2, ["--beta: 0 1: 2 values where one is expected"]),
    "stray word": (lambda d: ["rlhf", "grpo"], 2, ["grpo: neither a flag nor a config file"]),
    "two spellings, two values": (
        lambda d: d.rlhf("--train_type", "lora", "--tuner_type", "full"),
        2,
        ["--train_type", "--tuner_type", "lora", "full"],
    ),
    "columns no JSON": (lambda d: d.rlhf("--columns", "{answer"), 2, ["--columns: {answer: not JSON"]),
    "columns no map": (lambda d: d.rlhf("--columns", "[1]"), 2, ["--columns: [1]: JSON, but not a map"]),
    "no model": (lambda d: d.rlhf(without=["--model"]), 2, ["--model: missing"]),
    "no dataset": (lambda d: d.rlhf(without=["--dataset"]), 2, ["--dataset: missing"]),
    "endless stream": (lambda d: d.rlhf("--streaming", "true", "--max_steps", "-1"), 2, ["--max_steps: -1"]),
    "too many weights": (
        lambda d: d.rlhf("--reward_funcs", "accuracy", "format", "--reward_weights", "1", "1", "1"),
        2,
        ["--reward_weights: 1 1 1", "need 2: accuracy format"],
    ),
    "soft_overlong alone": (
        lambda d: d.rlhf("--reward_funcs", "soft_overlong"),
        2,
        ["--soft_cache_length: none", "--soft_max_length 8"],
    ),
    "soft cache too long": (
        lambda d: d.rlhf("--reward_funcs", "soft_overlong", "--soft_cache_length", "8"),
        2,
        ["--soft_cache_length: 8", "--soft_max_length 8"],
    ),
    "cispo without cap": (lambda d: d.rlhf("--loss_type", "cispo"), 2, ["epsilon_high", "5.0"]),
    "both engines": (
        lambda d: d.rlhf("--use_vllm", "true", "--use_lmdeploy", "true"),
        2,
        ["--use_lmdeploy: true: excludes --use_vllm"],
    ),
    "strange parity check": (lambda d: d.rlhf("--parity_check", "often"), 2, ["--parity_check: often", "every:N"]),
    "training on parts in one process": (
        lambda d: d.rlhf("--streaming_partial_batch", "true"),
        2,
        ["--streaming_partial_batch: true", "--vllm_mode dedicated or server"],
    ),
    "training on parts with a batch's statistics": (
        lambda d: d.rlhf("--streaming_partial_batch", "true", "--scale_rewards", "batch", "--loss_type", "bnpo"),
        2,
        ["--scale_rewards batch", "--loss_type bnpo"],
    ),
    "a clip for a loss without one": (
        lambda d: d.rlhf("--loss_type", "cispo", "--epsilon_high", "5", "--delta", "7"),
        2,
        ["--delta: 7", "cispo"],
    ),
    "FlexAttention on a CPU": (
        lambda d: d.rlhf("--attn_impl", "flex_attention"),
        2,
        ["--attn_impl: flex_attention", "--attn_impl sdpa"],
    ),
    "flash-attn in 32 bits": (
        lambda d: d.rlhf("--attn_impl", "flash_attn", "--torch_dtype", "float32"),
        2,
        ["--attn_impl: flash_attn", "--torch_dtype float32"],
    ),
    "a KL of penalised log-probs": (
        lambda d: d.rlhf("--kl_in_reward", "true", "--beta", "0.1", "--repetition_penalty", "1.2"),
        2,
        ["--kl_in_reward: true", "--repetition_penalty 1.2"],
    ),
    "parts of a batch that feeds several steps": (
        lambda d: d.rlhf(
            "--streaming_partial_batch",
            "true",
            "--vllm_mode",
            "dedicated",
            "--infer_backend",
            "transformers",
            "--per_device_train_batch_size",
            "4",
            "--generation_batch_size",
            "8",
            "--num_generations",
            "4",
        ),
        2,
        ["--streaming_partial_batch: true", "2 optimizer steps", "--generation_batch_size 4"],
    ),
    "a staleness that the replay buffer exceeds": (
        lambda d: d.rlhf("--max_staleness", "4", "--replay_buffer_size", "4"),
        2,
        ["--max_staleness: 4", "--replay_max_age 32"],
    ),
    "a staleness that carried groups exceed": (
        lambda d: d.rlhf("--max_staleness", "1", "--dynamic_sample", "true"),
        2,
        ["--max_staleness: 1", "--dynamic_sample"],
    ),
    "gdpo with another estimator": (
        lambda d: d.rlhf("--scale_rewards", "gdpo", "--advantage_estimator", "rloo"),
        2,
        ["--scale_rewards: gdpo", "--advantage_estimator grpo"],
    ),
    "replacing groups ahead with a reward model": (
        lambda d: d.rlhf(
            "--dynamic_sample",
            "true",
            "--async_generate",
            "true",
            "--vllm_mode",
            "dedicated",
            "--infer_backend",
            "transformers",
            "--reward_model",
            d.model,
        ),
        2,
        ["--dynamic_sample: true", "--async_generate false"],
    ),
    "unknown backend": (lambda d: d.rlhf("--infer_backend", "vlm"), 2, ["--infer_backend: vlm", "nearest: vllm"]),
    "backend against use_vllm": (
        lambda d: d.rlhf("--infer_backend", "transformers", "--use_vllm", "true"),
        2,
        ["--infer_backend: transformers: contradicts --use_vllm"],
    ),
    "ahead without devices of its own": (
        lambda d: d.rlhf("--async_generate", "true", "--infer_backend", "transformers"),
        2,
        ["--async_generate: true", "--vllm_mode dedicated"],
    ),
    "too little staleness": (
        lambda d: d.rlhf("--max_staleness", "1", "--num_iterations", "4"),
        2,
        ["--max_staleness: 1", "raise it"],
    ),
    "known elsewhere": (
        lambda d: d.rlhf("--multi_turn_scheduler", "math_tip_trick"),
        2,
        ["--multi_turn_scheduler"],
    ),
    "several at once": (
        lambda d: d.rlhf("--top_p", "2", "--beta", "-1", "--num_generation", "4"),
        2,
        ["--top_p: 2", "--beta: -1", "--num_generation"],
    ),
    "flag of another mode": (lambda d: d.sft("--num_generations", "4"), 2, ["--num_generations: 4", "a flag of: rlhf"]),
    "USE_HF that is no boolean": (
        lambda d: [d.setenv("USE_HF", "maybe"), d.rlhf()][1],
        2,
        ["USE_HF: maybe: not a boolean"],
    ),
    "processes that are no number": (
        lambda d: [d.setenv("NPROC_PER_NODE", "two"), d.rlhf()][1],
        2,
        ["NPROC_PER_NODE: two: not a whole number"],
    ),
    "two nodes without an address": (
        lambda d: [d.setenv("NNODES", "2"), d.rlhf()][1],
        2,
        ["NODE_RANK: not set", "MASTER_ADDR: not set"],
    ),
    "infer without model": (lambda d: ["infer"], 2, ["--model: missing"]),
    "export without adapters": (lambda d: ["export", "--model", d.model], 2, ["--adapters: missing"]),
    "schema of nothing": (lambda d: ["config-schema", "grpo"], 2, ["--mode: grpo: not a choice"]),
}

CONFIGS = {
    "no such config": (lambda d: ["rlhf", "gone.yaml"], 2, ["gone.yaml: config file: cannot be read"]),
    "two configs": (
        lambda d: [*config(d, BASE), "--config", d.file("b.yaml", BASE)],
        2,
        ["--config", "second config file"],
    ),
    "duplicate key": (lambda d: config(d, BASE + "beta: 0\nbeta: 1\n"), 2, ["run.yaml:6: beta: duplicate key"]),
    "unknown key": (
        lambda d: config(d, BASE + "num_generation: 8\n"),
        2,
        ["run.yaml:5: num_generation", "num_generations"],
    ),
    "broken YAML": (lambda d: config(d, "model: [1\nbeta: 2\n"), 2, ["run.yaml:", "not YAML"]),
    "YAML of a list": (lambda d: config(d, "- model\n"), 2, ["run.yaml: config file: not a map"]),
    "broken JSON config": (lambda d: config(d, '{\n"beta": 1,\n}', "run.json"), 2, ["run.json:3: not JSON"]),
    "wrong value in a config": (
        lambda d: config(d, BASE + "top_p: high\n"),
        2,
        ["run.yaml:5: top_p", "high", "not a number"],
    ),
    "ENV that is no map": (lambda d: config(d, BASE + "ENV: 1\n"), 2, ["run.yaml:5: ENV: not a map"]),
}

DATA = {
    "misspelt file": (
        lambda d: [d.rows(ROWS, "data/train.jsonl"), d.rlhf("--dataset", "data/trian.jsonl")][1],
        2,
        ["--dataset: data/trian.jsonl", "train.jsonl"],
    ),
    "bad count": (lambda d: d.rlhf("--dataset", d.rows(ROWS) + "#abc"), 2, ["#abc", "count"]),
    "broken line": (
        lambda d: d.rlhf("--dataset", d.file("x.jsonl", '{"query": "a", "solution": "b"}\n' * 16 + '{"query"\n')),
        2,
        ["x.jsonl:17"],
    ),
    "empty file": (lambda d: d.rlhf("--dataset", d.file("x.jsonl", "")), 2, ["x.jsonl"]),
    "two prompt columns": (
        lambda d: d.rlhf("--dataset", d.rows([{"question": "a", "prompt": "b", "solution": "c"}])),
        2,
        ["question", "prompt", "--columns"],
    ),
    "no prompt column": (
        lambda d: d.rlhf("--dataset", d.rows([{"text": "a", "solution": "c"}] * 4)),
        2,
        ["text", "query"],
    ),
    "renaming an unknown column": (
        lambda d: d.rlhf(
            "--dataset", d.rows([{"query": "a", "answer": "b"}] * 9), "--columns", '{"anwser":"solution"}'
        ),
        2,
        ["--columns", "anwser", "nearest: answer"],
    ),
    "bad row in strict mode": (
        lambda d: d.rlhf("--dataset", d.rows([*ROWS, {"query": 5, "solution": "1"}]), "--strict", "true"),
        2,
        ["rows.jsonl:21"],
    ),
    "no validation file": (lambda d: d.rlhf("--val_dataset", "nowhere.jsonl"), 2, ["--val_dataset: nowhere.jsonl"]),
    "missing system file": (lambda d: d.rlhf("--system", "nowhere.txt"), 2, ["--system: nowhere.txt"]),
    "splitting a stream": (
        lambda d: d.rlhf("--streaming", "true", "--split_dataset_ratio", "0.1"),
        2,
        ["--split_dataset_ratio: 0.1"],
    ),
    "unknown procedural task": (
        lambda d: d.rlhf("--dataset", "reasoning_gym:adding_up", "--reward_funcs", "reasoning_gym"),
        2,
        ["reasoning_gym:adding_up"],
    ),
    "fewer rows than a batch": (
        lambda d: d.rlhf("--dataset", d.rows(ROWS[:1]), "--num_generations", "4", "--max_steps", "-1"),
        2,
        ["--dataset: 1 rows: fewer than the 2 prompts"],
    ),
    "sft without answers": (
        lambda d: d.sft("--dataset", d.rows([{"messages": [{"role": "user", "content": "hi"}]}] * 3)),
        2,
        ["rows.jsonl"],
    ),
}

REWARDS = {
    "misspelt function": (lambda d: d.rlhf("--reward_funcs", "acuracy"), 2, ["--reward_funcs: acuracy", "accuracy"]),
    "function twice": (lambda d: d.rlhf("--reward_funcs", "format", "format"), 2, ["--reward_funcs", "format"]),
    "function for samplers": (lambda d: d.rlhf("--reward_funcs", "math"), 2, ["--reward_funcs: math", "accuracy"]),
    "no gold column": (
        lambda d: d.rlhf("--dataset", d.rows([{"query": "a", "answer": "b"}] * 9)),
        2,
        ["accuracy", "answer", '--columns \'{"answer":"solution"}\''],
    ),
    "empty gold": (
        lambda d: d.rlhf("--dataset", d.rows([{"query": "a", "solution": ""}] * 9)),
        2,
        ["'solution' is empty"],
    ),
    "reserved column": (
        lambda d: d.rlhf("--dataset", d.rows([{**row, "trainer_state": 1} for row in ROWS])),
        2,
        ["trainer_state"],
    ),
    "no such plugin": (lambda d: d.rlhf("--external_plugins", "gone.py"), 2, ["--external_plugins: gone.py"]),
    "plugin with a syntax error": (
        lambda d: d.rlhf("--external_plugins", d.plugin("x = 1\ndef f(:\n    pass\n")),
        2,
        ["my_plugin.py:2", "SyntaxError"],
    ),
    "plugin that raises": (
        lambda d: d.rlhf("--external_plugins", d.plugin("x = 1\nraise KeyError('boom')\n")),
        2,
        ["my_plugin.py:2", "KeyError: 'boom'"],
    ),
    "plugins that register one name": (
        lambda d: d.rlhf("--external_plugins", *(d.plugin(IMPORT + "orms['f'] = len\n", f"{n}/p.py") for n in "ab")),
        2,
        ["--external_plugins", "'f', which"],
    ),
    "parameter that nobody gives": (
        lambda d: d.rlhf(
            "--reward_funcs",
            "needy",
            "--external_plugins",
            d.plugin(
                IMPORT + "def needy(completions, verdict, **kw):\n    return [0.0]\n\norms['needy'] = needy\n",
                "needy_plugin.py",
            ),
        ),
        2,
        ["needy", "verdict", "solution"],
    ),
    "class that cannot be built": (
        lambda d: d.rlhf(
            "--reward_funcs",
            "built",
            "--external_plugins",
            d.plugin(
                IMPORT + "class Built(ORM):\n    def __init__(self, alpha_beta):\n        pass\n"
                "    def __call__(self, completions, **kw):\n        return [0.0] * len(completions)\n"
                "orms['built'] = Built\n",
                "built_plugin.py",
            ),
        ),
        2,
        ["alpha_beta"],
    ),
    "wrong number of rewards": (
        lambda d: d.rlhf(*d.reward("return [1.0] * (len(completions) + 1)", "longer")),
        5,
        ["--reward_funcs: longer"],
    ),
    "rewards that are texts": (
        lambda d: d.rlhf(*d.reward("return ['good'] * len(completions)", "wordy")),
        5,
        ["--reward_funcs: wordy"],
    ),
    "reward model without a head": (lambda d: d.rlhf("--reward_model", d.model), 2, ["--reward_model"]),
    "reward-test without completions": (
        lambda d: ["reward-test", "--reward_funcs", "format", "--dataset", d.rows(ROWS), "--completions", "gone.jsonl"],
        2,
        ["--completions: gone.jsonl"],
    ),
}

BATCHES = {
    "window no multiple of G": (
        lambda d: d.rlhf("--per_device_train_batch_size", "3"),
        2,
        ["C=3", "valid G: 3; or a=8", "or b=8"],
    ),
    "slices that do not fit": (lambda d: d.rlhf("--mini_batch_size", "3"), 2, ["--mini_batch_size: 3", "1, 2, 4, 8"]),
    "steps per generation": (
        lambda d: d.rlhf("--gradient_accumulation_steps", "2", "--steps_per_generation", "3"),
        2,
        ["--steps_per_generation: 3", "nearest: 2, 4"],
    ),
    "generation batch against steps": (
        lambda d: d.rlhf("--generation_batch_size", "16", "--steps_per_generation", "4"),
        2,
        ["--generation_batch_size: 16: disagrees"],
    ),
    "more than the context": (
        lambda d: d.rlhf("--max_length", "1020"),
        2,
        ["--max_length: 1020", "--max_completion_length 8", "1024"],
    ),
    "no room for a prompt": (
        lambda d: d.rlhf("--max_completion_length", "1024"),
        2,
        ["--max_completion_length: 1024", "1023"],
    ),
}

MODELS = {
    "no such folder": (lambda d: d.rlhf("--model", "./no-such-model"), 2, ["--model", "no-such-model"]),
    "folder without config": (lambda d: d.rlhf("--model", d.folder), 2, ["--model", "config.json"]),
    "broken config": (
        lambda d: d.rlhf("--model", damaged_model(d, lambda f: (f / "config.json").write_text("{"))),
        2,
        ["config.json"],
    ),
    "no weights": (
        lambda d: d.rlhf("--model", damaged_model(d, lambda f: (f / "model.safetensors").unlink())),
        2,
        ["safetensors"],
    ),
    "torn weights": (
        lambda d: d.rlhf("--model", damaged_model(d, lambda f: cut_in_half(f / "model.safetensors"))),
        2,
        ["--model", "weights cannot be loaded"],
    ),
    "no tokenizer": (
        lambda d: d.rlhf("--model", damaged_model(d, lambda f: [p.unlink() for p in f.glob("token*")])),
        2,
        ["tokenizer"],
    ),
    "unknown template": (lambda d: d.rlhf("--template", "nonsense"), 2, ["--template: nonsense"]),
    "unknown target": (lambda d: d.rlhf("--target_modules", "no_proj"), 2, ["--target_modules: no_proj"]),
    "adapter that is none": (lambda d: d.rlhf("--adapters", d.folder), 2, ["--adapters", "adapter_config.json"]),
    "infer from nothing": (lambda d: ["infer", "--model", d.folder / "gone"], 2, ["--model", "gone"]),
    "merge of nothing": (
        lambda d: ["merge-lora", "--model", d.model, "--adapters", d.folder / "gone"],
        2,
        ["--adapters", "gone"],
    ),
}

CHECKPOINTS = {
    "nothing to resume": (lambda d: d.rlhf("--resume_from_checkpoint", "last"), 2, ["--resume_from_checkpoint"]),
    "no checkpoint": (lambda d: d.rlhf("--resume_from_checkpoint", d.model), 2, ["--resume_from_checkpoint"]),
    "no such checkpoint": (
        lambda d: d.rlhf("--resume_from_checkpoint", "gone"),
        2,
        ["--resume_from_checkpoint", "gone: no such folder"],
    ),
    "torn checkpoint": (
        lambda d: d.rlhf("--resume_from_checkpoint", checkpoint(d, num_generations=8)),
        2,
        ["--resume_from_checkpoint", "checkpoint-5"],
    ),
    "output that is a file": (
        lambda d: d.rlhf("--output_dir", d.file("taken", "")),
        2,
        ["--output_dir", "taken"],
    ),
    "output that is full": (
        lambda d: ["merge-lora", "--model", d.model, "--adapters", adapter(d), "--output_dir", d.model],
        2,
        ["--output_dir", "exists and is not empty"],
    ),
    "adapter of another shape": (
        lambda d: d.rlhf("--adapters", adapter(d, size="tiny")),
        2,
        ["--adapters"],
    ),
}


@pytest.fixture(scope="session")
def finished_run(tiny_model, tmp_path_factory):
    """A run of one step, its data set beside it."""
    home = tmp_path_factory.mktemp("finished")
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(resume(tiny_model)) == 0
    return home


def resume(model, *words):
    """The command of the finished run, given in its folder, with more words."""
    command = f"rlhf --rlhf_type grpo --model {model} --dataset rows.jsonl --reward_funcs accuracy --max_steps 1"
    command += " --per_device_train_batch_size 8 --max_completion_length 8 --output_dir run --add_version false"
    return [*command.split(), "--report_to", "none", *map(str, words)]


def damaged_checkpoint(home, name, damage):
    damage(home / "run" / "checkpoint-1" / name)
    return home / "run" / "checkpoint-1"


def lock(home):
    holder = {"pid": 4242, "host": "elsewhere", "time": "2026-01-01T00:00:00+00:00", "started": 0.0}
    (home / "run" / "lock").write_text(json.dumps(holder) + "\n")
    return "last"


RESUMED = {
    "changed G": (lambda h: ["last", "--num_generations", "4"], 2, ["--num_generations: 4", "made with 8"]),
    "changed tuner": (lambda h: ["last", "--tuner_type", "full"], 2, ["--tuner_type: full", "made with lora"]),
    "changed rewards": (lambda h: ["last", "--reward_funcs", "format"], 2, ["--reward_funcs", "made with"]),
    "run folder instead of weights": (lambda h: [h / "run" / "logs"], 2, ["--resume_from_checkpoint"]),
    "torn adapter": (
        lambda h: [damaged_checkpoint(h, "adapter_model.safetensors", cut_in_half)],
        2,
        ["--resume_from_checkpoint", "adapter_model.safetensors"],
    ),
    "torn pipeline state": (
        lambda h: [damaged_checkpoint(h, "pipeline_state.json", cut_in_half)],
        2,
        ["--resume_from_checkpoint", "pipeline_state.json"],
    ),
    "lost optimizer": (
        lambda h: [damaged_checkpoint(h, "optimizer.pt", Path.unlink)],
        2,
        ["--resume_from_checkpoint", "optimizer.pt"],
    ),
    "run in use elsewhere": (lambda h: [lock(h)], 3, ["in use by process 4242 on elsewhere"]),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_wrong_resume_is_told_in_lines_and_touches_nothing(
    name, finished_run, tiny_model, tmp_path, desk, monkeypatch, capfd
):
    flags, code, fragments = RESUMED[name]
    home = Path(shutil.copytree(finished_run, tmp_path / "home"))
    monkeypatch.chdir(home)
    words = resume(tiny_model, "--resume_from_checkpoint", *flags(home))
    before = contents(home / "run")
    capfd.readouterr()
    assert main(words) == code
    captured = capfd.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("swift: error: ")]
    assert not [fragment for fragment in fragments if fragment not in "\n".join(errors)], captured.err
    assert "Traceback" not in captured.err + captured.out
    assert contents(home / "run") == before


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


TABLE = {**MODES, **FLAGS, **CONFIGS, **DATA, **REWARDS, **BATCHES, **MODELS, **CHECKPOINTS}


def test_the_table_is_long_enough():
    assert len(TABLE) >= 60


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_input_is_told_in_lines_and_leaves_nothing(name, desk, capfd):
    command, code, fragments = TABLE[name]
    words = [str(word) for word in command(desk)]
    assert main(words) == code
    captured = capfd.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("swift: error: ")]
    assert errors, captured.err
    assert "Traceback" not in captured.err + captured.out
    missing = [fragment for fragment in fragments if fragment not in "\n".join(errors)]
    assert not missing, errors
    assert not desk.output.exists()
    assert not (desk.folder / "output").exists()
