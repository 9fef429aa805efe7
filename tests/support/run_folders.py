"""Run folders as swift writes them, and what is asked of them."""

import json
from dataclasses import dataclass

import numpy as np

from swift.observability.jsonl import JsonlWriter
from swift.observability.rollout_record import RolloutRecord
from swift.viewing.run import Run


def completion(step, group=0, index=0, **more):
    """A row of completions.jsonl."""
    row = {
        "attempt": 1, "step": step, "split": "train", "weight_version": step - 1, "prompt_id": f"p{group}",
        "group_id": f"p{group}-{step}", "index": index, "prompt": f"[user]\nquestion {group}?",
        "completion": f"answer {index} of step {step}", "turns": None, "prompt_tokens": 3,
        "completion_tokens": 4 + index, "finish_reason": "stop", "rewards": {"accuracy": float(index), "format": 0.5},
        "reward": index + 0.5, "advantage": index - 0.5, "used": True, "excluded": None, "columns": {"solution": "42"},
    }  # fmt: skip
    return {**row, **more}


def logged(step, **more):
    return {"reward": step / 10, "rewards/accuracy/mean": step / 20, "loss": None, "step": step, "attempt": 1, **more}


def recorded(group_id="p0-1", index=0, **more):
    """A row of the record of rollouts."""
    return {
        "group": 0, "group_id": group_id, "prompt_id": "p0", "index": index, "finish_reason": "stop", "excluded": None,
        "turns": None, "completion": None, "reward_kl": None, "advantage": 0.5, "rewards": [1.0, 0.5],
        "prompt_ids": np.arange(2, dtype=np.int32), "token_ids": np.array([72, 105, 33], np.int32),
        "trained": np.array([True, True, False]), "sampler_logprobs": np.array([-0.5, -1.0, -0.25], np.float32),
        "policy_logprobs": None, "versions": np.array([2, 0, 1, 3, 1, 3]), **more,
    }  # fmt: skip


@dataclass
class Folder:
    path: object

    def write(self, name, *rows):
        writer = JsonlWriter(self.path / name)
        writer.write(*rows)
        writer.close()

    def completions(self, *rows):
        self.write("completions.jsonl", *rows)

    def record(self, step, *rows):
        record = RolloutRecord(self.path, "all", ["accuracy", "format"])
        record.write(step, rows, {})
        record.close()

    def run(self):
        """The run, with all that is in its files."""
        run = Run(self.path, self.path.name)
        return read(run)


def read(run):
    for _ in run.refresh():
        pass
    return run


def make_folder(path):
    """The folder of a run that has just begun."""
    path.mkdir()
    made = Folder(path)
    made.write("attempts.jsonl", {"attempt": 1, "changed": {}, "start_step": 0, "end_step": None, "reason": None})
    (path / "args.json").write_text(json.dumps({"model": "no/model-1"}))
    return made
