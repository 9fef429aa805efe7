import pytest
from scripted_engine import ScriptedEngine
from small_runs import SlowScorer, SmallRun
from trajectories import LIMITS, Once


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


@pytest.fixture(scope="module")
def policy(nano_folders):
    """A model, and its template."""
    from oracle import load

    from swift.models.arguments import CheckpointArguments
    from swift.models.tokenizer import load_chat

    folder = nano_folders["qwen2"]
    return load(folder), load_chat(CheckpointArguments(model=str(folder)))


@pytest.fixture(scope="module")
def template(policy):
    return policy[1]


@pytest.fixture
def source_for(template, nano_folders):
    """Makes a source of trajectories; no token ends an answer."""
    from oracle import load

    from swift.rollout.engines.transformers import TransformersEngine
    from swift.rollout.sources.multi_turn.source import TrajectorySource

    model = load(nano_folders["qwen2"])
    made = []
    Once.closed = Once.asleep = 0

    def make(play, limits=LIMITS, name="--gym_env: mine", limit_s=600.0):
        inner = TransformersEngine(model, eos_token_ids=(), tokenizer=template.tokenizer)
        made.append(TrajectorySource(inner, template, limits, play, name, limit_s))
        return made[-1]

    yield make
    for one in made:
        one.close()
