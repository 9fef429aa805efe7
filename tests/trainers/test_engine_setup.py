"""What happens to a rank whose engine cannot be made."""

import pytest

from swift.errors import ConfigError
from swift.rollout.engines.spec import EngineSpec
from swift.trainers import engines


@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_that_others_wait_for_in_their_engines_start_ends_at_once(monkeypatch, shared):
    ended = []
    monkeypatch.setattr(engines, "end_process", ended.append)
    spec = EngineSpec(backend="no such thing", model="m", in_ranks=shared)
    with pytest.raises(ConfigError, match="no such thing"):
        engines._build_here(spec)
    assert len(ended) == shared
    assert all("no such thing" in str(error) for error in ended)
