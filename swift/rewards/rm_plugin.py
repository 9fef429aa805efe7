"""Plugins of reward models: classes that score rows with a model and its chat template, and the judge `genrm`.

    class Mine:                                       # --reward_model M --reward_model_plugin mine
        def __init__(self, model, template): ...
        def __call__(self, inputs, **kwargs): ...     # rows with "messages" -> a score for each

    rm_plugins["mine"] = Mine

`default` is how swift scores without a plugin. A model without a score head is loaded as a language model.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

from swift.plugin.registry import rm_plugins

__all__ = ["DefaultRMPlugin", "GenRMPlugin", "rm_plugins"]


@rm_plugins.register("default")
class DefaultRMPlugin:
    """Base of plugins: the first logit of a score head on the whole conversation."""

    def __init__(self, model: Any, template: Any) -> None:
        self.model, self.template = model, template

    def __call__(self, inputs: Sequence[dict[str, Any]], **kwargs: Any) -> Any:
        """Scores of rows; `messages` is the conversation up to the answer, other entries are columns."""
        import torch

        batch = self.template.data_collator([self.template.encode(row) for row in inputs])
        with torch.inference_mode():
            return self.model(**{name: values.to(self.model.device) for name, values in batch.items()}).logits[:, 0]


@rm_plugins.register("genrm")
class GenRMPlugin(DefaultRMPlugin):
    """A language model as the judge: it reads the conversation, and writes a score between 0 and 1.

    Several answers (`request_config.n`) are averaged; a conversation without a readable score has none (None).
    """

    system = (
        "You grade the last answer of an assistant. Read the conversation, and consider whether the answer is correct, "
        "complete and to the point. Then end with a line that has a number between 0 (wrong) and 1 (perfect), such as:"
        "\n\nReward: 0.85"
    )

    def __init__(self, model: Any, template: Any) -> None:
        from swift.infer_engine import RequestConfig, TransformersEngine

        super().__init__(model, template)
        self.engine = TransformersEngine(model, template=template, max_batch_size=0)
        self.request_config = RequestConfig()

    def __call__(self, inputs: Sequence[dict[str, Any]], **kwargs: Any) -> Any:
        """The judge's score of each row."""
        responses = self.engine.infer(self.prepare_rm_inputs(inputs), self.request_config, use_tqdm=False)
        return self.compute_rewards(responses)

    def prepare_rm_inputs(self, inputs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The chat with the judge about each row."""
        asked = [self.messages_to_query(row["messages"]) for row in inputs]
        system = {"role": "system", "content": self.system}
        return [
            {**row, "messages": [system, {"role": "user", "content": query}]}
            for row, query in zip(inputs, asked, strict=True)
        ]

    @staticmethod
    def messages_to_query(messages: Sequence[dict[str, Any]]) -> str:
        """A conversation as text, a paragraph per message.

        >>> GenRMPlugin.messages_to_query([{"role": "user", "content": "2 + 3?"}])
        'User: 2 + 3?'
        """
        turns = [(turn["role"], turn.get("content")) for turn in messages]
        return "\n".join(f"{role.capitalize()}: {content}" for role, content in turns if content)

    @staticmethod
    def extract_reward(model_output: str) -> float | None:
        """The score that an answer of the judge ends with; None if there is none between 0 and 1."""
        found = re.findall(r"Reward:\s*(\d+(?:\.\d+)?)", model_output)
        return float(found[-1]) if found and float(found[-1]) <= 1 else None

    def compute_rewards(self, results: Sequence[Any]) -> list[float | None]:
        """The mean score of each response."""
        scores = [[self.extract_reward(choice.message.content) for choice in result.choices] for result in results]
        given = [[score for score in row if score is not None] for row in scores]
        return [statistics.fmean(row) if row else None for row in given]
