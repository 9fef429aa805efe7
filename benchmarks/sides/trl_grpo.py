"""GRPO as a user of TRL writes it, with the settings under which TRL is fastest here.

On a CPU gradient checkpointing and 16 bits, TRL's defaults, are off. In 16 bits weights are float32 under autocast, its
default. `--recorded FILE` takes completions from a file instead of sampling them, and saves the model after the step.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from datasets import Image, List, load_dataset
from recorded_rollout import text_of
from transformers import AutoConfig, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def even_share(completions, **kwargs):
    """The share of characters with an even code."""
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(ord(c) % 2 == 0 for c in text) / max(1, len(text)) for text in texts]


def right(completions, solution, **kwargs):
    """1 for the right answer."""
    found = [re.search(r"<answer>(.*?)</answer>", completion[-1]["content"]) for completion in completions]
    return [float(bool(one) and one[1].strip() == wanted) for one, wanted in zip(found, solution, strict=True)]


def formed(completions, **kwargs):
    """1 for thinking and an answer in their tags."""
    pattern = re.compile(r"<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
    return [float(bool(pattern.fullmatch(completion[-1]["content"]))) for completion in completions]


class Log(TrainerCallback):
    """Each logged row as a line of JSON."""

    def __init__(self, path):
        self.path = path

    def on_log(self, args, state, control, logs=None, **kwargs):
        """One line per logged row."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def recorded(path):
    """A rollout function that returns the completions of a file, by prompt and place in its group."""
    known = json.loads(Path(path).read_text())

    def rollout(prompts, trainer):
        seen: dict[str, int] = {}
        ids, completions = [], []
        for chat in prompts:
            text = text_of(chat)
            completions.append(known[text][seen.get(text, 0)])
            seen[text] = seen.get(text, 0) + 1
            encoded = trainer.processing_class.apply_chat_template(
                [chat], add_generation_prompt=True, tokenize=True, return_dict=True
            )
            ids += encoded["input_ids"]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[0.0] * len(c) for c in completions]}

    return rollout


def parse():
    """The options."""
    parser = argparse.ArgumentParser()
    for name in ("model", "dataset", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--max_completion_length", type=int, required=True)
    parser.add_argument("--max_steps", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument("--loss_type", default="grpo")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--use_cpu", action="store_true")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--reward", choices=["even_share", "demo"], default="even_share")
    parser.add_argument("--recorded")
    return parser.parse_args()


def read(dataset):
    """Its rows, with a column `prompt` of chats, and images if there are any."""
    data = load_dataset("json", data_files=dataset, split="train")
    column = "messages" if "messages" in data.column_names else "query"
    as_chat = (lambda text: [{"role": "user", "content": text}]) if column == "query" else (lambda chat: chat)
    data = data.map(lambda row: {"prompt": as_chat(row[column])}, remove_columns=[column])
    if "images" not in data.column_names:
        return data
    folder = Path(dataset).parent

    def found(row):
        (turn,) = row["prompt"]
        turn["content"] = turn["content"].replace("<image>", "")
        return {"prompt": [turn], "images": [str(folder / name) for name in row["images"]]}

    return data.map(found).cast_column("images", List(Image()))


def processor(model):
    """Of texts and images, made ready by Pillow as on swift's side; AutoProcessor would need torchvision for videos."""
    from swift.models.vision import load_processor

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left", truncation_side="left")
    return load_processor(Path(model), AutoConfig.from_pretrained(model), tokenizer)


def main():
    """Train."""
    options = parse()
    data = read(options.dataset)
    one_step = {"optim": "sgd", "max_grad_norm": 1e9, "weight_decay": 0.0, "lr_scheduler_type": "constant"}
    config = GRPOConfig(
        output_dir=options.output_dir,
        per_device_train_batch_size=options.per_device_train_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        num_generations=options.num_generations,
        max_completion_length=options.max_completion_length,
        max_steps=options.max_steps,
        learning_rate=options.learning_rate,
        loss_type=options.loss_type,
        beta=options.beta,
        seed=options.seed,
        bf16=options.bf16,
        use_cpu=options.use_cpu,
        gradient_checkpointing=options.gradient_checkpointing,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **(one_step if options.recorded else {}),
    )
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=even_share if options.reward == "even_share" else [right, formed],
        args=config,
        train_dataset=data,
        processing_class=processor(options.model) if "images" in data.column_names else None,
        callbacks=[Log(Path(options.output_dir) / "logging.jsonl")],
        rollout_func=recorded(options.recorded) if options.recorded else None,
    )
    trainer.train()
    if options.recorded:
        trainer.model.save_pretrained(options.output_dir)


if __name__ == "__main__":
    main()
