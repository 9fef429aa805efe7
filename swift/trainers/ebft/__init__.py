"""Energy-based fine-tuning (arXiv:2603.12248): structured on the rollout pipeline, strided on documents."""
