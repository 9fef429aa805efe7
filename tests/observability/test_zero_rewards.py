"""A function that never rewards: what was sampled, and what was read from it, is shown once."""

from pathlib import Path

from swift.observability.zero_rewards import ENOUGH, ZeroRewards


def row(number, *, finish="stop", read=None, **rewards):
    return {
        "prompt_id": f"p{number // 4}",
        "prompt": f"[user]\nquestion {number // 4}",
        "completion": f"text {number}",
        "finish_reason": finish,
        "rewards": rewards,
        "columns": {"solution": str(number // 4), "accuracy_extracted": read},
    }


def first_lines(rows):
    return ZeroRewards(Path("completions.jsonl")).update(rows)


def test_two_completions_of_two_prompts_are_shown_with_what_was_read():
    rows = [
        row(n, finish="length" if n < 2 else "stop", read="7" if n == 2 else None, accuracy=0.0) for n in range(ENOUGH)
    ]
    lines = first_lines(rows)
    cut = "2 of them end at --max_completion_length"
    assert lines[0] == f"accuracy: 0 for each of the first {ENOUGH} completions; {cut}. Two of them:"
    assert lines[1:5] == [
        "  prompt     '[user]\\nquestion 0'",
        "  completion 'text 2'",
        "  columns    solution '0'",
        f"  accuracy read '7'; 1 of {ENOUGH} completions have an answer for it",
    ]
    assert (lines[6], lines[8][:24]) == ("  completion 'text 4'", "  accuracy read nothing;")
    assert "--reward_funcs accuracy --completions completions.jsonl" in lines[9]


def test_they_are_shown_once_and_not_before_enough_completions():
    watch = ZeroRewards(Path("completions.jsonl"))
    rows = [row(n, accuracy=0.0) for n in range(ENOUGH)]
    assert watch.update(rows[1:]) == []
    assert len(watch.update(rows[:1])) == 6
    assert watch.update(rows) == []


def test_one_reward_is_enough_and_penalties_are_0_at_their_best():
    rows = [row(n, accuracy=float(n == 9), repetition=0.0, format=None) for n in range(ENOUGH)]
    assert first_lines(rows) == []
    assert first_lines([entry | {"rewards": {**entry["rewards"], "format": 0.0}} for entry in rows])[0][:7] == "format:"
