"""Which logged values may differ between two runs of one command."""


def is_timing(name: str) -> bool:
    """Whether a logged value measures the machine (time, memory), or counts alerts about that."""
    prefixes = ("time/", "eval_time/", "memory/", "perf/", "timing_s/", "nemo_gym/", "eval_nemo_gym/")
    return name.startswith(prefixes) or name in {"step_time", "tokens_per_s", "health/alerts"}
