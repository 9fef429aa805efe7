"""GRPO: the trainer, its step, and the run around them."""
