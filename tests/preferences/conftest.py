import pytest
from small_pairs import sums, verdicts, written

from swift.arguments import parse


@pytest.fixture
def settings(nano_folders, tmp_path):
    """Resolved settings of a small run of a method on 32 pairs, as a function of the flags that differ."""

    def resolved(method, *flags, rows=None):
        data = written(tmp_path / "pairs.jsonl", rows or (verdicts(32) if method == "kto" else sums(32)))
        base = {
            "--model": str(nano_folders["qwen2"]),
            "--dataset": str(data),
            "--tuner_type": "full",
            "--output_dir": str(tmp_path / "out"),
            "--learning_rate": "3e-3",
            "--per_device_train_batch_size": "4",
            "--max_steps": "4",
            "--logging_steps": "1",
            "--gradient_checkpointing": "false",
            "--report_to": "none",
        }
        words = [word for flag, value in base.items() if flag not in flags for word in (flag, value)]
        return parse("rlhf", ["--rlhf_type", method, *words, *flags], {})

    return resolved
