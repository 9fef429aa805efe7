"""A run that stands still in its own process ends with code 4 and names the rank and the phase."""

import json
import time

import pytest
from cli_runs import assert_gone, error_lines

pytestmark = pytest.mark.slow

FREEZE = '''
import sys

def freeze(owner, name, begun):
    """From the second optimizer step on this never returns; `begun` is called once in each."""
    proper, begin = getattr(owner, name), getattr(owner, begun)
    steps = []

    def counted(self, *args, **kwargs):
        steps.append(1)
        return begin(self, *args, **kwargs)

    def frozen(self, *args, **kwargs):
        step = self.progress.global_step if name == "_sample" else len(steps) - 1
        while step >= 1:
            stand_still()
        return proper(self, *args, **kwargs)

    setattr(owner, begun, counted)
    setattr(owner, name, frozen)


def stand_still():
    time.sleep(1)


where, _, rank = os.environ["FREEZE"].partition(":")
if "swift.trainers.grpo.run" in sys.modules and rank == os.environ.get("RANK", "0"):
    from swift.rollout.round import Round
    from swift.trainers.grpo.step import GlobalBatchStep

    freeze(*{"generate": (Round, "_sample", "_sample"), "train": (GlobalBatchStep, "_micro_batches", "run")}[where])
'''


@pytest.fixture
def frozen(cli, tmp_path):
    """Runs a command whose rank stands still in a phase; exit code, error lines, folder, seconds."""
    plugin = tmp_path / "frozen_plugin.py"
    plugin.write_text((cli.material / "odd_plugin.py").read_text() + FREEZE)

    def run(where, *, world_size=1, **flags):
        run = cli.start(
            "run",
            variables={"FREEZE": where, "NPROC_PER_NODE": world_size},
            external_plugins=plugin,
            max_steps=4,
            save_steps=1,
            stall_timeout=6,
            reward_timeout=3,
            **flags,
        )
        run.until(lambda: run.step >= 1)
        began, family = time.monotonic(), run.family()
        code, _, err = run.wait()
        took = time.monotonic() - began
        assert_gone(family)
        return code, error_lines(err), run.folder, took

    return run


@pytest.mark.long
@pytest.mark.parametrize("phase", [pytest.param("generate", marks=pytest.mark.long), "train"])
def test_a_process_that_stands_still_ends_and_leaves_its_stacks(frozen, phase):
    code, (line,), folder, took = frozen(f"{phase}:0")
    assert code == 4
    assert took < 60
    assert line.startswith(f"swift: error: --stall_timeout: 6: rank 0 made no progress for 6 s in phase {phase}: ")
    assert "its main thread is in stand_still (frozen_plugin.py:" in line
    log = (folder / "logs" / "attempt-1" / "rank-0.log").read_text()
    assert "stand_still" in log
    assert "Current thread" in log
    checkpoint = json.loads((folder / "checkpoint-1" / "trainer_state.json").read_text())
    assert checkpoint["global_step"] == 1


@pytest.mark.long
def test_the_rank_that_waits_is_not_the_one_that_is_named(frozen):
    code, lines, folder, _ = frozen("generate:1", world_size=2, per_device_train_batch_size=2)
    assert code == 4
    assert lines[0].startswith("swift: error: --stall_timeout: 6: rank 1 made no progress for 6 s in phase generate: ")
    assert "rank 0" not in lines[0]
    assert "stand_still" in (folder / "logs" / "attempt-1" / "rank-1.log").read_text()
