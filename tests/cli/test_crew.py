"""How many processes an elastic run has after losses and trials."""

from types import SimpleNamespace

import pytest

from swift.cli.crew import Crew, can_share, crew_of
from swift.cli.launcher import LaunchPlan
from swift.elastic import Progress
from swift.errors import ConfigError

SAVED, NOTHING = Progress("checkpoint-2", made=1), Progress()
RL = {
    "elastic": True, "num_generations": 4, "sequence_parallel_size": 1, "fsdp": None, "fsdp_replicas": 1,
    "gradient_accumulation_steps": 1, "vllm_mode": None, "vllm_tensor_parallel_size": 1,
}  # fmt: skip
ROWS = {name: value for name, value in RL.items() if name != "num_generations"}


def crew(full=4, sizes=range(1, 9), devices=()):
    return Crew(full, lambda number: number in sizes, devices)


def test_losses_shrink_it_and_a_checkpoint_later_all_are_tried():
    four = crew()
    assert four.survives([1], SAVED) and four.count == 3
    assert four.survives([0], NOTHING) and four.count == 2
    assert not four.is_due(NOTHING) and not four.is_due(Progress("checkpoint-2"))
    assert four.is_due(SAVED)
    four.take_back()
    assert four.count == 4 and not four.is_due(SAVED)


def test_the_end_of_a_run_is_no_time_for_a_trial():
    four = crew()
    four.survives([1], SAVED)
    assert not four.is_due(Progress("checkpoint-9", made=3, ends=True))


def test_failed_trials_are_made_at_ever_greater_distances():
    four = crew()
    four.survives([3], SAVED)
    for wait in (2, 4):
        four.take_back()
        assert four.survives([3], Progress("checkpoint-2")) and (four.count, four.wait) == (3, wait)
        assert not four.is_due(Progress("checkpoint-3", made=wait - 1))
        assert four.is_due(Progress("checkpoint-4", made=wait))
    four.take_back()
    assert four.survives([], Progress("checkpoint-4")) and four.count == 3, "a start that fails by itself counts too"
    four.take_back()
    assert four.survives([0], SAVED) and (four.count, four.wait) == (3, 1)


def test_errors_without_a_loss_and_the_last_process_end_a_run():
    assert not crew().survives([], SAVED)
    two = crew(2)
    assert two.survives([0], NOTHING)
    assert not two.survives([0], NOTHING)
    assert not crew().survives([0, 1, 2, 3], SAVED)


def test_those_that_cannot_share_the_batches_wait_as_a_reserve():
    six = crew(6, sizes=(6, 4, 2), devices=[str(number) for number in range(7)])
    assert "CUDA_VISIBLE_DEVICES" not in six.environment()
    assert six.survives([1], SAVED) and six.count == 4
    assert six.environment()["CUDA_VISIBLE_DEVICES"] == "0,2,3,4,6", "an engine keeps the last one"
    assert six.survives([0], NOTHING) and six.count == 4, "5 takes the place of 0"
    assert six.environment() == {"SWIFT_BATCH_PROCESSES": "6", "CUDA_VISIBLE_DEVICES": "2,3,4,5,6"}
    six.take_back()
    assert "CUDA_VISIBLE_DEVICES" not in six.environment()


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (RL, [1, 2, 3]),
        ({**RL, "sequence_parallel_size": 2}, [2]),
        ({**RL, "fsdp": "full_shard", "fsdp_replicas": 2}, []),
        ({**RL, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}, [2]),
        ({**RL, "vllm_mode": "dedicated", "vllm_tensor_parallel_size": 2}, [1, 2, 3]),
        (ROWS, [1, 2]),
        ({**ROWS, "gradient_accumulation_steps": 3}, [1, 2, 3]),
    ],
)
def test_numbers_that_can_share_the_batches_of_four(settings, sizes):
    args = SimpleNamespace(**settings)
    assert [number for number in range(1, 4) if can_share(args, 4, number)] == sizes


@pytest.mark.parametrize(
    ("settings", "plan", "devices", "line"),
    [
        ({}, LaunchPlan(2, num_nodes=2), [], "--elastic: true: NNODES=2: the launcher of a node does not know"),
        ({"sequence_parallel_size": 4}, LaunchPlan(4), [], "--elastic: true: fewer than 4 processes cannot share"),
        ({"vllm_device": ["cuda:7"]}, LaunchPlan(4), ["0"], "--elastic: true: --vllm_device cuda:7: other devices"),
    ],
)
def test_a_launch_that_no_process_can_leave_is_one_line(settings, plan, devices, line):
    with pytest.raises(ConfigError) as caught:
        crew_of(SimpleNamespace(**{**RL, **settings}), plan, devices)
    assert caught.value.problems[0].startswith(line)


def test_without_the_setting_or_a_launch_there_is_no_crew():
    assert crew_of(SimpleNamespace(**{**RL, "elastic": False}), LaunchPlan(4)) is None
    assert crew_of(SimpleNamespace(**RL), None) is None
