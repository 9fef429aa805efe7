"""Engines that are refused before they are made, and what happens to a rank whose engine cannot be made."""

from types import SimpleNamespace

import pytest

from swift.arguments import parse
from swift.errors import ConfigError
from swift.rollout.engines.base import Capabilities
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


@pytest.mark.parametrize("local", [{"LOCAL_WORLD_SIZE": "8"}, {}])
@pytest.mark.parametrize("mode", ["--vllm_mode colocate --use_vllm true", ""])
def test_a_process_to_which_a_scheduler_shows_one_gpu_is_a_machine_of_its_own(monkeypatch, mode, local):
    """As `srun --gpus-per-task=1` does, of eight processes on each of two nodes."""
    words = f"--rlhf_type grpo --model m --reward_funcs format --dataset d.jsonl {mode}"
    args = parse("rlhf", words.split(), {}).args
    monkeypatch.setattr(engines, "count_accelerators", lambda: (1, "cuda"))
    for name, value in {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", **local}.items():
        monkeypatch.setenv(name, value)
    placement = engines.find_placement(args)
    assert placement.trainer_devices == ("cuda:0",)
    built = []
    monkeypatch.setattr(engines, "_build_here", built.append)
    setup = engines.EngineSetup(None, None, placement)
    ranks = SimpleNamespace(rank=11, world_size=16, is_main=False)
    engines._make(setup, args, ranks, EngineSpec(backend="vllm", model="m"))
    assert bool(built) == bool(mode)
    if mode:
        assert [spec.devices for spec in built] == [("cuda:0",)]
        assert (setup.share.index, setup.share.count) == (11, 16)


@pytest.mark.parametrize("cluster", ["--ray_address", "NNODES"])
def test_lmdeploy_is_refused_in_a_ray_cluster(monkeypatch, cluster):
    """Its own engine would wait for the devices that the actor around it holds."""
    words = (
        "--rlhf_type grpo --model m --reward_funcs format --dataset d.jsonl --use_lmdeploy true --vllm_mode dedicated"
    )
    monkeypatch.setattr(engines, "count_accelerators", lambda: (2, "cuda"))
    args = parse("rlhf", words.split(), {}).args
    assert engines.find_placement(args, local_ranks=1).mode == "dedicated"
    if cluster == "NNODES":
        monkeypatch.setenv("NNODES", "2")
    else:
        args.ray_address = "auto"
    with pytest.raises(ConfigError, match="--use_lmdeploy: true: in a Ray cluster"):
        engines.find_placement(args, local_ranks=1)


@pytest.mark.parametrize(
    ("mode", "slow", "exact"),
    [
        ("dedicated", True, False),
        ("server", True, False),
        ("colocate", True, True),
        ("dedicated", False, True),
    ],
)
def test_only_engines_of_their_own_that_seeds_slow_down_sample_without_them_unless_told(mode, slow, exact):
    can = Capabilities("vllm", "full", shares_weights=False, max_model_len=8, seeds_are_slow=slow)
    setup = SimpleNamespace(engine=SimpleNamespace(capabilities=can), placement=SimpleNamespace(mode=mode))
    assert engines.exact_samples(None, setup) is exact
    assert [engines.exact_samples(given, setup) for given in (True, False)] == [True, False]


@pytest.mark.parametrize("scope", ["per_round", "total"])
def test_several_turns_end_at_the_limit_of_the_run(nano_folders, scope):
    words = f"--rlhf_type grpo --model {nano_folders['qwen2']} --reward_funcs format --dataset d.jsonl"
    words += f" --max_model_len 200 --max_completion_length 32 --completion_length_limit_scope {scope}"
    args = parse("rlhf", words.split(), {}).args
    placement = SimpleNamespace(mode="colocate", tensor_parallel_size=1, sleep_level=0)
    template = SimpleNamespace(stop_token_ids=[1], vision=None)
    parts = SimpleNamespace(args=args, placement=placement, play=object(), template=template)
    assert engines._engine_spec(parts).max_model_len == 200
