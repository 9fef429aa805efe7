"""The books of a soak: those of a good run balance, and each way to lose or double something is noticed."""

import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
from run_folders import completion, logged, make_folder, recorded

from swift.observability.jsonl import read_jsonl

EPOCHS, PROMPTS, GROUPS, COMPLETIONS = 3, 6, 2, 2
STEPS = EPOCHS * PROMPTS // GROUPS


@pytest.fixture
def rows():
    """Completions of whole epochs; the order of the prompts differs from epoch to epoch."""
    found = []
    for step in range(1, STEPS + 1):
        epoch, place = divmod((step - 1) * GROUPS, PROMPTS)
        for prompt in ((place + offset + epoch) % PROMPTS for offset in range(GROUPS)):
            name = {"prompt_id": f"p{prompt}", "group_id": f"p{prompt}-{epoch}"}
            found += [completion(step, prompt, index, **name) for index in range(COMPLETIONS)]
    return found


@pytest.fixture
def audited(tmp_path):
    """The books of a run folder with these completions, and a record of these or others."""
    from soak_books import Plan, audit

    def books(rows, *, record=None, ended=EPOCHS * PROMPTS, log=None, reason="killed", **settings):
        folder = make_folder(tmp_path / "run")
        (folder.path / "attempts.jsonl").unlink()
        folder.write("attempts.jsonl", {"attempt": 1, "reason": reason}, {"attempt": 2, "reason": "done"})
        folder.write("logging.jsonl", *(log or [logged(step, attempt=2) for step in range(1, STEPS + 1)]))
        folder.completions(*rows)
        for step in range(1, STEPS + 1):
            kept = [row for row in (rows if record is None else record) if row["step"] == step]
            names = ("group_id", "prompt_id", "index", "excluded")
            folder.record(step, *(recorded(**{name: row[name] for name in names}) for row in kept))
        counts = {"launched": ended + 2, "trained": ended - 1, "excluded": 1, "dropped": 0}
        checkpoint = folder.path / f"checkpoint-{STEPS}"
        checkpoint.mkdir()
        state = msgspec.msgpack.encode(["1", {"pipeline": {"scheduler": counts}}])
        (checkpoint / "pipeline_state.msgpack").write_bytes(state)
        plan = Plan(prompts=PROMPTS, groups=GROUPS, completions=COMPLETIONS, wait_s=60)
        return audit(folder.path, replace(plan, **settings))

    return books


def of_group(rows, name):
    return [row for row in rows if row["group_id"] == name]


def test_the_books_of_a_good_run_balance(audited, rows):
    rows[3] |= {"excluded": "odd: timeout", "used": False, "reward": None}
    books = audited(rows)
    assert books.problems == []
    assert books.totals == {
        "attempts": 2, "steps": STEPS, "groups": EPOCHS * PROMPTS, "completions": len(rows), "epochs": EPOCHS,
        "trained": len(rows) - 1, "excluded: odd: timeout": 1, "launched, not ended": 2,
    }  # fmt: skip


def test_a_lost_group_is_noticed(audited, rows):
    left = [row for row in rows if row["group_id"] != "p3-1"]
    problems = audited(left).problems
    assert "group p3-1: lost, although launches of epoch 2 are there" in problems
    (step,) = {row["step"] for row in of_group(rows, "p3-1")}
    assert f"step {step}: 1 groups instead of 2" in problems
    assert "checkpoint-9: its scheduler has ended 18 groups, completions.jsonl has 17" in problems


def test_a_group_that_another_takes_the_place_of_is_noticed(audited, rows):
    (step,) = {row["step"] for row in of_group(rows, "p3-2")}
    (other,) = {row["group_id"] for row in rows if row["step"] == step} - {"p3-2"}
    doubled = [{**row, "group_id": "p3-3"} if row["group_id"] == other else row for row in rows]
    assert "prompt p3: 2 times in epoch 2" in audited(doubled).problems


def test_a_doubled_group_is_noticed(audited, rows):
    (step,) = {row["step"] for row in of_group(rows, "p2-0")}
    again = [{**row, "step": STEPS} for row in of_group(rows, "p2-0")]
    assert f"group p2-0: twice, in the steps {step}, {STEPS}" in audited([*rows, *again]).problems


def test_a_completion_that_is_lost_or_doubled_is_noticed(audited, rows):
    problems = audited([*rows[1:], rows[-1]]).problems
    assert f"group {rows[0]['group_id']}: step 1 has its completions [1], not 2" in problems
    assert f"group {rows[-1]['group_id']}: step {STEPS} has its completions [0, 1, 1], not 2" in problems


def test_what_is_left_out_needs_a_reason_and_what_is_trained_a_reward(audited, rows):
    rows[0] |= {"used": False}
    rows[2] |= {"reward": None}
    assert audited(rows).problems == [
        f"group {rows[0]['group_id']}: completion 0 of step 1: left out without a reason",
        f"group {rows[2]['group_id']}: completion 0 of step 1: trained on without a reward",
    ]


def test_groups_of_equal_rewards_may_be_dropped_with_dynamic_sampling_only(audited, rows):
    for row in rows[:COMPLETIONS]:
        row |= {"used": False, "reward": 1.0}
    books = audited(rows, record=rows[COMPLETIONS:], dynamic=True)
    assert (books.problems, books.totals["dropped: equal rewards"]) == ([], COMPLETIONS)


def test_a_record_that_differs_is_noticed(audited, rows):
    name = rows[0]["group_id"]
    assert audited(rows, record=rows[1:]).problems == [f"record: step 1 differs from completions.jsonl in {name}"]


def test_lost_steps_long_waits_and_attempts_without_an_end_are_noticed(audited, rows):
    log = [logged(step) for step in range(1, STEPS)]
    log[1] |= {"step": 3, "attempt": 2, "time/wait_rollout": 61.0}
    del log[2]
    problems = audited(rows, log=log, reason=None).problems
    assert "logging.jsonl: steps [2] are missing or there twice" in problems
    assert "step 3: time/wait_rollout 61 s, over 60 s" in problems
    assert "attempts.jsonl: attempt 1 has no reason of its end" in problems


def test_growth_is_a_share_per_hour():
    from soak_books import slope_per_hour

    assert slope_per_hour([(0, 100), (1800, 101), (3600, 102)]) == pytest.approx(2 / 101)
    assert slope_per_hour([(0, 100), (1800, 90), (3600, 100)]) == 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_small_soak_loses_nothing(benchmarks, tmp_path):
    words = ["--faults", "6", "--per_run", "3", "--seed", "1", "--only", "server", "actors", "--out", tmp_path / "out"]
    ran = subprocess.run(
        [sys.executable, benchmarks / "soak.py", *words], capture_output=True, text=True, timeout=1700, check=False
    )
    if "needs namespaces" in ran.stderr:
        pytest.skip(ran.stderr.strip())
    assert ran.returncode == 0, ran.stdout + ran.stderr
    faults = list(read_jsonl(tmp_path / "out" / "faults.jsonl"))
    assert len(faults) >= 6 and {row["phase"] for row in faults} == {"server", "actors"}
    assert all(row["recovery_s"] is not None for row in faults)
    report = (tmp_path / "out" / "report.md").read_text()
    assert all(f"| {row['target']} | {row['kind']} |" in report for row in faults if not row["together"])
