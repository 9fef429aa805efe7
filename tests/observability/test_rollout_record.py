"""The record of rollouts holds what it was given, and keeps the steps that the setting names."""

import json

import datasets
import numpy as np
import pyarrow.parquet
import pytest

from swift import read_rollouts
from swift.errors import ConfigError
from swift.observability import rollout_record
from swift.observability.evidence import gather
from swift.observability.rollout_record import RolloutRecord, keeps, recorded_steps


def row(number, length=3, **more):
    return {
        "group": 0, "group_id": "a-1", "prompt_id": "a", "index": number, "finish_reason": "stop", "turns": None,
        "excluded": None, "advantage": 0.5, "rewards": [1.0, None], "reward_kl": None, "completion": None,
        "prompt_ids": np.arange(2, dtype=np.int32), "token_ids": np.arange(length, dtype=np.int32),
        "trained": np.arange(length) > 0, "sampler_logprobs": np.linspace(-1, 0, length, dtype=np.float32),
        "policy_logprobs": None, "versions": np.array([2, 0, 1, 3, 1, length]), **more,
    }  # fmt: skip


@pytest.fixture
def record(tmp_path):
    def made(setting="all"):
        return RolloutRecord(tmp_path, setting, ["accuracy", "format"])

    return made


def test_rows_come_back_as_they_were_given(record, tmp_path):
    file = record()
    policy = np.array([-0.25, -0.5], np.float32)
    turns = [{"role": "assistant", "content": "\ud800 7", "reward": None}, {"role": "tool", "content": {"seen": [1]}}]
    rows = [row(0), row(1, 2, policy_logprobs=policy), row(2, 0, turns=json.dumps(turns))]
    file.write(7, rows, {"loss": 0.125})
    file.close()
    first, second, empty = read_rollouts(tmp_path)
    assert (first["turns"], empty["turns"]) == (None, turns)
    assert first["step"] == 7 and first["rewards"] == {"accuracy": 1.0, "format": None}
    assert first["policy_logprobs"] is None and (second["policy_logprobs"] == policy).all()
    assert first["versions"] == [(2, 0, 1), (3, 1, 3)]
    assert first["trained"].tolist() == [False, True, True]
    for name in ("prompt_ids", "token_ids", "sampler_logprobs"):
        assert (first[name] == row(0)[name]).all() and first[name].dtype == row(0)[name].dtype
    assert len(empty["token_ids"]) == 0
    assert rollout_record.read_step(tmp_path, 7)[1]["metrics"] == {"loss": 0.125}


def test_the_doctor_sees_the_first_prompt_of_several_steps(record, tmp_path):
    file = record()
    file.as_text = lambda ids: "".join(f"<{one}>" for one in ids)
    for step in range(1, 4):
        file.write(step, [row(0, prompt_ids=np.array([step, 9])), row(1)], {})
    file.close()
    assert gather(tmp_path, [], []).prompts == ["<1><9>", "<2><9>", "<3><9>"]


def test_a_step_becomes_a_dataset_and_a_parquet_file(record, tmp_path):
    file = record()
    file.write(3, [row(0), row(1, 2)], {})
    file.close()
    table, _ = rollout_record.read_step(tmp_path, 3)
    assert datasets.Dataset(table)[1]["token_ids"] == [0, 1]
    pyarrow.parquet.write_table(table, tmp_path / "step.parquet")
    assert datasets.Dataset.from_parquet(str(tmp_path / "step.parquet"))["finish_reason"] == ["stop", "stop"]


def test_the_size_is_told_once(record, tmp_path, caplog):
    caplog.set_level("INFO")
    file = record("last:50")
    for step in (4, 5):
        file.write(step, [row(0)], {})
    file.close()
    (line,) = (one.message for one in caplog.records if one.message.startswith("rollouts: "))
    size = rollout_record.step_file(tmp_path / "rollouts", 4).stat().st_size
    assert line == (
        f"rollouts: step 4 takes {size / 1e6:.2f} MB ({size / 3:.1f} bytes a completion token), all that is kept about "
        f"{size * 50 / 1e6:.1f} MB; --record_rollouts last:50"
    )


@pytest.mark.parametrize(
    ("setting", "kept"), [("all", [1, 2, 3, 4, 5]), ("last:2", [4, 5]), ("every:2", [2, 4]), ("off", [])]
)
def test_the_steps_of_the_setting_are_kept(record, tmp_path, setting, kept):
    file = record(setting)
    for step in range(1, 6):
        if keeps(setting, step, step):
            file.write(step, [row(0)], {})
    file.close()
    assert recorded_steps(tmp_path) == kept


def test_a_failed_write_is_told_by_the_next_call_and_leaves_no_half_file(record, tmp_path):
    (tmp_path / "rollouts").write_text("")
    file = record()
    file.write(1, [row(0)], {})
    with pytest.raises(FileExistsError):
        file.flush()
    file.close()


def test_a_step_that_is_not_there_is_named(record, tmp_path):
    with pytest.raises(ConfigError, match="step 3 is not on record; there are: none"):
        list(read_rollouts(tmp_path, [3]))
    file = record()
    file.write(1, [row(0)], {})
    file.close()
    with pytest.raises(ConfigError, match="step 3 is not on record; there are: 1 to 1"):
        list(read_rollouts(tmp_path, [3]))


def test_a_record_of_an_older_version_lacks_values_only(record, tmp_path, monkeypatch):
    file = record()
    file.write(1, [row(0)], {})
    file.close()
    monkeypatch.setitem(rollout_record.ARRAYS, "more", np.int32)
    monkeypatch.setattr(rollout_record, "PLAIN", (*rollout_record.PLAIN, "beside"))
    [found] = read_rollouts(tmp_path, [1])
    assert (found["more"], found["beside"], found["finish_reason"]) == (None, None, "stop")
