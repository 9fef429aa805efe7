import random

import pytest
from trl_runs import argv_of, written


@pytest.fixture(scope="session")
def sums(tmp_path_factory):
    """A file of 64 one-digit sums as chats."""
    draw = random.Random(0)
    pairs = [(draw.randint(0, 4), draw.randint(0, 4)) for _ in range(64)]
    chats = [[{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)}] for a, b in pairs]
    return written(tmp_path_factory.mktemp("data") / "sums.jsonl", [{"messages": chat} for chat in chats])


@pytest.fixture
def sft_argv(nano_folders, sums, tmp_path):
    """The flags of a small run, as a function of those that differ."""

    def argv(*flags: str, model: str = "qwen2", tuner: str = "full") -> list[str]:
        own = {
            "--model": nano_folders[model], "--dataset": sums, "--tuner_type": tuner, "--output_dir": tmp_path / "out",
            "--per_device_train_batch_size": 8, "--max_steps": 6, "--logging_steps": 2,
        }  # fmt: skip
        return argv_of(own, *flags)

    return argv
