import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_runs import argv_of, chats, written

from swift.arguments import parse


@pytest.fixture
def settings(nano_folders, tmp_path):
    """Resolved settings of a small run on 32 chats, as a function of the flags that differ."""

    def resolved(*flags, rows=None):
        data = written(tmp_path / "chats.jsonl", rows or chats(32))
        own = {
            "--rlhf_type": "gkd", "--model": nano_folders["qwen2"], "--dataset": data, "--max_completion_length": 4,
            "--output_dir": tmp_path / "out", "--per_device_train_batch_size": 4, "--max_steps": 4,
        }  # fmt: skip
        return parse("rlhf", argv_of(own, *flags), {})

    return resolved


@pytest.fixture
def teacher(nano_folders, tmp_path):
    """Folder of another model of the same architecture."""
    return other_model(nano_folders["qwen2"], tmp_path / "teacher")


@pytest.fixture
def gkd(settings, teacher):
    return lambda *flags, **more: settings(f"--teacher_model {teacher}", *flags, **more)


def other_model(start, folder):
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(start).save_pretrained(folder)
    return folder
