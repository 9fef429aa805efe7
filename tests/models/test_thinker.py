"""Qwen2.5-Omni: its thinker is trained as transformers computes it, and whole checkpoints take what was trained."""

import pytest
import torch
from image_rows import data_url, turn
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniThinkerForConditionalGeneration
from trl_runs import argv_of, assert_resumes_exactly, written

from swift.arguments import parse
from swift.models.policy import load_policy
from swift.models.tokenizer import load_chat
from swift.trainers.checkpoint import list_checkpoints

FAMILY = "qwen2_5_omni"
ROWS = [
    {"messages": [turn("user", "<image>What?"), turn("assistant", "abc")], "images": [data_url(0)]},
    {"messages": [turn("user", "Nothing"), turn("assistant", "ba")], "images": []},
]


@pytest.fixture
def folder(vlm_folders):
    return vlm_folders(FAMILY)


@pytest.fixture
def policy_of(folder):
    """The policy of flags, and tensors of two padded rows, one with two images."""

    def of(*flags):
        words = "--rlhf_type grpo --dataset x.jsonl --reward_funcs format --model"
        args = parse("rlhf", [*words.split(), str(folder), *flags], {}).args
        vision = load_chat(args).vision
        rows = [vision.example(number=2), [*vision.example(), 5]]
        width = max(map(len, rows))
        padded = torch.tensor([[*vision.visible(row), *[0] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        return load_policy(args).eval(), {
            "input_ids": padded, "attention_mask": mask, **vision.features(rows, "cpu")
        }  # fmt: skip

    return of


def test_logits_and_gradients_are_those_of_transformers(policy_of, folder):
    policy, inputs = policy_of("--tuner_type", "full", "--freeze_vit", "false", "--freeze_aligner", "false")
    theirs = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    logits = [model(**inputs).logits for model in (policy, theirs)]
    assert logits[0].equal(logits[1])
    for one in logits:
        one[inputs["attention_mask"].bool()].square().mean().backward()
    expected = {f"thinker.{name}": one.grad for name, one in theirs.named_parameters() if one.grad is not None}
    found = {name: one.grad for name, one in policy.named_parameters()}
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-8) for name in found)


def test_an_adapter_fits_the_whole_model_of_transformers(policy_of, folder, tmp_path):
    policy, inputs = policy_of("--tuner_type", "lora", "--freeze_vit", "false", "--init_weights", "gaussian")
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    policy.save_pretrained(tmp_path)
    whole = Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(whole, tmp_path).eval()
    names = {name for model in (policy, adapted) for name, one in model.named_modules() if isinstance(one, LoraLayer)}
    assert {name.split(".")[2:4] == ["thinker", "model"] or "thinker.visual." in name for name in names} == {True}
    with torch.no_grad():
        logits = [model(**inputs).logits for model in (policy, whole.thinker)]
    assert torch.allclose(*logits, atol=1e-6)


@pytest.mark.slow
def test_a_full_checkpoint_is_whole_and_is_resumed(folder, tmp_path):
    def settings(*flags):
        own = {"--model": folder, "--dataset": written(tmp_path / "rows.jsonl", ROWS), "--output_dir": tmp_path / "out"}
        return parse("sft", argv_of(own, "--tuner_type full --max_steps 4 --learning_rate 1e-2", *flags), {})

    run = assert_resumes_exactly(settings)
    last = list_checkpoints(run)[-1]
    after, before = (
        Qwen2_5OmniForConditionalGeneration.from_pretrained(one, dtype=torch.float32).state_dict()
        for one in (last, folder)
    )
    moved = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    assert moved and all(name.startswith(("thinker.model.", "thinker.lm_head.")) for name in moved)
