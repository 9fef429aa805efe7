import pytest
from scripted_engine import ScriptedEngine
from small_runs import SlowScorer, SmallRun


@pytest.fixture
def run(request):
    """Makes small runs and ends them; defaults: SETTINGS of the module, with `equal` and `delay` of the scorer."""
    made = []

    def make(engine=None, *, delay=lambda: 0.0, **settings):
        settings = {**getattr(request.module, "SETTINGS", {}), **settings}
        equal = settings.pop("equal", lambda group: False)
        scorer = settings.pop("scorer", None) or SlowScorer(delay=delay, equal=equal)
        made.append(SmallRun(engine or ScriptedEngine(), scorer=scorer, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert getattr(one.engine, "overlaps", []) == [], "two threads were in the engine at the same time"
