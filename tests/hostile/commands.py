"""Right command lines of every mode on tiny models, and what the hostile cases put into them."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli_runs import Cli

WORDS = [
    "", " ", "None", "null", "nan", "-inf", "1e309", "-1", "0", "0.5", "1.5", "00012", "1_000", "1" + "0" * 22,
    "1e-5", "5e-324", "true", "False", "[]", "[1, 2", "{}", '{"a": {"b": [1, NaN]}}', "{'a': 1}", "a" * 5000, "\udcff",
    "x y", "-", "--", "=", "%s", "{0}", "$HOME", "~", ".", "..", "a/../b", "/dev/null", "/dev/full", "/dev/zero",
    "/proc/self/mem", "nothing.jsonl", "file:///etc/hostname", "http://127.0.0.1:9/x", "\n", "a\nb", "\x1b[31m",
    "auto", "all", "*",
]  # fmt: skip

SECRET = "s3cr3t-0f-the-tests"
"""Stands in places of each command where a secret may stand; no output may have it."""

SECRETS = {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET, "PGPASSWORD": SECRET}

PREFERENCES = ("dpo", "ipo", "orpo", "simpo", "cpo", "kto", "rm")
TRAINING = ("rlhf", "ebft", *PREFERENCES, "sft", "pt")
OTHERS = ("infer", "export", "merge-lora", "reward-test", "rollout")


@dataclass
class Attempt:
    """A command of a case: `words` after `swift`, and what is done to it while it runs.

    victim: the process that gets `signum`; None is the command's own.
    """

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    signum: int | None = None
    victim: Callable[[Any], Any] | None = None
    after_step: int = 0
    after_s: float = 0.0


def short_run(cli: Cli, mode: str, **flags: Any) -> list[str]:
    """A right command line of two steps, or of one use."""
    if mode == "rlhf":
        return cli.words("out", **{"max_steps": 2, **flags})
    if mode == "ebft":
        own = {"rlhf_type": "ebft", "reward_funcs": None, "ebft_feature_layers": "0.5", "max_steps": 2}
        return cli.words("out", **{**own, "external_plugins": None, "dataset": references(cli), **flags})
    if mode in PREFERENCES:
        own = {"rlhf_type": mode, "dataset": pairs(cli, mode), **STEPS}
        return ["rlhf", *cli.words("out", mode="", **{**own, **flags})[1:]]
    if mode in ("sft", "pt"):
        own = {"dataset": cli.material / "train.jsonl", "columns": COLUMNS[mode], **STEPS}
        return cli.words("out", mode=mode, **{**own, **flags})
    return [
        mode,
        *(str(word) for name, value in {**one_use(cli, mode), **flags}.items() for word in (f"--{name}", value)),
    ]


STEPS = {"max_steps": 2, "tuner_type": "full", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
COLUMNS = {"sft": '{"prompt": "query", "solution": "response"}', "pt": '{"prompt": "text"}'}


def one_use(cli: Cli, mode: str) -> dict[str, Any]:
    """The flags of a mode that trains nothing."""
    rows, out = cli.material / "train.jsonl", cli.folder / "out"
    if mode == "infer":
        return {
            "model": cli.model,
            "val_dataset": rows,
            "max_completion_length": 4,
            "result_path": cli.folder / "out.jsonl",
        }
    if mode in ("export", "merge-lora"):
        return {"adapters": adapter(cli), "output_dir": out} | ({"merge_lora": "true"} if mode == "export" else {})
    if mode == "reward-test":
        return {"dataset": rows, "external_plugins": cli.material / "odd_plugin.py", "reward_funcs": "odd"}
    return {"model": cli.model, "use_vllm": "false", "port": 0, "dry_run": "true"}


def pairs(cli: Cli, method: str) -> Path:
    """Rows of a preference method."""
    row = {
        "kto": lambda n: {"prompt": f"{n}+1=", "completion": str(n + n % 2), "label": n % 2 == 1},
    }.get(method, lambda n: {"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)})
    return written(cli.folder / "pairs.jsonl", [row(n) for n in range(8)])


def references(cli: Cli) -> Path:
    """Rows for EBFT."""
    return written(
        cli.folder / "references.jsonl", [{"prompt": f"Count {n}", "ground_truth": "ab" * n} for n in range(1, 6)]
    )


def adapter(cli: Cli) -> Path:
    """An adapter of the model, as PEFT saves it."""
    folder = cli.folder / "adapter"
    if not folder.exists():
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        get_peft_model(AutoModelForCausalLM.from_pretrained(cli.model), config).save_pretrained(folder)
    return folder


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Planted:
    """A pickle that leaves the file EXECUTED in the working folder of whoever unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("EXECUTED", "w")


def poisoned(rng: random.Random) -> bytes:
    """What runs code where it is unpickled without restriction, bare or as torch saves it."""
    import torch

    buffer = io.BytesIO()
    save = rng.choice([pickle.dump, torch.save])
    save({"state": Planted()}, buffer)
    return buffer.getvalue()


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
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def spoil(rng: random.Random, path: Path) -> None:
    """The file damaged, gone, empty, poisoned, a folder, a pipe, or a link to itself."""
    content = path.read_bytes()
    path.unlink()
    kind = rng.randrange(10)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(path)
    elif kind == 2:
        path.write_bytes(rng.choice([b"[]", b"{}", b"null", b"7", b'"text"']))
    elif kind == 3:
        path.write_bytes(poisoned(rng))
    elif kind == 4:
        make_special(rng, path)
    elif kind == 5 and path.suffix == ".json":
        with contextlib.suppress(ValueError, RecursionError):  # what is no JSON is gone
            path.write_text(json.dumps(changed(rng, json.loads(content))))
    elif kind > 5:
        path.write_bytes(damaged(rng, content))


def make_special(rng: random.Random, path: Path) -> None:
    """Something that is no ordinary file: a pipe, a device, a socket's name, a bomb."""
    kind = rng.randrange(5)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/stdin", "/dev/full", "/proc/self/mem", "/"]))
    elif kind == 2:
        folder = os.open(path.parent, os.O_RDONLY)  # a socket's path may have 107 characters
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
    elif kind == 3:
        path.write_bytes(gzip.compress(b"[" + b"0," * (100 << 20)))
    else:
        with path.open("wb") as file:
            file.truncate(rng.choice([1 << 20, 1 << 36]))


def changed(rng: random.Random, value: Any) -> Any:
    """A JSON value with one or two of its parts replaced by any other."""
    others = [
        None,
        True,
        -1,
        0,
        1e308,
        float("inf"),
        float("nan"),
        10**30,
        "",
        "x" * 100_000,
        [],
        {},
        [[]],
        {"a": None},
    ]
    if isinstance(value, dict) and value and rng.random() < 0.9:
        names = rng.sample(sorted(value), min(len(value), rng.randint(1, 2)))
        return {**value, **{name: changed(rng, value[name]) for name in names}}
    if isinstance(value, list) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return [*value[:at], changed(rng, value[at]), *value[at + 1 :]]
    return rng.choice([*others, rng.choice(WORDS).encode("utf-8", "replace").decode()])
