"""The built-in reward functions: one file per idea, each usable outside a run.

    >>> from swift.rewards.orm import Format
    >>> Format()(["<think>one and one</think><answer>2</answer>"])
    [1.0]

A new function is a new file that registers a class and declares its settings. None of the functions imports torch;
those that need a library (math-verify, reasoning-gym) import it when they are built.
"""
