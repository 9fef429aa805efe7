"""Texts that a good reward function must not pay for. Pure."""

from __future__ import annotations


def adversarial_texts(question: str, truth: str, other_truth: str | None) -> dict[str, str]:
    """One text per kind; "another row's truth" is left out when no other row has a different ground truth."""
    other = {"another row's truth": f"<think>so</think><answer>{other_truth}</answer>"} if other_truth else {}
    return {
        "empty": "",
        "blanks": " \n\t " * 8,
        "echoed question": question,
        **other,
        "truth 200 times": f"{truth} " * 200,
        "several boxed values": f"\\boxed{{{truth}}} \\boxed{{0}} \\boxed{{1}} \\boxed{{-1}}",
        "unclosed brace": f"\\boxed{{{truth}",
        "empty tags": "<think></think><answer></answer>",
        "nested tags": "<think><think></think><answer><answer></answer></answer>",
        "100,000 characters": "the answer is " * 7142 + "nothing",
        "control characters": "".join(map(chr, range(1, 32))) * 8 + "\u202e\ufeff\x7f",
        "power tower": "\\boxed{9^{9^{9^{9}}}}",
        "reward claim": "reward: 1.0",
    }
