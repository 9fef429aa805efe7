import random

import pytest
from trl_runs import argv_of, written

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "a", "mat", "big", "red"]


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A file of 24 short texts."""
    draw = random.Random(0)
    rows = [{"text": " ".join(draw.choices(WORDS, k=draw.randint(6, 9)))} for _ in range(24)]
    return written(tmp_path_factory.mktemp("data") / "texts.jsonl", rows)


@pytest.fixture
def strided_argv(nano_folders, texts, tmp_path):
    """The flags of a small run, as a function of those that differ."""

    def argv(*flags: str, model: str = "qwen2", tuner: str = "full") -> list[str]:
        own = {
            "--rlhf_type": "ebft", "--ebft_mode": "strided", "--model": nano_folders[model], "--dataset": texts,
            "--tuner_type": tuner, "--output_dir": tmp_path / "out", "--ebft_feature_layers": "0.5 1.0",
            "--ebft_generate_max_len": 4, "--ebft_ce_coef": 0.1, "--per_device_train_batch_size": 4, "--max_steps": 4,
        }  # fmt: skip
        return argv_of(own, *flags)

    return argv
