"""One GRPO step on prompts with images: the command's loss and gradient are TRL's, on the same completions.

Placeholders of images have no probability in swift, so the models here give them none.
"""

import json
import random

import pytest
import torch
import vlms
from cli_runs import Cli, log_rows
from transformers import AutoModelForImageTextToText

from swift.models.tokenizer import read_tokenizer
from swift.models.vision import load_processor, placeholder_ids
from swift.trainers.checkpoint import list_checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.long]

GROUP = 4
TEXTS = ["What is it?", "Which one is larger, the first or the second?"]
REWARD = """
from swift.plugin import orms


@orms.register("even")
def even(completions, **kwargs):
    return [sum(ord(one) % 2 == 0 for one in text) / max(1, len(text)) for text in completions]
"""
RECORDED = """
import json
from pathlib import Path

from swift.rollout.engines.transformers import TransformersEngine
from swift.types import Completion

KNOWN = json.loads(Path(__file__).with_name("recorded.json").read_text())


async def generate(self, request):
    ids = KNOWN["".join(part.get("text", "") for part in request.prompt.messages[-1]["content"])].pop()
    return Completion(request.request_id, ids, [0.0] * len(ids), "length", versions=[(self.version, 0, len(ids))])


TransformersEngine.generate = generate
"""
"""A plugin: the engine does not sample, and its log-probs are not used."""


@pytest.fixture
def folder(tmp_path):
    """Two prompts, with one image and with two, and completions of 1 to 9 letters."""
    chance = random.Random(0)
    for seed in range(3):
        (tmp_path / f"{seed}.png").write_bytes(vlms.image(seed, 64, 64 if seed else 96))
    rows = [(TEXTS[0], ["0.png"]), (TEXTS[1], ["1.png", "2.png"])]
    lines = [
        {"messages": [{"role": "user", "content": "<image>" * len(names) + text}], "images": names}
        for text, names in rows
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    drawn = [[chance.randrange(65, 91) for _ in range(chance.randint(1, 9))] for _ in range(GROUP * len(rows))]
    (tmp_path / "recorded.json").write_text(json.dumps({TEXTS[0]: drawn[:GROUP], TEXTS[1]: drawn[GROUP:]}))
    (tmp_path / "even.py").write_text(REWARD)
    (tmp_path / "recorded.py").write_text(RECORDED)
    return tmp_path


def without_placeholders(base):
    """Change the weights in a folder: the first number of each hidden state is constant, and is all that heads see."""
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    head, banned = model.get_output_embeddings().weight, placeholder_ids(model.config)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 0.1
        for name, module in model.named_modules():
            if name.endswith(("o_proj", "down_proj")):
                module.weight[0] = 0
        head[banned] = 0
        head[banned, 0] = -1e4
    model.save_pretrained(base)


def trl_step(base, folder):
    """Loss, and gradient by parameter, of a step of TRL's trainer."""
    from datasets import Dataset
    from PIL import Image
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    tokenizer = read_tokenizer(base)
    tokenizer.padding_side = "left"
    known = json.loads((folder / "recorded.json").read_text())
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    data = [
        {
            "prompt": [{"role": "user", "content": row["messages"][0]["content"].replace("<image>", "")}],
            "images": [Image.open(folder / name) for name in row["images"]],
        }
        for row in rows
    ]

    def recorded(prompts, trainer):
        taken, ids, completions = {}, [], []
        for chat in prompts:
            text = "".join(part.get("text", "") for part in chat[-1]["content"])
            completions.append(known[text][taken.get(text, 0)])
            taken[text] = taken.get(text, 0) + 1
            ids += trainer.processing_class.apply_chat_template(
                [chat], add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[0.0] * len(c) for c in completions]}

    def even(completions, **kwargs):
        texts = [one[0]["content"] for one in completions]
        return [sum(ord(one) % 2 == 0 for one in text) / max(1, len(text)) for text in texts]

    class Trainer(GRPOTrainer):
        def training_step(self, *given, **named):
            loss = super().training_step(*given, **named)
            found = {name: one.grad.clone() for name, one in self.model.named_parameters() if one.grad is not None}
            steps.append((float(loss), found))
            return loss

    steps = []
    config = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=len(rows) * GROUP, num_generations=GROUP,
        max_completion_length=9, max_steps=1, use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to="none", save_strategy="no", disable_tqdm=True, loss_type="dapo", beta=0.0, max_grad_norm=0.0,
    )  # fmt: skip
    Trainer(
        model=model, reward_funcs=even, args=config, train_dataset=Dataset.from_list(data), rollout_func=recorded,
        processing_class=load_processor(base, model.config, tokenizer),
    ).train()  # fmt: skip
    ((loss, gradients),) = steps
    return loss, gradients


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "idefics3"])
def test_a_step_on_images_is_trls(material, folder, family):
    base = folder / family
    base.mkdir()
    without_placeholders(vlms.build_vlm(base, family))
    with Cli(base, material[1], folder) as cli:
        run = cli.finish(
            "run", dataset=folder / "rows.jsonl", columns=None, max_length=256, loss_type="dapo",
            external_plugins=[folder / "even.py", folder / "recorded.py"], reward_funcs="even",
            freeze_vit="false", freeze_aligner="false", num_generations=GROUP, per_device_train_batch_size=8,
            gradient_accumulation_steps=1, max_completion_length=9, temperature=1.0, max_steps=1, save_steps=1,
            optim="sgd", learning_rate=1.0, max_grad_norm=1e9, weight_decay=0, lr_scheduler_type="constant",
            parity_check="off",
        )  # fmt: skip
    start, end = (
        dict(AutoModelForImageTextToText.from_pretrained(path).named_parameters())
        for path in (base, list_checkpoints(run)[-1])
    )
    loss, gradients = trl_step(base, folder)
    assert abs(loss) > 1e-3 and log_rows(run)[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert {name for name in start if not torch.equal(start[name], end[name])} <= gradients.keys()
    gap = sum(float((start[name] - end[name] - one).square().sum()) for name, one in gradients.items()) ** 0.5
    norm = sum(float(one.square().sum()) for one in gradients.values()) ** 0.5
    assert gap < 1e-5 * norm
