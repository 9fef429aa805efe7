"""Wrong and random inputs for whole commands, drawn from a seed: command lines, files, plugins, signals."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli_runs import Cli

from swift.arguments.schema import json_schema

WORDS = [
    "", " ", "None", "null", "nan", "-inf", "1e309", "-1", "0", "0.5", "1.5", "00012", "1_000", "1" + "0" * 22,
    "1e-5", "true", "False", "[]", "[1, 2", "{}", '{"a": {"b": [1, NaN]}}', "{'a': 1}", "a" * 5000, "\udcff",
    "x y", "-", "--", "=", "%s", "{0}", "$HOME", "~", ".", "..", "a/../b", "/dev/null", "/dev/full", "/proc/self/mem",
    "nothing.jsonl", "file:///etc/hostname", "http://127.0.0.1:9/x", "\n", "a\nb", "\x1b[31m", "auto", "all", "*",
]  # fmt: skip

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
    lambda rng, line: '{"prompt": "a\\ud800b", "solution": "1"}',
    lambda rng, line: '{"prompt": "a", "solution": ' + "9" * 5000 + "}",
    lambda rng, line: '{"prompt": "a", "solution": 1e400}',
    lambda rng, line: json.dumps({"prompt": "long " * 20_000, "solution": "1"}),
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
    "return [0.5] * (len(completions) + 1)",
    "return [10 ** 5000] * len(completions)",
    "return [None] * len(completions)",
    "raise KeyError('answer')",
    "raise SystemExit(0)",
    "raise KeyboardInterrupt",
    "raise Exception(chr(0xD800) + 'x' * 10 ** 6)",
    "return reward(completions)",
    "import os; os._exit(0)",
    "import os; os.kill(os.getpid(), 9)",
    "import os; os.close(1); os.close(2); return [0.0] * len(completions)",
    "import os; os.fork(); return [0.0] * len(completions)",
    "import subprocess; subprocess.Popen(['sleep', '300']); return [0.0] * len(completions)",
    "import time; time.sleep(300)",
    "print('x' * 10 ** 6); return [0.0] * len(completions)",
    "import threading, time; threading.Thread(target=time.sleep, args=(300,)).start(); return [0.0] * len(completions)",
]

IMPORTS = [
    "import os; os._exit(3)",
    "raise SystemExit",
    "raise RuntimeError('a\\nb')",
    "1 +",
    "def f(): return f()\nf()",
    "import nothing_of_that_name",
    "from swift.plugin import nothing_of_that_name",
    "orms = None",
    "import sys; sys.stdout.close()",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "import os; os.chdir('/')",
    "import threading, time; threading.Thread(target=time.sleep, args=(300,)).start()",
]

SIGNALS = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL]

REWARD = "from swift.plugin import orms\n\n\ndef reward(completions, **kwargs):\n    {}\n\n\norms['hostile'] = reward\n"


@dataclass
class Attempt:
    """A command of a case: `words` after `swift`, and what is done to it while it runs."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    signum: int | None = None
    after_step: int = 0
    after_s: float = 0.0


def random_flags(rng: random.Random, cli: Cli) -> Attempt:
    """One to three flags of any name with values of any kind."""
    mode = rng.choice(["rlhf", "rlhf", "rlhf", "sft"])
    properties = {
        name: about
        for name, about in json_schema(mode)["properties"].items()
        if name not in KEPT and not name.startswith(("vllm_", "ray_")) and name not in ("use_vllm", "infer_backend")
    }
    words = short_run(cli, mode)
    for name in rng.sample(sorted(properties), rng.randint(1, 3)):
        about = properties[name]
        choices = [str(one) for part in [about, *about.get("anyOf", [])] for one in part.get("enum", [])]
        words += [f"--{name}", rng.choice([*choices, rng.choice(WORDS)])]
    return Attempt(words)


def wrong_words(rng: random.Random, cli: Cli) -> Attempt:
    """A right command line with words lost, doubled, changed or in another order."""
    words = short_run(cli, "rlhf")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(1, len(words))
        kind = rng.randrange(5)
        if kind == 0:
            del words[at]
        elif kind == 1:
            words.insert(at, words[at])
        elif kind == 2:
            words[at] = rng.choice(WORDS)
        elif kind == 3 and len(words[at]) > 1:
            letter = rng.randrange(len(words[at]))
            words[at] = words[at][:letter] + words[at][letter + 1 :]
        else:
            other = rng.randrange(1, len(words))
            words[at], words[other] = words[other], words[at]
    return Attempt([word for word in words if "\0" not in word])


def wrong_rows(rng: random.Random, cli: Cli) -> Attempt:
    """Some or all rows damaged, or the file as a whole."""
    lines = (cli.material / "train.jsonl").read_text().splitlines()
    for at in rng.sample(range(len(lines)), rng.choice([1, 3, len(lines)])):
        lines[at] = rng.choice(ROWS)(rng, lines[at])
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    path = cli.folder / rng.choice(["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.jsonl.gz", "rows.txt"])
    path.write_bytes(damaged(rng, text) if rng.random() < 0.3 else text)
    mode = rng.choice(["rlhf", "rlhf", "sft"])
    return Attempt(short_run(cli, mode, dataset=path))


def wrong_model(rng: random.Random, cli: Cli) -> Attempt:
    """A file of the model missing, damaged, or something else."""
    model = Path(shutil.copytree(cli.model, cli.folder / "model"))
    spoil(rng, rng.choice(sorted(path for path in model.iterdir() if path.is_file())))
    return Attempt(short_run(cli, rng.choice(["rlhf", "rlhf", "sft"]), model=model))


def wrong_config(rng: random.Random, cli: Cli) -> Attempt:
    """A config file with any values at any depth, or damaged."""
    words = short_run(cli, "rlhf")[1:]
    values: dict[str, Any] = {words[at][2:]: words[at + 1] for at in range(0, len(words), 2)}
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*values, "seed", "ENV", "optim_args", "lora_rank", rng.choice(WORDS)])
        values[name] = rng.choice([*WORDS, None, [], {}, [[]], {"a": {"b": None}}, 10**30, True, {"a": 1}])
    path = cli.folder / rng.choice(["config.yaml", "config.json", "config.yml", "config.toml"])
    text = json.dumps(values).encode()
    path.write_bytes(damaged(rng, text) if rng.random() < 0.4 else text)
    return Attempt(["rlhf", str(path), "--output_dir", str(cli.folder / "out")])


def wrong_plugin(rng: random.Random, cli: Cli) -> Attempt:
    """A plugin or reward function that does what it must not."""
    text = REWARD.format(rng.choice(REWARDS))
    if rng.random() < 0.35:
        text = f"{rng.choice(IMPORTS)}\n{REWARD.format('return [0.0] * len(completions)')}"
    path = cli.folder / "hostile_plugin.py"
    path.write_text(text)
    words = short_run(cli, "rlhf", external_plugins=path, reward_funcs="hostile", reward_timeout=2)
    return Attempt(words)


def wrong_checkpoint(rng: random.Random, cli: Cli) -> Attempt:
    """A finished run that is resumed from a checkpoint with one file spoilt."""
    folder = cli.finish("out", max_steps=2, save_steps=1)
    newest = folder / "checkpoint-2"
    spoil(rng, rng.choice(sorted(path for path in newest.iterdir() if path.is_file())))
    given = rng.choice(["last", "true", str(newest)])
    return Attempt(short_run(cli, "rlhf", max_steps=4, save_steps=1, resume_from_checkpoint=given))


def signals(rng: random.Random, cli: Cli) -> Attempt:
    """A run of 30 steps that gets a signal at some moment."""
    words = short_run(cli, "rlhf", max_steps=30, save_steps=rng.choice([1, 7, 100]))
    after = rng.choice([0, 0, 1, 2, 5, 9])
    return Attempt(words, signum=rng.choice(SIGNALS), after_step=after, after_s=rng.uniform(0, 0.3 if after else 3))


def short_run(cli: Cli, mode: str, **flags: Any) -> list[str]:
    """A right command line of two steps."""
    if mode == "rlhf":
        return cli.words("out", **{"max_steps": 2, **flags})
    given = {
        "model": cli.model, "dataset": cli.material / "train.jsonl", "output_dir": cli.folder / "out", "max_steps": 2,
        "columns": '{"prompt": "query", "solution": "response"}', "report_to": "none", "add_version": "false", **flags,
    }  # fmt: skip
    return ["sft", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Bytes flipped, cut off, or others."""
    kind = rng.randrange(5)
    if kind == 0:
        return content[: rng.randrange(len(content) + 1)]
    if kind == 1:
        return b"\x1f\x8b" + rng.randbytes(100)
    if kind == 2:
        return content.decode("utf-8", "replace").encode("utf-16")
    if kind == 3:
        return b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 12345\n"
    changed = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def spoil(rng: random.Random, path: Path) -> None:
    """The file damaged, gone, empty, a folder, or a link to itself."""
    content = path.read_bytes()
    path.unlink()
    kind = rng.randrange(7)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(path)
    elif kind == 2:
        path.write_bytes(rng.choice([b"[]", b"{}", b"null", b"7", b'"text"']))
    elif kind > 3:
        path.write_bytes(damaged(rng, content))


KINDS: dict[Callable[[random.Random, Cli], Attempt], int] = {
    random_flags: 70,
    wrong_words: 25,
    wrong_rows: 25,
    wrong_model: 20,
    wrong_config: 20,
    wrong_plugin: 25,
    wrong_checkpoint: 10,
    signals: 20,
}
"""How many of each are drawn."""
