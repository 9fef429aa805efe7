import pytest
from trl_runs import argv_of, sums, verdicts, written

from swift.arguments import parse


@pytest.fixture
def settings(nano_folders, tmp_path):
    """Resolved settings of a small run of a method on 32 pairs, as a function of the flags that differ."""

    def resolved(method, *flags, rows=None):
        data = written(tmp_path / "pairs.jsonl", rows or (verdicts(32) if method == "kto" else sums(32)))
        own = {
            "--rlhf_type": method, "--model": nano_folders["qwen2"], "--dataset": data,
            "--output_dir": tmp_path / "out", "--per_device_train_batch_size": 4, "--max_steps": 4,
        }  # fmt: skip
        return parse("rlhf", argv_of(own, *flags), {})

    return resolved
