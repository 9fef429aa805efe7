"""Reward functions to start your own from. Register them with

    swift rlhf --rlhf_type grpo ... --external_plugins examples/train/grpo/plugin/plugin.py \
        --reward_funcs accuracy short_answer

and try them without a model first:

    swift reward-test --reward_funcs short_answer --external_plugins examples/train/grpo/plugin/plugin.py \
        --dataset my_rows.jsonl

A function gets the completions of one prompt and, as keywords, every column of the data set (lists of the
same length). It returns one entry per completion: a number, or None where it does not apply. What it raises,
and what takes longer than --reward_timeout, excludes the sample instead of scoring it.
"""

from __future__ import annotations

import ast
import asyncio
import json
import operator
import os
import re
import urllib.request
from collections import Counter
from typing import Any

from swift.plugin import ORM, AsyncORM, orms
from swift.plugin.orm import Format, MathAccuracy

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


# --- the smallest possible reward: a plain function ---------------------------------------------------------


def dummy(completions: list[str], **kwargs: Any) -> list[float]:
    """1.0 for more than 1024 characters, else 0.0: useless for training, good for a first try."""
    return [1.0 if len(text) > 1024 else 0.0 for text in completions]


# --- a class that is built from flags -----------------------------------------------------------------------


class ShortAnswer(ORM):
    """Falls linearly from 1.0 for an empty completion to 0.0 for one of the longest allowed length.

    A constructor parameter with the name of a flag receives that flag's value; `args` would receive all.
    """

    def __init__(self, max_completion_length: int = 512) -> None:
        super().__init__()
        self.max_tokens = max_completion_length

    def __call__(self, completions: list[str], response_token_ids: list[list[int]], **kwargs: Any) -> list[float]:
        """`response_token_ids` are the tokens the engine sampled, the end token included."""
        return [max(0.0, 1.0 - len(ids) / self.max_tokens) for ids in response_token_ids]


# --- combining built-in rewards -----------------------------------------------------------------------------


class FormattedAccuracy(ORM):
    """1.0 only for a right answer in the asked-for form, 0.1 for the form alone, else 0.0.

    A sum of `accuracy` and `format` also pays for a right answer in a wrong form; this does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.format = MathAccuracy(), Format()

    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        """`solution` is a column of the data set; rows without one are refused at the start."""
        right = self.accuracy(completions, solution)
        formed = self.format(completions)
        return [form * (1.0 if ok else 0.1) for ok, form in zip(right, formed, strict=True)]


# --- a task of its own: reach a target with given numbers ---------------------------------------------------

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown(completions: list[str], target: list[Any], nums: list[Any], **kwargs: Any) -> list[float | None]:
    """1.0 if the expression in <answer> uses exactly the row's `nums` and equals `target`.

    0.1 for a readable expression that is wrong, 0.0 for none. Rows of other tasks in the mix (no target)
    get None: this reward does not apply to them.
    """
    rows = zip(completions, target, nums, strict=True)
    return [None if goal is None else _countdown_score(text, float(goal), numbers) for text, goal, numbers in rows]


def _countdown_score(text: str, target: float, numbers: list[int]) -> float:
    match = _ANSWER.search(text)
    if match is None:
        return 0.0
    try:
        tree = ast.parse(match.group(1).strip().split("=")[0].strip(), mode="eval").body
        value = _evaluate(tree)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return 0.0
    used = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return 1.0 if used == Counter(numbers) and abs(value - target) < 1e-9 else 0.1


def _evaluate(node: ast.expr) -> float:
    """Numbers and + - * / only; `eval` on a model's output would run whatever it writes."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return float(_OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    raise ValueError("not plain arithmetic")


# --- a reward that compares the completions of one prompt ---------------------------------------------------


class Diversity(ORM):
    """The share of a completion's words that no sibling uses.

    `scope = "group"`: it only makes sense with all completions of the prompt, so it is never called with
    fewer, and a failure excludes the whole group.
    """

    scope = "group"

    def __call__(self, completions: list[str], group_id: list[str], **kwargs: Any) -> list[float]:
        """One value between 0 and 1 per completion."""
        vocabularies = [set(text.lower().split()) for text in completions]
        uses = Counter((group, word) for group, words in zip(group_id, vocabularies, strict=True) for word in words)
        return [
            sum(uses[group, word] == 1 for word in words) / len(words) if words else 0.0
            for group, words in zip(group_id, vocabularies, strict=True)
        ]


# --- asking a judge behind HTTP -----------------------------------------------------------------------------


class Judge(AsyncORM):
    """Asks an OpenAI-compatible server to grade a completion from 0 to 10.

    Set JUDGE_URL (such as http://127.0.0.1:8000/v1), JUDGE_MODEL and, if needed, JUDGE_API_KEY. Without
    JUDGE_URL it returns None everywhere: it does not apply. Calls of different prompts overlap, so the
    time of a step is that of the slowest answer, not of their sum.
    """

    def __init__(self, reward_timeout: float = 30.0) -> None:
        super().__init__()
        self.url = os.environ.get("JUDGE_URL", "").rstrip("/")
        self.model = os.environ.get("JUDGE_MODEL", "judge")
        self.timeout_s = reward_timeout

    async def __call__(self, completions: list[str], messages: list[Any], **kwargs: Any) -> list[float | None]:
        """`messages` holds the prompt of each completion."""
        if not self.url:
            return [None] * len(completions)
        grades = [self._grade(chat, text) for chat, text in zip(messages, completions, strict=True)]
        return list(await asyncio.gather(*grades))

    async def _grade(self, chat: list[dict[str, Any]], completion: str) -> float | None:
        question = "\n".join(f"{message['role']}: {message['content']}" for message in chat)
        reply = await asyncio.to_thread(
            self._post,
            f"Grade the answer to this conversation from 0 (useless) to 10 (perfect). Reply with the number "
            f"only.\n\n{question}\n\nAnswer:\n{completion}",
        )
        grade = re.search(r"\d+(?:\.\d+)?", reply)
        return min(float(grade.group()), 10.0) / 10.0 if grade else None

    def _post(self, text: str) -> str:
        body = {"model": self.model, "temperature": 0, "messages": [{"role": "user", "content": text}]}
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("JUDGE_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])


orms["dummy"] = dummy
orms["short_answer"] = ShortAnswer
orms["formatted_accuracy"] = FormattedAccuracy
orms["countdown"] = countdown
orms["diversity"] = Diversity
orms["judge"] = Judge
