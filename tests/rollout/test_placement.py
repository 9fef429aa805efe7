"""Which mode and which devices, for given numbers: no device and no process is needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift.errors import ConfigError
from swift.rollout.placement import OWN_SERVER, PlacementRequest, describe, place, server_urls


def placed(**settings):
    return place(PlacementRequest(use_vllm=settings.pop("use_vllm", True), **settings))


def problem_of(**settings):
    with pytest.raises(ConfigError) as caught:
        placed(**settings)
    assert len(caught.value.problems) == 1, caught.value.problems
    return caught.value.problems[0]


@pytest.mark.parametrize(
    ("settings", "mode", "trainers", "engines"),
    [
        ({"use_vllm": False, "accelerators": 2, "local_ranks": 2}, "in_process", ["cuda:0", "cuda:1"], []),
        ({"accelerators": 2, "local_ranks": 2}, "colocate", ["cuda:0", "cuda:1"], [["cuda:0"], ["cuda:1"]]),
        ({"accelerators": 3, "local_ranks": 2}, "dedicated", ["cuda:0", "cuda:1"], [["cuda:2"]]),
        ({"cores": [0, 1]}, "colocate", ["cpu:0"], [["cpu:0"]]),
        ({"cores": [0, 1], "async_generate": True}, "dedicated", ["cpu:0"], [["cpu:1"]]),
        ({"cores": [0, 1], "vllm_mode": "dedicated"}, "dedicated", ["cpu:0"], [["cpu:1"]]),
        (
            {"accelerators": 4, "local_ranks": 2, "num_infer_workers": 2, "tensor_parallel_size": 2},
            "dedicated", ["cuda:0", "cuda:1"], [["cuda:2", "cuda:3"]],
        ),
        (
            {"accelerators": 2, "local_ranks": 2, "tensor_parallel_size": 2},
            "colocate", ["cuda:0", "cuda:1"], [["cuda:0", "cuda:1"]],
        ),
    ],
)  # fmt: skip
def test_the_mode_follows_from_the_numbers(settings, mode, trainers, engines):
    made = placed(**settings)
    assert (made.mode, list(made.trainer_devices), list(map(list, made.engines))) == (mode, trainers, engines)


def test_a_server_comes_first_and_ignores_workers_and_devices_with_a_note():
    made = placed(accelerators=8, local_ranks=8, servers=["http://a:8000"], num_infer_workers=3, vllm_device=["cuda:1"])
    assert (made.mode, made.engines, made.servers) == ("server", (), ("http://a:8000",))
    assert [note.partition(":")[0] for note in made.notes] == ["--num_infer_workers", "--vllm_device"]


def test_a_server_of_this_run_takes_devices():
    made = placed(accelerators=2, servers=[OWN_SERVER], vllm_device=["cuda:1"])
    assert (made.mode, made.notes) == ("server", ())


def test_numbers_that_fit_no_mode_list_every_valid_choice():
    assert problem_of(accelerators=8, local_ranks=8, num_infer_workers=1) == (
        "placement: devices=8 NPROC_PER_NODE=8 num_infer_workers=1: no mode fits; "
        "valid: --num_infer_workers 8 (colocate); NPROC_PER_NODE=7 --num_infer_workers 1 (dedicated); "
        "--vllm_server_host"
    )


@given(st.integers(1, 9), st.integers(1, 9), st.none() | st.integers(1, 9))
def test_every_choice_of_the_message_fits(devices, ranks, workers):
    ranks = min(ranks, devices)
    try:
        made = placed(accelerators=devices, local_ranks=ranks, num_infer_workers=workers)
    except ConfigError as error:
        _, _, choices = error.problems[0].partition("valid: ")
        for choice in choices.split("; ")[:-1]:
            words = choice.replace("=", " ").split()
            numbers = dict(zip(words[:-1:2], words[1:-1:2], strict=True))
            made = placed(
                accelerators=devices,
                local_ranks=int(numbers.get("NPROC_PER_NODE", ranks)),
                num_infer_workers=int(numbers["--num_infer_workers"]),
            )
            assert f"({made.mode})" == words[-1]
    else:
        assert made.mode in ("colocate", "dedicated")


def test_cpu_devices_groups_the_cores():
    made = placed(cores=range(8), cpu_devices=3, local_ranks=2)
    assert made.cores == ((0, 1), (2, 3, 4), (5, 6, 7))
    assert made.mode == "dedicated"


def test_too_few_cores_overlap_with_one_warning():
    made = placed(cores=[4, 5], cpu_devices=3, local_ranks=2)
    assert made.cores == ((4,), (5,), (4,))
    assert [note for note in made.notes if note.startswith("warning")] == [
        "warning: 2 CPU cores for 3 devices: some devices share a core"
    ]


def test_explicit_devices_may_leave_spares_which_a_warning_names():
    made = placed(accelerators=4, local_ranks=1, vllm_mode="dedicated", vllm_device=["cuda:2"])
    assert made.spare_devices == ("cuda:1", "cuda:3")
    assert "cuda:1, cuda:3: unused" in made.notes[0]


def test_sleeping_acts_in_colocate_only():
    assert placed(accelerators=1, sleep_level=1).sleep_level == 1
    made = placed(accelerators=2, local_ranks=1, sleep_level=1)
    assert made.sleep_level == 0
    assert made.notes == ("--sleep_level: 1: acts in colocate mode only; 0 in dedicated mode",)
    assert placed(accelerators=1, offloads=["offload_model"]).notes == ()
    made = placed(accelerators=2, local_ranks=1, offloads=["offload_model", "offload_optimizer"])
    said = "--offload_model, --offload_optimizer: true: acts in colocate mode only; without effect in dedicated mode"
    assert made.notes == (said,)


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"accelerators": 2, "local_ranks": 3}, "NPROC_PER_NODE: 3: more than 2 visible cuda devices"),
        (
            {"accelerators": 8, "local_ranks": 7, "vllm_device": ["cuda:9"]},
            "--vllm_device: cuda:9: no such device; valid: cuda:0..7",
        ),
        ({"accelerators": 8, "local_ranks": 7, "vllm_device": ["cuda:0"]}, "cuda:0 belongs to a training process"),
        ({"accelerators": 8, "local_ranks": 7, "vllm_device": ["cuda:6", "cuda:7"]}, "2 devices for num_infer_workers"),
        ({"accelerators": 4, "num_infer_workers": 2, "local_ranks": 2, "vllm_device": ["cuda:3"] * 2}, "named twice"),
        ({"accelerators": 2, "local_ranks": 2, "vllm_device": ["cuda:1", "cuda:0"]}, "its own device"),
        (
            {"accelerators": 8, "local_ranks": 8, "vllm_mode": "colocate", "num_infer_workers": 1},
            "--num_infer_workers: 1: colocate has one per training process; leave it out, or 8",
        ),
        (
            {"accelerators": 8, "local_ranks": 8, "vllm_mode": "dedicated", "num_infer_workers": 1},
            "need 9, 8 given; NPROC_PER_NODE=7",
        ),
        ({"accelerators": 8, "vllm_mode": "server"}, "no address; give --vllm_server_host"),
        ({"accelerators": 1, "vllm_mode": "colocate", "servers": ["http://a"]}, "a server address is given too"),
        (
            {"accelerators": 4, "local_ranks": 4, "tensor_parallel_size": 3},
            "--vllm_tensor_parallel_size: 3: does not divide NPROC_PER_NODE=4 (colocate); valid: 1, 2, 4",
        ),
        (
            {"accelerators": 4, "local_ranks": 4, "tensor_parallel_size": 4, "num_attention_heads": 14},
            "does not divide the 14 attention heads",
        ),
        ({"accelerators": 2, "local_ranks": 2, "servers": [OWN_SERVER]}, "need 3 devices, 2 given; NPROC_PER_NODE=1"),
        ({"accelerators": 1, "servers": [OWN_SERVER]}, "need 2 devices, 1 given; at least 2 devices, or --vllm_server"),
        ({"accelerators": 2, "servers": [OWN_SERVER], "vllm_device": ["cuda:0"]}, "cuda:0 belongs to a training"),
        ({"accelerators": 1, "async_generate": True}, "--async_generate: true: generation shares the device"),
        ({"accelerators": 1, "prefetch_given": True}, "--prefetch_depth: given: nothing is generated ahead"),
    ],
)
def test_a_contradiction_is_one_line(settings, fragment):
    assert fragment in problem_of(**settings)


def test_the_description_names_mode_and_devices_in_one_line():
    line = describe(placed(accelerators=8, local_ranks=7))
    assert line == "placement: dedicated; 7 training processes on cuda:0..6; 1 engine on cuda:7"
    assert "\n" not in describe(placed(cores=range(4), cpu_devices=2, local_ranks=2))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_dedicated_devices_are_disjoint(ranks, workers, spare):
    made = placed(
        accelerators=ranks + workers + spare, local_ranks=ranks, num_infer_workers=workers, vllm_mode="dedicated"
    )
    engines = {name for engine in made.engines for name in engine}
    assert len(engines) == workers
    assert not engines & set(made.trainer_devices)
    assert len(made.spare_devices) == spare


def test_hosts_share_a_port_or_have_their_own():
    assert server_urls([], ["a", "b"], [8000]) == ["http://a:8000", "http://b:8000"]
    assert server_urls([], ["::1", "10.0.0.1"], [8000]) == ["http://[::1]:8000", "http://10.0.0.1:8000"]
    assert server_urls([], ["a", "b"], [1, 2]) == ["http://a:1", "http://b:2"]
    assert server_urls(["https://x/v1"], ["a"], [8000]) == ["https://x/v1"]
    assert server_urls([], [], [8000]) == []
    with pytest.raises(ConfigError, match="2 ports for 3 hosts"):
        server_urls([], ["a", "b", "c"], [1, 2])
    for wrong in ("10.0.0.1:8000", "me:hunter2@host", "http://x", "x/v1", "", "::g"):
        with pytest.raises(ConfigError, match="not the name or address of a machine; its port is --vllm_server_port"):
            server_urls([], ["a", wrong], [8000])
    for wrong in ("10.0.0.1:8000", "nonsense", "ftp://x", "http://", "http://x:99999", "http://x:y", "http://[x"):
        with pytest.raises(ConfigError, match="not the URL of a server; give one such as http://"):
            server_urls(["http://a:1", wrong], [], [8000])
