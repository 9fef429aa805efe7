"""Reward models, which score prompt + completion: heads with one label, or process reward models.

They run in the trainer's process, in evaluation mode without gradients, and are not trained. A chat is rendered with
the model's own template and tokenizer as a finished conversation; an end token is added only if the template has none.
Chats longer than the model's context are truncated on the left, and counted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, RefusedChat, RewardError, attributed_to, first_line, packages_for
from swift.models.source import read_json
from swift.models.step_scores import DEFAULT_SEPARATOR, SEPARATOR, encode_steps, steps_of
from swift.plugin import load_external_plugins, rm_plugins
from swift.rewards.contract import read_values
from swift.rewards.model_files import (
    DEFAULT_PLUGIN,
    RewardModelSource,
    config_of_whole,
    find_reward_models,
    head_in,
    judges_steps,
    load_weights,
)
from swift.types import Completion, RolloutGroup

if TYPE_CHECKING:
    import torch

    from swift.models.policy import Head
    from swift.models.template import Template
    from swift.models.vision import Vision

logger = logging.getLogger(__name__)

MAX_BATCH_ROWS = 64
MAX_BATCH_TOKENS = 16_384


class RewardModel:
    """One scalar head with its own tokenizer and chat template; `load` reads its weights, which `score` needs.

    Args:
        source: from `find_reward_models`.
        trust_remote_code: whether code from its repository may run.

    Raises:
        ConfigError: a tokenizer that cannot be loaded, or no chat template.
    """

    head: Head | None = "answer"

    def __init__(self, source: RewardModelSource, trust_remote_code: bool) -> None:
        from swift.models.source import has_tokenizer
        from swift.models.template import PlainText
        from swift.models.tokenizer import read_tokenizer
        from swift.models.trained import trained_pixels
        from swift.models.vision import Vision, load_processor

        self.name, self.source = source.name, source
        self.num_truncated = 0
        """Chats cut on the left so far."""
        self.separator = str(read_json(source.folder / "config.json").get(SEPARATOR, DEFAULT_SEPARATOR))
        """Text between two steps of an answer, for a process reward model."""
        own = source.adapter if source.adapter is not None and has_tokenizer(source.adapter) else None
        with attributed_to("--reward_model"), packages_for(f"--model: {source.folder}: its processor cannot be loaded"):
            tokenizer = read_tokenizer(own or source.folder, trust_remote_code=trust_remote_code)
            config = config_of_whole(source.folder)
            processor: Any = None if config is None else load_processor(source.folder, config, tokenizer)
        if own is None and getattr(processor, "chat_template", None):
            tokenizer.chat_template = processor.chat_template
        self._template = self._template_of(tokenizer)
        self.vision: Vision | None = None
        """Of a model that sees the images of chats."""
        if processor is not None and not isinstance(self._template, PlainText):
            folders = [source.folder] if source.adapter is None else [source.adapter, source.folder]
            pixels = trained_pixels(*folders)
            self.vision = Vision(source.folder, processor, config, self._template.render, max_pixels=pixels)
            self._template.vision = self.vision
        self._own, self._own_padding = own is not None, tokenizer.pad_token_id
        self._max_tokens = int(tokenizer.model_max_length)
        self._trust_remote_code = trust_remote_code
        self._refused = False

    @property
    def _num_labels(self) -> int:
        from swift.models.policy import HEADS

        return HEADS[self.head][2]

    def _template_of(self, tokenizer: Any) -> Template:
        from swift.models.template import Template

        if not tokenizer.chat_template:
            raise ConfigError(
                f"--reward_model: {self.source.folder}: its tokenizer has no chat template, so prompts and "
                f"completions cannot be rendered for it; add chat_template.jinja to the folder"
            )
        return Template(tokenizer)

    def load(self, device: torch.device | str, dtype: torch.dtype, quantised: Any = None) -> None:
        """Reads the weights; a ConfigError if they cannot be loaded.

        Args:
            device: device of the computation.
            dtype: data type of the weights.
            quantised: settings of a base that is quantised while it is loaded.
        """
        self._model = load_weights(
            self.source, self.head, self._num_labels, device, dtype, self._trust_remote_code, quantised
        )
        self._device = device
        if self.vision is not None:
            self.vision.attach(self._model)
        config = self._model.config.get_text_config()
        self._max_tokens = min(self._max_tokens, getattr(config, "max_position_embeddings", None) or self._max_tokens)
        if self._own:  # the head was trained with it, and reads the last token that is no padding
            config.pad_token_id = self._own_padding
        self._padding = getattr(config, "pad_token_id", None)

    def refusal(self, chats: Sequence[Sequence[dict[str, Any]]]) -> str | None:
        """The problem of a chat template that refuses all of these chats, else None; needs no weights."""
        refused = None
        for chat in chats:
            try:
                self._token_ids(chat)
            except RefusedChat as error:
                refused = refused or str(error)
            else:
                return None
        return refused and (
            f"--reward_model: {self.name}: can score none of the first conversations of --dataset: {refused}; correct "
            f"the template in {self.source.folder}, or the rows (their system turn is that of --system)"
        )

    def score(
        self, chats: Sequence[Sequence[dict[str, Any]]], on_progress: Callable[[], None] = lambda: None
    ) -> list[float]:
        """One score per chat, which ends with the assistant's turn; NaN if the chat template refuses it.

        `on_progress` is called after each batch.
        """
        return [math.nan if value is None else value for value in self._judged(chats, on_progress)]

    def _judged(
        self, chats: Sequence[Sequence[dict[str, Any]]], on_progress: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """What `_values` says of each chat; None if the chat template refuses it."""
        encoded = [self._encoded(chat) for chat in chats]
        kept = [index for index, row in enumerate(encoded) if row]
        found: list[Any] = [None] * len(chats)
        rows, chats = [encoded[i] for i in kept], [chats[i] for i in kept]
        # Without a pad token the head reads the last position, so rows cannot share a padded batch.
        max_rows = 1 if self._padding is None else MAX_BATCH_ROWS
        for indexes in batches([len(row) for row in rows], max_rows, MAX_BATCH_TOKENS):
            values = self._values([rows[index] for index in indexes], [chats[index] for index in indexes])
            for index, value in zip(indexes, values, strict=True):
                found[kept[index]] = value
            on_progress()
        return found

    def score_rows(
        self, rows: Sequence[dict[str, Any]], on_progress: Callable[[], None] = lambda: None
    ) -> Sequence[float | None]:
        """A score per row, whose `messages` are the chat and other entries columns."""
        return self.score([row["messages"] for row in rows], on_progress)

    def _encoded(self, chat: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids, or none if the chat template refuses the chat; the first refusal is logged."""
        try:
            return self.encode(chat)
        except RefusedChat as error:
            if not self._refused:
                shown = " ".join(str(turn.get("content")) for turn in chat)[:200]
                logger.warning("reward model %s: a chat has no score: %s: %r", self.name, error, shown)
            self._refused = True
            return []

    def encode(self, chat: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a finished chat, truncated on the left to the model's context; counts truncated chats."""
        ids = self._token_ids(chat)
        if len(ids) > self._max_tokens and min(ids) < 0:
            raise RefusedChat(f"{len(ids)} tokens with images, more than the {self._max_tokens} of its context")
        self.num_truncated += len(ids) > self._max_tokens
        return ids[-self._max_tokens :]

    def _token_ids(self, chat: Sequence[dict[str, Any]]) -> list[int]:
        return self._template.encode_finished(chat)

    def _values(self, rows: Sequence[list[int]], chats: Sequence[Sequence[dict[str, Any]]]) -> Sequence[Any]:
        """The scores of chats, of which `rows` are the token ids."""
        return [float(value) for value in self._logits(rows)[:, 0].float().cpu()]

    def _logits(self, rows: Sequence[list[int]]) -> torch.Tensor:
        """Float [rows, 1]; of token classification [rows, tokens, 2]."""
        import torch

        width = max(len(row) for row in rows)
        pad_id = 0 if self._padding is None else self._padding
        padded = [row + [pad_id] * (width - len(row)) for row in rows]
        inputs = {}
        if self.vision is not None:
            inputs = {**self.vision.token_kinds(padded, self._device), **self.vision.features(rows, self._device)}
            padded = [self.vision.visible(row) for row in padded]
        ids = torch.tensor(padded, device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self._device)
        with torch.inference_mode():
            return self._model(input_ids=ids, attention_mask=mask, **inputs).logits


class ProcessRewardModel(RewardModel):
    """A model of `swift rlhf --rlhf_type prm`: each step of an answer has a score, the answer that of its worst step.

    The minimum is that of Math-Shepherd (arXiv:2312.08935).
    """

    head = "step"

    def step_scores(self, chats: Sequence[Sequence[dict[str, Any]]]) -> list[list[float]]:
        """Probabilities that steps are right, for each chat; those that were cut off are left out."""
        return [self._by_step([self.encode(chat)], [chat])[0] for chat in chats]

    def _token_ids(self, chat: Sequence[dict[str, Any]]) -> list[int]:
        return self._steps(chat)[0]

    def _values(self, rows: Sequence[list[int]], chats: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
        return [min(scores) for scores in self._by_step(rows, chats)]

    def _by_step(self, rows: Sequence[list[int]], chats: Sequence[Sequence[dict[str, Any]]]) -> list[list[float]]:
        right = self._logits(rows).float().softmax(dim=-1)[..., 1].cpu()
        scores = []
        for row, chat, values in zip(rows, chats, right, strict=True):
            ids, ends = self._steps(chat)
            cut = len(ids) - len(row)
            scores.append([float(values[end - cut]) for end in ends if end >= cut])
        return scores

    def _steps(self, chat: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
        steps = steps_of(chat[-1]["content"] or "", self.separator)
        return encode_steps(self._template, chat[:-1], steps, self.separator)


class PluginRewardModel(RewardModel):
    """A model with which a plugin of `rm_plugins` scores rows; a language model if it has no head."""

    def __init__(self, source: RewardModelSource, trust_remote_code: bool) -> None:
        super().__init__(source, trust_remote_code)
        self.head = head_in(source)

    def load(self, device: torch.device | str, dtype: torch.dtype, quantised: Any = None) -> None:
        """As `RewardModel.load`, then makes the plugin, whose errors are a `RewardError`."""
        from swift.template import Template

        super().load(device, dtype, quantised)
        plugin = rm_plugins[self.source.plugin]
        with self._attributed():
            self._plugin = plugin(model=self._model, template=Template(self._template))

    def score_rows(
        self, rows: Sequence[dict[str, Any]], on_progress: Callable[[], None] = lambda: None
    ) -> list[float | None]:
        """The plugin's score of each row, or None; a `RewardError` if it raises or returns anything else."""
        with self._attributed():
            scores = read_values(self._plugin([dict(row) for row in rows]), len(rows))
        on_progress()
        return scores

    @contextlib.contextmanager
    def _attributed(self) -> Iterator[None]:
        """Turns an error of the plugin into one line."""
        try:
            yield
        except Exception as error:  # any error of the user's code
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise RewardError(
                f"--reward_model_plugin: {self.source.plugin}: {type(error).__name__}: {first_line(error)} "
                f"({where.filename}:{where.lineno})"
            ) from error


def batches(lengths: Sequence[int], max_rows: int, max_tokens: int) -> Iterator[list[int]]:
    """Cuts rows into padded batches: indexes of rows of similar length, longest first.

    A batch has at most `max_rows` rows and `max_tokens` tokens after padding; a longer row is a batch of its own.

    >>> list(batches([2, 5, 3], max_rows=2, max_tokens=100))
    [[1, 2], [0]]
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        width = lengths[batch[0]] if batch else lengths[index]
        if batch and (len(batch) == max_rows or width * (len(batch) + 1) > max_tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _finished(group: RolloutGroup, item: Completion) -> list[dict[str, Any]]:
    """The conversation up to the last answer; that of a trajectory has all of its turns."""
    turns = list(item.episode.messages) if item.episode is not None else []
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    return turns or [*group.prompt.messages, {"role": "assistant", "content": item.text}]


class RewardModels:
    """All reward models of a run, in the order of `reward_model`."""

    def __init__(self, models: Sequence[RewardModel]) -> None:
        self._models = list(models)
        self._seconds = {model.name: 0.0 for model in self._models}
        self.on_progress: Callable[[], None] = lambda: None
        """Called after each batch of a model."""

    def refusals(self, groups: Sequence[RolloutGroup]) -> list[str]:
        """A problem for each model that can score none of these groups; needs no weights."""
        chats = [_finished(group, item) for group in groups for item in group.completions]
        return [problem for model in self._models if (problem := model.refusal(chats))]

    def blind(self) -> list[str]:
        """A problem for each model that reads texts only."""
        return [
            f"--reward_model: {model.name}: reads texts only, and the policy sees images; use one that sees them, or "
            "reward functions"
            for model in self._models
            if model.vision is None
        ]

    def load(self, args: Any, device: torch.device | str) -> None:
        """Reads the weights of all models onto `device`."""
        from swift.models.policy import pick_dtype

        for model in self._models:
            model.load(device, pick_dtype(args.torch_dtype, device))

    def score(self, groups: Sequence[RolloutGroup]) -> list[list[list[float | None]]]:
        """Scores [group][sample][model]; for the thread that uses the device. None: a plugin has given none."""
        rows_in = [
            {**group.prompt.columns, **item.columns, "messages": _finished(group, item)}
            for group in groups
            for item in group.completions
        ]
        columns = []
        for model in self._models:
            began = time.monotonic()
            columns.append(model.score_rows(rows_in, self.on_progress))
            self._seconds[model.name] += time.monotonic() - began
        rows = iter(zip(*columns, strict=True)) if columns else iter([()] * len(rows_in))
        return [[list(next(rows)) for _ in group.completions] for group in groups]

    def drain_metrics(self) -> dict[str, float]:
        """`time/reward/<name>` (s) and `health/reward_truncated/<name>` (chats) since the last call."""
        metrics = {}
        for model in self._models:
            metrics[f"time/reward/{model.name}"] = self._seconds[model.name]
            metrics[f"health/reward_truncated/{model.name}"] = float(model.num_truncated)
            self._seconds[model.name], model.num_truncated = 0.0, 0
        return metrics


def open_reward_models(args: Any) -> RewardModels | None:
    """The models of `reward_model`, whose weights are not loaded yet; None when there are none."""
    if not args.reward_model:
        return None
    load_external_plugins(args.external_plugins)
    return RewardModels([open_reward_model(source, args.trust_remote_code) for source in find_reward_models(args)])


def open_reward_model(source: RewardModelSource, trust_remote_code: bool) -> RewardModel:
    """A model of the kind of its head, whose weights are not loaded yet."""
    if source.plugin != DEFAULT_PLUGIN:
        return PluginRewardModel(source, trust_remote_code)
    return (ProcessRewardModel if judges_steps(source) else RewardModel)(source, trust_remote_code)
