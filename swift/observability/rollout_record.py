"""The record of rollouts: what each optimizer step was trained on, one Arrow file per step.

`rollouts/step-000012.arrow` has a row per completion of the step's global batch: tokens, log-probs of sampler, policy
and frozen models, data mask, advantage, rewards. About 12 bytes a token before compression (zstd). A writer thread
builds the files, which are complete or do not exist.

    from swift import read_rollouts

    for row in read_rollouts("output/run", steps=[12]):
        print(row["group_id"], row["advantage"], row["token_ids"])
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swift.errors import ConfigError, parse_json

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

FOLDER = "rollouts"
ARRAYS = {
    "prompt_ids": "int32", "token_ids": "int32", "trained": "bool", "sampler_logprobs": "float32",
    "policy_logprobs": "float32", "old_logprobs": "float32", "ref_logprobs": "float32", "teacher_logprobs": "float32",
    "entropy": "float32", "token_advantages": "float32", "versions": "int64", "teacher_prompt_ids": "int32",
    "reference_ids": "int32", "reference_trained": "bool",
}  # fmt: skip
"""Columns with an array per completion, null where there is none, and their types; a reference is that of its group,
beside the first completion."""

PLAIN = (
    "group", "group_id", "prompt_id", "index", "finish_reason", "turns", "excluded", "advantage", "rewards",
    "reward_kl", "completion",
)  # fmt: skip
"""Columns with a value per completion; `rewards` are in the order of `reward_names`, `turns` are JSON, `completion` is
what the trainer needs beside the tokens to train on it again."""

Row = Mapping[str, Any]


def keeps(setting: str, step: int, last: int) -> bool:
    """Whether `--record_rollouts` keeps a step once `last` is the newest."""
    kind, _, number = setting.partition(":")
    if kind == "last":
        return step > last - int(number)
    return kind == "all" or (kind == "every" and step % int(number) == 0)


def step_file(folder: Path, step: int) -> Path:
    """The file of a step."""
    return folder / f"step-{step:06}.arrow"


class RolloutRecord:
    """Writes the files of a run, in the background; a failure is raised by the next call.

    setting: `--record_rollouts`. reward_names: of the reward functions, then of the models. logprob_support: of the
    engines (`swift.rollout.engines.base`). as_text: makes text with special tokens of token ids, for one prompt a step.
    """

    logprob_support = "full"
    as_text: Callable[[Sequence[int]], str] | None = None

    def __init__(self, run_dir: Path, setting: str, reward_names: Sequence[str]) -> None:
        self.folder, self.setting, self.reward_names = run_dir / FOLDER, setting, list(reward_names)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollout-record")
        self._pending: Future[None] | None = None
        self._told = False

    def write(self, step: int, rows: Sequence[Row], metrics: Mapping[str, float]) -> None:
        """Hand over the rows of a step, whose arrays must not be changed; waits for the step before."""
        self.flush()
        self._pending = self._pool.submit(self._write, step, rows, dict(metrics))

    def flush(self) -> None:
        """Wait until every row is in its file."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Flush and end the thread; repeatable."""
        try:
            self.flush()
        finally:
            self._pool.shutdown()

    def _write(self, step: int, rows: Sequence[Row], metrics: Mapping[str, float]) -> None:
        from pyarrow import ipc

        self.folder.mkdir(exist_ok=True)
        about = {
            "step": step, "reward_names": self.reward_names, "logprob_support": self.logprob_support,
            "metrics": metrics, "prompt": self.as_text(list(rows[0]["prompt_ids"])) if self.as_text and rows else "",
        }  # fmt: skip
        table = table_of(rows).replace_schema_metadata({"swift": json.dumps(about)})
        path = step_file(self.folder, step)
        partial = path.with_suffix(".partial")
        with ipc.new_file(str(partial), table.schema, options=ipc.IpcWriteOptions(compression="zstd")) as file:
            file.write_table(table)
        partial.replace(path)
        if not self._told and rows:
            self._tell(step, path.stat().st_size, sum(len(row["token_ids"]) for row in rows))
        if self.setting.startswith("last:"):
            for old in self.folder.glob("step-*.arrow"):
                if not keeps(self.setting, number_of(old), step):
                    old.unlink()

    def _tell(self, step: int, size: int, tokens: int) -> None:
        """Say once how much a step takes."""
        self._told = True
        setting, _, number = self.setting.partition(":")
        whole = f", all that is kept about {size * int(number) / 1e6:.1f} MB" if setting == "last" else ""
        each = f" ({size / tokens:.1f} bytes a completion token)" if tokens else ""
        logger.info(
            "rollouts: step %d takes %.2f MB%s%s; --record_rollouts %s", step, size / 1e6, each, whole, self.setting
        )


def table_of(rows: Sequence[Row]) -> pyarrow.Table:
    """The rows as an Arrow table; arrays are joined, not copied value by value."""
    import pyarrow as pa

    columns = {name: pa.array([row[name] for row in rows]) for name in PLAIN}
    for name in ("turns", "excluded"):
        columns[name] = pa.array([row[name] for row in rows], pa.string())
    columns["rewards"] = pa.array([row["rewards"] for row in rows], pa.list_(pa.float64()))
    columns["completion"] = pa.array([row["completion"] for row in rows], pa.binary())
    columns["reward_kl"] = pa.array([row["reward_kl"] for row in rows], pa.float64())
    for name, kind in ARRAYS.items():
        arrays = [row.get(name) for row in rows]
        lengths = [0 if array is None else len(array) for array in arrays]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        known = [np.asarray(array, dtype=kind) for array in arrays if array is not None]
        values = pa.array(np.concatenate(known) if known else np.zeros(0, kind))
        missing = pa.array([array is None for array in arrays])
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets), values, mask=missing)
    return pa.table(columns)


def number_of(path: Path) -> int:
    """The step of a file."""
    return int(path.stem.partition("-")[2])


def recorded_steps(run: str | Path) -> list[int]:
    """The steps that a run has files of, in order."""
    return sorted(map(number_of, (Path(run) / FOLDER).glob("step-*.arrow")))


def read_step(run: str | Path, step: int) -> tuple[pyarrow.Table, dict[str, Any]]:
    """The table of a step, and what is said of it: `step`, `reward_names`, `logprob_support`, `metrics`,
    `prompt` (the first one as text with special tokens).

    Raises:
        ConfigError: there is no such file.
    """
    import pyarrow as pa
    from pyarrow import ipc

    path = step_file(Path(run) / FOLDER, step)
    if not path.exists():
        steps = recorded_steps(run)
        there = f"{steps[0]} to {steps[-1]}" if steps else "none; --record_rollouts says which are kept"
        raise ConfigError(f"rollouts: {path}: step {step} is not on record; there are: {there}")
    table = ipc.open_file(str(path)).read_all()
    for name in {*PLAIN, *ARRAYS} - {*table.column_names}:  # an older version wrote it
        table = table.append_column(
            name, pa.nulls(table.num_rows, pa.list_(pa.int32()) if name in ARRAYS else pa.null())
        )
    return table, json.loads(table.schema.metadata[b"swift"])


def read_rollouts(run: str | Path, steps: Collection[int] | None = None) -> Iterator[dict[str, Any]]:
    """The completions of a run's record, one dict each, with `step` and `rewards` by name; arrays are NumPy's or None.

    Args:
        run: folder of the run.
        steps: the optimizer steps; None: all on record.

    Raises:
        ConfigError: a step is not on record.
    """
    for step in recorded_steps(run) if steps is None else steps:
        table, about = read_step(run, step)
        plain = {name: table[name].to_pylist() for name in PLAIN}
        arrays = {name: table[name].combine_chunks() for name in ARRAYS}
        for number in range(table.num_rows):
            row = {name: values[number] for name, values in plain.items()}
            row["turns"] = None if row["turns"] is None else parse_json(row["turns"])
            row["rewards"] = dict(zip(about["reward_names"], row["rewards"], strict=False))
            for name, column in arrays.items():
                one = column[number].values
                row[name] = None if one is None else one.to_numpy(zero_copy_only=False)
            row["versions"] = [tuple(map(int, part)) for part in row["versions"].reshape(-1, 3)]
            yield {"step": step, **row}
