"""`swift infer`: answers of a language model, scores of a reward model, or labels of a classifier.

A reward model judges the answers of a dataset: chats, or for a process reward model also its own kind of rows. Each row
gives one JSON object, as with a language model: row, messages (the prompt), response, score, step_scores of a process
reward model, and columns. The scores are those that GRPO would get. A classifier reads prompts, or chats with answers:
row, messages, label, probabilities of its classes, and columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError
from swift.models.source import ModelSource, head_of, locate
from swift.rollout import infer

if TYPE_CHECKING:
    from swift.arguments import Resolved
    from swift.data.loading import Example


def run(resolved: Resolved) -> int:
    """The mode infer; returns the exit code.

    Raises:
        ConfigError, ResourceError: see `swift.rollout.infer.run`; also settings that scores do not have.
    """
    source = locate(resolved.args)
    head = head_of(source.base, *source.adapters)
    if head is None:
        return infer.run(resolved)
    _require_rows(resolved.args, source)
    return classify(resolved, source) if head == "label" else score(resolved.args, source)


def _require_rows(args: Any, source: ModelSource) -> None:
    """Raises ConfigError: settings that models with a head of scores do not have."""
    if not args.val_dataset and not args.dataset:
        raise ConfigError(f"--model: {source.base}: it has scores and does not chat; give rows with --val_dataset")
    if args.infer_backend != "transformers":
        raise ConfigError(f"--infer_backend: {args.infer_backend}: scores come from transformers; leave it out")
    if args.template or args.chat_template_kwargs:
        raise ConfigError("--template: such a model reads chats as it was trained; leave it and its variables out")
    if len(source.adapters) > 1:
        raise ConfigError("--adapters: several on a head of scores; merge them with `swift merge-lora`")


def classify(resolved: Resolved, source: ModelSource) -> int:
    """Labels every row of the dataset; returns the exit code."""
    from swift.data.image_store import with_files
    from swift.data.labels import LABEL
    from swift.data.loading import load_rows
    from swift.devices import own_device
    from swift.models.policy import pick_dtype
    from swift.models.trained import take_trained
    from swift.rewards.classifier import Classifier, agreement

    args: Any = resolved.args
    result_path = infer.new_file(args.result_path, args)
    lines = take_trained(args, resolved.given)
    unused = sorted(resolved.given & {"max_length", "truncation_strategy", "max_new_tokens", "temperature"})
    lines += [f"--{name}: not used by a classifier, which reads whole texts" for name in unused]
    model = Classifier(source, args.trust_remote_code)
    sees = model.vision is not None
    rows = load_rows(args, "val" if args.val_dataset else "train", purpose="classified", images=sees)
    device = own_device()
    model.load(device, pick_dtype(args.torch_dtype, device), args)
    found: list[tuple[Any, list[float]]] = []

    def labelled(numbers: range) -> Iterator[dict[str, Any]]:
        examples = [rows.examples[number] for number in numbers]
        predictions = model.predictions([example.messages for example in examples])
        for number, example, prediction in zip(numbers, examples, predictions, strict=True):
            if LABEL in example.columns:
                found.append((prediction["label"], example.columns[LABEL]))
            yield {"row": number, "messages": with_files(example.messages), **prediction, "columns": example.columns}

    def notes() -> list[str]:
        truths = [agreement(found, model.labels)] if found else []
        return [*lines, *rows.report.lines(), *truths]

    return infer.write_results(result_path, len(rows), labelled, "labelled", notes)


def score(args: Any, source: ModelSource) -> int:
    """Scores every row of the dataset; returns the exit code."""
    from swift.data.image_store import with_files
    from swift.data.loading import load_rows
    from swift.data.steps import STEPS
    from swift.devices import own_device
    from swift.models.policy import pick_dtype
    from swift.rewards.model_files import find_reward_model
    from swift.rewards.models import ProcessRewardModel, open_reward_model

    result_path = infer.new_file(args.result_path, args)
    found = find_reward_model(source)
    model = open_reward_model(found, args.trust_remote_code)
    sees = model.vision is not None
    rows = load_rows(args, "val" if args.val_dataset else "train", purpose="judged", images=sees)
    device = own_device()
    model.load(device, pick_dtype(args.torch_dtype, device), args)

    def chat_of(example: Example) -> list[dict[str, Any]]:
        if example.messages[-1]["role"] == "assistant":
            return example.messages
        text = model.separator.join(example.columns[STEPS])
        return [*example.messages, {"role": "assistant", "content": text}]

    def scored(numbers: range) -> Iterator[dict[str, Any]]:
        chats = [chat_of(rows.examples[number]) for number in numbers]
        steps = model.step_scores(chats) if isinstance(model, ProcessRewardModel) else None
        scores = model.score(chats) if steps is None else [min(row, default=None) for row in steps]
        for index, number in enumerate(numbers):
            *prompt, answer = chats[index]
            line = {
                "row": number,
                "messages": with_files(prompt),
                "response": answer["content"],
                "score": scores[index] if scores[index] == scores[index] else None,
            }
            more = {} if steps is None else {"step_scores": steps[index]}
            yield {**line, **more, "columns": rows.examples[number].columns}

    def notes() -> list[str]:
        cut = model.num_truncated
        return [*rows.report.lines(), *([f"warning: rows cut to the model's context: {cut}"] if cut else [])]

    return infer.write_results(result_path, len(rows), scored, "scored", notes)
