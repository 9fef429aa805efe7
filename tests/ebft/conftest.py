import json
import random

import pytest

WORDS = ["the", "cat", "dog", "sat", "ran", "on", "a", "mat", "big", "red"]


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A file of 24 short texts."""
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    draw = random.Random(0)
    with path.open("w") as lines:
        for _ in range(24):
            lines.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(6, 9)))}) + "\n")
    return path


@pytest.fixture
def strided_argv(nano_folders, texts, tmp_path):
    """The flags of a small run, as a function of those that differ."""

    def argv(*flags: str, model: str = "qwen2", tuner: str = "full") -> list[str]:
        base = {
            "--rlhf_type": "ebft",
            "--ebft_mode": "strided",
            "--model": str(nano_folders[model]),
            "--dataset": str(texts),
            "--tuner_type": tuner,
            "--output_dir": str(tmp_path / "out"),
            "--ebft_feature_layers": "0.5 1.0",
            "--ebft_generate_max_len": "4",
            "--ebft_ce_coef": "0.1",
            "--learning_rate": "3e-3",
            "--per_device_train_batch_size": "4",
            "--max_steps": "4",
            "--logging_steps": "1",
            "--gradient_checkpointing": "false",
            "--report_to": "none",
        }
        given = flags[::2]
        kept = [item for flag, value in base.items() if flag not in given for item in (flag, *value.split())]
        return [*kept, *flags]

    return argv
