"""Wrong and random inputs for whole commands, drawn from a seed: flags, words, files, plugins, checkpoints."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli_runs import Cli
from commands import (
    OTHERS,
    SECRET,
    SECRETS,
    TRAINING,
    WORDS,
    Attempt,
    adapter,
    changed,
    damaged,
    make_special,
    poisoned,
    short_run,
    spoil,
)

from swift.arguments.schema import json_schema
from swift.trainers.checkpoint import commit_checkpoint

KEPT = {"rlhf_type", "external_plugins", "custom_register_path", "ENV", "dry_run", "debug", "add_version"}
"""Flags that would make another program of the case."""

ROWS: list[Callable[[random.Random, str], str]] = [
    lambda rng, line: line[: rng.randrange(len(line))],
    lambda rng, line: line.replace('"', "'"),
    lambda rng, line: line + line,
    lambda rng, line: "\ufeff" + line,
    lambda rng, line: "[" * 100_000 + line,
    lambda rng, line: json.dumps([json.loads(line)]),
    lambda rng, line: json.dumps({"prompt": 7, "solution": None}),
    lambda rng, line: json.dumps({"prompt": "", "solution": ""}),
    lambda rng, line: json.dumps({"messages": [{"role": rng.choice(["user", "tool", "", 3]), "content": None}]}),
    lambda rng, line: json.dumps({"messages": []}),
    lambda rng, line: json.dumps({"prompt": "<image>", "solution": "1", "images": [rng.choice(["/etc/hostname", 7])]}),
    lambda rng, line: json.dumps({"messages": [{"role": "user", "content": [{"type": "image", "image": "a"}]}]}),
    lambda rng, line: json.dumps(changed(rng, json.loads(line))),
    lambda rng, line: json.dumps({**json.loads(line), rng.choice(["self", "args", "completions", "images"]): 1}),
    lambda rng, line: json.dumps({"prompt": "{{NAME}}", "solution": "1", "tools": rng.choice(["[", 7, [{}]])}),
    lambda rng, line: '{"prompt": "a\\ud800b", "solution": "1"}',
    lambda rng, line: '{"prompt": "\\u001b[2J\\u0000<|im_end|>", "solution": "1"}',
    lambda rng, line: '{"prompt": "a", "solution": ' + "9" * 5000 + "}",
    lambda rng, line: '{"prompt": "a", "solution": 1e400}',
    lambda rng, line: json.dumps({"prompt": "long " * 20_000, "solution": "1"}),
    lambda rng, line: json.dumps({"prompt": "x" * (64 << 20), "solution": "1"}),
    lambda rng, line: json.dumps({f"column {n}": n for n in range(2000)}),
    lambda rng, line: "\0" * 50,
    lambda rng, line: "",
    lambda rng, line: "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1",
]

REWARDS = [
    "return [float('nan')] * len(completions)",
    "return [1e300] * len(completions)",
    "return ['good'] * len(completions)",
    "return completions",
    "return None",
    "return 1.0",
    "return {len(text) for text in completions}",
    "return dict.fromkeys(range(len(completions)), 1.0)",
    "return (1.0 for _ in completions)",
    "return [0.5] * (len(completions) + 1)",
    "return [10 ** 5000] * len(completions)",
    "return [None] * len(completions)",
    "completions.clear(); return [0.0] * 4",
    "raise KeyError('answer')",
    "raise SystemExit(0)",
    "raise KeyboardInterrupt",
    "raise Exception(chr(0xD800) + 'x' * 10 ** 6)",
    "raise Exception('\\x1b]0;title\\x07\\x1b[2J')",
    "return reward(completions)",
    "import os; os._exit(0)",
    "import os; os.kill(os.getpid(), 9)",
    "import os; os.close(1); os.close(2); return [0.0] * len(completions)",
    "import os; os.fork(); return [0.0] * len(completions)",
    "import subprocess; subprocess.Popen(['sleep', '300']); return [0.0] * len(completions)",
    "import time; time.sleep(300)",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)",
    "print('x' * 10 ** 6); return [0.0] * len(completions)",
    "import threading, time; threading.Thread(target=time.sleep, args=(300,)).start(); return [0.0] * len(completions)",
    "import sys; sys.modules.clear(); return [0.0] * len(completions)",
    "import ctypes; ctypes.string_at(0)",
]

IMPORTS = [
    "import os; os._exit(3)",
    "raise SystemExit",
    "raise BaseException('no')",
    "raise RuntimeError('a\\nb')",
    "1 +",
    "def f(): return f()\nf()",
    "import nothing_of_that_name",
    "from swift.plugin import nothing_of_that_name",
    "orms = None",
    "import sys; sys.stdout.close()",
    "import sys; sys.stdout = sys.stderr = None",
    "import sys; sys.modules.clear()",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "import os; os.chdir('/')",
    "import os; os.environ.clear()",
    "import torch; torch.set_grad_enabled(False)",
    "import torch; torch.set_default_dtype(torch.float64)",
    "import atexit, time; atexit.register(time.sleep, 300)",
    "import threading, time; threading.Thread(target=time.sleep, args=(300,)).start()",
]

TEMPLATES = [
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{{ 'x' * 99999999999 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception('no') }}",
    "the same for all",
    "{% for m in messages %}",
    "",
]

LINES = [
    "", "{", "[]", "null", "7", '"text"', '{"step": 1}', '{"step": "one"}', '{"step": 1e400, "reward": NaN}',
    '{"step": [1], "reward": {"a": 1}}', '{"step": -1}', "\0\0\0", "\ufeff{}", '{"step": 1, "reward": 0.5',
    '{"step": 2, "kl": "x", "grad_norm": null}', "[" * 100_000,
]  # fmt: skip


def random_flags(rng: random.Random, cli: Cli) -> Attempt:
    """One to three flags of any name with values of any kind, in any mode."""
    mode = rng.choice([*["rlhf"] * 6, *TRAINING, *OTHERS])
    schema = "rlhf" if mode in TRAINING and mode not in ("sft", "pt") else mode
    properties = {
        name: about
        for name, about in json_schema(schema)["properties"].items()
        if name not in KEPT and not name.startswith(("vllm_", "ray_")) and name not in ("use_vllm", "infer_backend")
    }
    words = short_run(cli, mode)
    for name in rng.sample(sorted(properties), rng.randint(1, 3)):
        about = properties[name]
        choices = [str(one) for part in [about, *about.get("anyOf", [])] for one in part.get("enum", [])]
        words += [f"--{name}", rng.choice([*choices, rng.choice(WORDS)])]
    return Attempt(words)


def wrong_words(rng: random.Random, cli: Cli) -> Attempt:
    """A right command line with words lost, doubled, changed or in another order; secrets among them."""
    words = short_run(cli, rng.choice([*["rlhf"] * 3, *TRAINING, *OTHERS]))
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(1, len(words))
        kind = rng.randrange(6)
        if kind == 0:
            del words[at]
        elif kind == 1:
            words.insert(at, words[at])
        elif kind == 2:
            words[at] = rng.choice(WORDS)
        elif kind == 3 and len(words[at]) > 1:
            letter = rng.randrange(len(words[at]))
            words[at] = words[at][:letter] + words[at][letter + 1 :]
        elif kind == 4:
            words += [rng.choice(["--hub_token", "--api_key", "--my_api_key", "--vllm_server_api_key"]), SECRET]
        else:
            other = rng.randrange(1, len(words))
            words[at], words[other] = words[other], words[at]
    return Attempt([word for word in words if "\0" not in word])


def wrong_rows(rng: random.Random, cli: Cli) -> Attempt:
    """Some or all rows damaged, or the file as a whole."""
    mode = rng.choice([*["rlhf"] * 3, *TRAINING, "infer", "reward-test"])
    words = short_run(cli, mode)
    at = words.index("--val_dataset" if mode == "infer" else "--dataset") + 1
    lines = Path(words[at]).read_text().splitlines()
    for number in rng.sample(range(len(lines)), rng.choice([1, 3, len(lines)])):
        lines[number] = rng.choice(ROWS)(rng, lines[number])
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    path = cli.folder / rng.choice(["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.jsonl.gz", "rows.txt"])
    path.write_bytes(damaged(rng, text) if rng.random() < 0.3 else text)
    words[at] = str(path)
    return Attempt(words)


def special_files(rng: random.Random, cli: Cli) -> Attempt:
    """A pipe, a device, a socket or a bomb in the place of any file or folder of a command line."""
    words = short_run(cli, rng.choice([*TRAINING, "infer", "merge-lora", "reward-test"]))
    places = [at for at in range(1, len(words)) if Path(words[at]).exists()]
    name = rng.choice(["special", "special.jsonl", "special.jsonl.gz", "special.json", "special.py", "special.csv"])
    make_special(rng, cli.folder / name)
    words[rng.choice(places)] = str(cli.folder / name)
    return Attempt(words)


def wrong_model(rng: random.Random, cli: Cli) -> Attempt:
    """A file of the model missing, damaged, poisoned, or with other values; or a hostile chat template."""
    model = Path(shutil.copytree(cli.model, cli.folder / "model"))
    kind = rng.random()
    if kind < 0.3:
        config = model / rng.choice(["config.json", "tokenizer_config.json", "generation_config.json"])
        if config.exists():
            config.write_text(json.dumps(changed(rng, json.loads(config.read_text()))))
    elif kind < 0.5:
        (model / "chat_template.jinja").write_text(rng.choice(TEMPLATES))
    elif kind < 0.6:
        (model / "model.safetensors").unlink()
        (model / "pytorch_model.bin").write_bytes(poisoned(rng))
    else:
        spoil(rng, rng.choice(sorted(path for path in model.iterdir() if path.is_file())))
    mode = rng.choice([*["rlhf"] * 3, *TRAINING, "infer", "rollout"])
    return Attempt(short_run(cli, mode, model=model))


def wrong_adapter(rng: random.Random, cli: Cli) -> Attempt:
    """An adapter that is merged or trained on, with a file spoilt or a setting of any value."""
    folder = adapter(cli)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    kind = rng.random()
    if kind < 0.3:
        name = rng.choice(["target_modules", "rank_pattern", "layers_pattern", "init_lora_weights", "lora_alpha", "r"])
        values = ["(a+)+$" * 5, "pissa_niter_9999999", {"(.*)*x": 10**9}, float("nan"), 1e308, -1, 10**9, [], None]
        path.write_text(json.dumps({**config, name: rng.choice(values)}))
    elif kind < 0.5:
        path.write_text(json.dumps(changed(rng, config)))
    elif kind < 0.6:
        (folder / "adapter_model.safetensors").unlink()
        (folder / "adapter_model.bin").write_bytes(poisoned(rng))
    else:
        spoil(rng, rng.choice(sorted(one for one in folder.iterdir() if one.is_file())))
    mode = rng.choice(["merge-lora", "merge-lora", "export", "rlhf", "infer", "sft", "rollout"])
    lora = {"tuner_type": "lora"} if mode in TRAINING else {}
    return Attempt(short_run(cli, mode, adapters=folder, **lora))


def wrong_config(rng: random.Random, cli: Cli) -> Attempt:
    """A config file with any values at any depth, secrets included, or damaged."""
    words = short_run(cli, "rlhf")[1:]
    values: dict[str, Any] = {words[at][2:]: words[at + 1] for at in range(0, len(words), 2)}
    values["ENV"] = dict(SECRETS)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*values, "seed", "optim_args", "lora_rank", rng.choice(WORDS)])
        values[name] = rng.choice([*WORDS, None, [], {}, [[]], {"a": {"b": None}}, 10**30, True, {"a": 1}])
    path = cli.folder / rng.choice(["config.yaml", "config.json", "config.yml", "config.toml"])
    text = json.dumps(values).encode()
    path.write_bytes(damaged(rng, text) if rng.random() < 0.4 else text)
    return Attempt(["rlhf", str(path), "--output_dir", str(cli.folder / "out")])


def wrong_plugin(rng: random.Random, cli: Cli) -> Attempt:
    """A plugin or reward function that does what it must not."""
    reward = (
        "from swift.plugin import orms\n\n\ndef reward(completions, **kwargs):\n    {}\n\n\norms['hostile'] = reward\n"
    )
    text = reward.format(rng.choice(REWARDS))
    if rng.random() < 0.35:
        text = f"{rng.choice(IMPORTS)}\n{reward.format('return [0.0] * len(completions)')}"
    path = cli.folder / "hostile_plugin.py"
    path.write_text(text)
    mode = rng.choice(["rlhf", "rlhf", "rlhf", "reward-test"])
    return Attempt(short_run(cli, mode, external_plugins=path, reward_funcs="hostile", reward_timeout=2))


def wrong_checkpoint(rng: random.Random, cli: Cli) -> Attempt:
    """A finished run that is resumed from a checkpoint with a file spoilt, poisoned or of another kind."""
    mode = rng.choice(["rlhf", "rlhf", "sft", "dpo"])
    code, _, err = cli._popen(short_run(cli, mode, save_steps=1), cli.folder / "out", {}).wait()
    assert code == 0, err
    newest = cli.folder / "out" / "checkpoint-2"
    path = rng.choice(sorted(path for path in newest.iterdir() if path.is_file()))
    if rng.random() < 0.3:
        path.write_bytes(poisoned(rng))
    elif path.suffix == ".json" and rng.random() < 0.5:
        path.write_text(json.dumps(changed(rng, json.loads(path.read_text()))))
    else:
        spoil(rng, path)
    if rng.random() < 0.5:  # as one who means harm would: the manifest fits the files
        commit_checkpoint(newest.rename(newest.with_name("spoilt")), newest, step=2)
    given = rng.choice(["last", "true", str(newest)])
    return Attempt(short_run(cli, mode, max_steps=4, save_steps=1, resume_from_checkpoint=given))


def wrong_import(rng: random.Random, cli: Cli) -> Attempt:
    """A configuration or script of another project with parts lost, changed or damaged."""
    axolotl = {
        "base_model": "m", "rl": "grpo", "datasets": [{"path": "d", "type": "alpaca", "split": "train[:10%]"}],
        "adapter": "lora", "lora_r": 8, "micro_batch_size": 1, "trl": {"beta": 0.1, "reward_funcs": ["a.b"]},
        "chat_template": "chatml", "special_tokens": {"eos_token": "x"}, "wandb_api_key": SECRET,
    }  # fmt: skip
    theirs = {
        "model_name_or_path": "m",
        "dataset_name": "d",
        "use_peft": True,
        "max_prompt_length": 7,
        "hub_token": SECRET,
    }
    script = (
        f"export HF_TOKEN={SECRET}\nNPROC_PER_NODE=2 \\\nswift rlhf --rlhf_type grpo --model 'm' --dataset d $(x) $@\n"
    )
    if (kind := rng.randrange(3)) == 2:
        path, text = cli.folder / "run.sh", script
    else:
        path, text = cli.folder / "run.yaml", json.dumps(changed(rng, [axolotl, theirs][kind]))
    content = text.encode("utf-8", "surrogatepass")
    path.write_bytes(damaged(rng, content) if rng.random() < 0.4 else content)
    return Attempt(["import-config", str(path), *rng.choice([[], ["--method", rng.choice([*TRAINING, *WORDS])]])])


def wrong_log(rng: random.Random, cli: Cli) -> Attempt:
    """`swift doctor` or `swift show` on a folder whose files are anything."""
    folder = cli.folder / "out"
    folder.mkdir()
    for name in ("logging.jsonl", "attempts.jsonl", "args.json", "completions.jsonl"):
        path = folder / name
        text = "\n".join(rng.choice(LINES) for _ in range(rng.randrange(6)))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        if rng.random() < 0.3:
            spoil(rng, path)
    return Attempt([rng.choice(["doctor", "show"]), "--run", str(folder)])


KINDS: dict[Callable[[random.Random, Cli], Attempt], int] = {
    random_flags: 70,
    wrong_words: 25,
    wrong_rows: 30,
    special_files: 15,
    wrong_model: 25,
    wrong_adapter: 20,
    wrong_config: 15,
    wrong_plugin: 30,
    wrong_checkpoint: 15,
    wrong_import: 10,
    wrong_log: 10,
}
"""How many of each are drawn."""
