"""Generalized knowledge distillation (arXiv:2306.13649): GRPO's trainer with a teacher in place of rewards."""
