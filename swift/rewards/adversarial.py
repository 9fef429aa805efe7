"""Texts that a good reward function must not pay for. Pure."""

from __future__ import annotations

ADVERSARIAL_KINDS = (
    "empty",
    "blanks",
    "echoed question",
    "another row's gold",
    "gold 200 times",
    "several boxed values",
    "unclosed brace",
    "empty tags",
    "nested tags",
    "100,000 characters",
    "control characters",
    "power tower",
    "reward claim",
)


def gold_forms(gold: str) -> dict[str, str]:
    """The gold answer as a model might write it: plain, boxed, and in think/answer form."""
    return {
        "plain": gold,
        "boxed": f"\\boxed{{{gold}}}",
        "tagged": f"<think>The answer is {gold}.</think><answer>{gold}</answer>",
    }


def adversarial_texts(question: str, gold: str, other_gold: str | None) -> dict[str, str]:
    """One text per kind; "another row's gold" is left out when no other row has a different gold."""
    texts = {
        "empty": "",
        "blanks": " \n\t " * 8,
        "echoed question": question,
        "gold 200 times": f"{gold} " * 200,
        "several boxed values": f"\\boxed{{{gold}}} \\boxed{{0}} \\boxed{{1}} \\boxed{{-1}}",
        "unclosed brace": f"\\boxed{{{gold}",
        "empty tags": "<think></think><answer></answer>",
        "nested tags": "<think><think></think><answer><answer></answer></answer>",
        "100,000 characters": "the answer is " * 7142 + "nothing",
        "control characters": "".join(map(chr, range(1, 32))) * 8 + "\u202e\ufeff\x7f",
        "power tower": "\\boxed{9^{9^{9^{9}}}}",
        "reward claim": "reward: 1.0",
    }
    if other_gold is not None:
        texts["another row's gold"] = f"<think>so</think><answer>{other_gold}</answer>"
    return {kind: texts[kind] for kind in ADVERSARIAL_KINDS if kind in texts}
