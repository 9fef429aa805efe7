import json
import random

import pytest


@pytest.fixture(scope="session")
def sums(tmp_path_factory):
    """A file of 64 one-digit sums as chats."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    draw = random.Random(0)
    with path.open("w") as lines:
        for _ in range(64):
            a, b = draw.randint(0, 4), draw.randint(0, 4)
            chat = [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)}]
            lines.write(json.dumps({"messages": chat}) + "\n")
    return path


@pytest.fixture
def sft_argv(nano_folders, sums, tmp_path):
    """The flags of a small run, as a function of those that differ."""

    def argv(*flags: str, model: str = "qwen2", tuner: str = "full") -> list[str]:
        base = {
            "--model": str(nano_folders[model]),
            "--dataset": str(sums),
            "--tuner_type": tuner,
            "--output_dir": str(tmp_path / "out"),
            "--learning_rate": "3e-3",
            "--per_device_train_batch_size": "8",
            "--max_steps": "6",
            "--logging_steps": "2",
            "--gradient_checkpointing": "false",
            "--report_to": "none",
        }
        given = flags[::2]
        kept = [word for flag, value in base.items() if flag not in given for word in (flag, value)]
        return [*kept, *flags]

    return argv
