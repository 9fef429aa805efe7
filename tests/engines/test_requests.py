"""The table of outstanding requests: plain calls, no engine and no clock."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.errors import EngineError
from swift.rollout.engines.requests import RequestTable
from swift.types import Completion, Request, SamplingParams


def request(name, new=10):
    return Request(name, [1, 2, 3], SamplingParams(max_new_tokens=new))


def done(name, reason="stop", tokens=(5,)):
    return Completion(name, list(tokens), [-1.0] * len(tokens), reason)


def table_with(*names, **options):
    table = RequestTable(**options)
    for name in names:
        table.add(request(name))
    return table


def taken(table):
    found = [(one.request_id, one.finish_reason) for one in table.ready]
    table.ready.clear()
    return found


def test_a_request_waits_is_held_and_comes_back_once():
    table = table_with("a", "b")
    assert [one.request_id for one in table.held()] == ["a", "b"]
    table.send(["a"], "engine", 0.0)
    assert (table.load("engine"), table.load(None)) == (13, 13)
    assert table.arrive("engine", done("a"))
    assert not table.arrive("engine", done("a"))
    assert (taken(table), table.ids) == ([("a", "stop")], {"b"})


def test_an_id_that_is_outstanding_is_refused():
    table = table_with("a")
    with pytest.raises(EngineError, match="outstanding already"):
        table.add(request("a"))


def test_what_a_holder_that_was_given_up_delivers_is_ignored():
    table = table_with("a")
    table.send(["a"], "first", 0.0)
    table.release("first")
    table.send(["a"], "second", 1.0)
    assert not table.arrive("first", done("a"))
    assert table.arrive("second", done("a"))
    assert taken(table) == [("a", "stop")]


def test_an_aborted_request_of_a_lost_holder_is_not_sampled_again():
    table = table_with("a", "b", "c")
    table.send(["a", "b"], "lost", 0.0)
    assert table.abort(["a", "c", "unknown"]) == {"lost": ["a"]}
    assert taken(table) == [("c", "abort")]
    table.release("lost")
    assert taken(table) == [("a", "abort")]
    assert [one.request_id for one in table.held()] == ["b"]


def test_a_late_request_is_tried_twice_and_then_is_an_error():
    table = table_with("a", limit_s=10.0, grace_s=5.0)
    for start in (0.0, 100.0):
        table.send(["a"], "engine", start)
        assert table.overdue(start) == table.overdue(start + 10.0) == ({}, {})
        assert table.overdue(start + 10.5) == ({"engine": ["a"]}, {})
        assert table.overdue(start + 15.0) == ({}, {})
        table.arrive("engine", done("a", "abort"))
    assert taken(table) == [("a", "error")]
    assert (table.late, len(table)) == (2, 0)


def test_a_late_request_that_never_had_its_turn_is_not_at_fault():
    table = table_with("a", limit_s=10.0)
    for start in (0.0, 100.0, 200.0):
        table.send(["a"], "engine", start)
        table.overdue(start + 11.0)
        table.arrive("engine", done("a", "abort", tokens=()))
    assert (table.count(), table.late) == (1, 0)


def test_time_in_the_queue_of_a_holder_does_not_count():
    table = table_with("a", "b", "c", limit_s=10.0)
    table.send("abc", "engine", 0.0)
    for name, now in (("a", 8.0), ("b", 16.0)):
        table.arrive("engine", done(name))
        assert table.overdue(now) == ({}, {})
    assert table.overdue(25.0) == ({}, {})
    assert table.overdue(26.5) == ({"engine": ["c"]}, {})


def test_what_came_later_or_elsewhere_gives_no_more_time():
    table = table_with("a", "b", "c", "d", limit_s=10.0)
    table.send("ac", "engine", 0.0)
    table.send("bd", "other", 0.0)
    for name in "cb":
        table.arrive({"c": "engine", "b": "other"}[name], done(name))
    assert table.overdue(8.0) == ({}, {})
    assert table.overdue(10.5) == ({"engine": ["a"]}, {})
    assert table.overdue(18.5) == ({"other": ["d"]}, {})


def test_an_abort_without_effect_is_reported():
    table = table_with("a", limit_s=10.0, grace_s=5.0)
    table.send(["a"], "engine", 0.0)
    table.overdue(11.0)
    assert table.overdue(16.5) == ({}, {"engine": ["a"]})


def test_a_pause_does_not_count():
    table = table_with("a", limit_s=10.0)
    table.send(["a"], "engine", 0.0)
    table.postpone(100.0)
    assert table.overdue(105.0) == ({}, {})
    assert table.overdue(111.0) == ({"engine": ["a"]}, {})


def test_a_foreign_abort_is_sampled_again_and_ours_is_delivered():
    table = table_with("a", "b")
    table.send(["a", "b"], "engine", 0.0)
    table.abort(["b"])
    for name in "ab":
        table.arrive("engine", done(name, "abort"))
    assert taken(table) == [("b", "abort")]
    assert [one.request_id for one in table.held()] == ["a"]


def test_aborting_one_by_one_is_linear():
    def seconds(count):
        table = table_with(*map(str, range(count)))
        table.send(map(str, range(count)), "engine", 0.0)
        began = time.perf_counter()
        for name in range(count):
            table.abort([str(name)])
        return time.perf_counter() - began

    small, large = min(seconds(1000) for _ in range(5)), min(seconds(20_000) for _ in range(3))
    assert large < 20 * small * 6  # n^2 would be 400 times


@given(
    st.lists(st.tuples(st.sampled_from(["send", "arrive", "abort", "release", "late"]), st.integers(0, 7)), max_size=80)
)
def test_every_request_comes_back_exactly_once(steps):
    names = [str(one) for one in range(8)]
    table = table_with(*names, limit_s=1.0)
    back, now = [], 0.0
    for action, number in steps:
        now += 0.4
        holder, name = number % 3, names[number]
        if action == "send":
            table.send([one.request_id for one in table.held()][: number + 1], holder, now)
        elif action == "arrive":
            table.arrive(holder, done(name, "abort" if number % 2 else "stop"))
        elif action == "abort":
            table.abort([name])
        elif action == "release":
            table.release(holder)
        else:
            table.overdue(now)
        back += taken(table)
    for holder in range(3):
        table.release(holder)
    table.send([one.request_id for one in table.held()], "last", now)
    for name in names:
        table.arrive("last", done(name))
    back += taken(table)
    assert sorted(name for name, _ in back) == names
    assert len(table) == 0
