"""How often a server starts again."""

import time

from swift.rollout.server.process import STARTS, may_start_again


def test_a_clock_that_jumps_does_not_allow_more_restarts(monkeypatch):
    monkeypatch.setenv(STARTS, "")
    assert may_start_again(1)
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert not may_start_again(1)
