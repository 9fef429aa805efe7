"""Energy-based fine-tuning (EBFT, arXiv:2603.12248): rewards from features of a frozen model, not from functions."""
