"""NeMo Gym: how its servers are found, what is sent to them, what becomes of their answers, and their faults."""

import asyncio
import json
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import trajectories
import yaml
from nemo_gym_servers import FAULTS, RUN_FAULTS, NemoGym, at_random, odd_share
from sources import on_a_loop, sampled

from swift.data.columns import ColumnPlan
from swift.data.records import RowError
from swift.errors import ConfigError, EngineError, ResourceError
from swift.rollout.batches import BatchConfig, BatchMaker, round_metrics
from swift.rollout.child import Child
from swift.rollout.engines import replies
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.exclusions import BATCHES, ExclusionLimit, reasons_of
from swift.rollout.round_result import fault
from swift.rollout.sources.multi_turn.source import TrajectorySource
from swift.rollout.sources.multi_turn.trajectory import Limits
from swift.rollout.sources.nemo_gym import gym as play
from swift.rollout.sources.nemo_gym import servers as discovery
from swift.rollout.sources.nemo_gym.servers import find_servers, read_config
from swift.types import Completion, Episode, GroupScores, Prompt, RolloutGroup

ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "How many?"}], "user": None},
    "expected": {"value": 7, "unit": None},
    "agent_ref": {"type": "responses_api_agents", "name": "odd_agent"},
    "hints": [{"text": "count", "source": None}],
    "absent": None,
}


@pytest.fixture
def gym():
    with NemoGym() as one:
        yield one


@pytest.fixture
def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(play, "RETRY_S", 0.01)
    monkeypatch.setattr(discovery, "POLL_S", 0.05)


@pytest.fixture
def source_for(policy):
    """Makes a source whose trajectories NeMo Gym plays; no token ends an answer."""
    made = []

    def make(gym, mode="verify", limit_s=2.0, on_prefix_break="exclude", reward_names=(), inner=None, **more):
        model, template = policy
        inner = inner or TransformersEngine(model, eos_token_ids=(), tokenizer=template.tokenizer)
        kind = "resources" if mode == "verify" else "agents"
        player = play.NemoGym(mode, None, limit_s, "policy", reward_names, find_servers(gym.url, kind=kind, limit_s=5))
        player.attach(inner, model.config.vocab_size)
        limits = Limits(9, "per_round", 2000, on_prefix_break)
        made.append(TrajectorySource(inner, template, limits, player, "--rollout_source: nemo_gym"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def requests(template, count=4, row=ROW):
    return trajectories.requests(template, count, **row)


def rewards(done):
    return [sum(one.episode.rewards) if fault(one) is None else None for one in done]


def first_call_only(name):
    """A fault of whatever is called first, and of that call's second try."""
    seen = []

    def fault_of(body):
        key = json.dumps(body, sort_keys=True)
        seen.append(key)
        return name if key == seen[0] else None

    return fault_of


# --- finding its servers --------------------------------------------------------------------------------------


def test_servers_are_found_by_name_agent_and_alone():
    agent = {"host": "10.0.0.9", "port": "81", "resources_server": {"name": "math"}}
    config = {
        "math": {"resources_servers": {"math": {"host": "0.0.0.0", "port": 80}, "no_port": {"host": "x"}}},
        "solver": {"responses_api_agents": {"simple_agent": agent}},
        "other": 3,
    }
    found = read_config(json.dumps(yaml.safe_dump(config)), "http://127.0.0.1:11000")
    assert found.agents == {"solver": "http://10.0.0.9:81"}
    for names in (["math"], ["solver"], [None], ["absent_agent", "math"]):
        assert found.url("resources", *names) == "http://127.0.0.1:80"
    assert read_config(json.dumps(yaml.safe_dump(config)), "http://head:1").url("resources", "math") == "http://head:80"
    with pytest.raises(ConfigError, match="--nemo_gym_agent: solve: no agents of that name; nearest: solver"):
        found.url("agents", "solve")
    config["code"] = {"resources_servers": {"code": {"port": 90}}}
    with pytest.raises(ConfigError, match=r"--nemo_gym_agent: none: rows name none in agent_ref; .*code, math"):
        read_config(json.dumps(yaml.safe_dump(config)), "http://head:1").url("resources", None)


def test_a_head_server_that_is_not_there_is_named(unused_port):
    with pytest.raises(EngineError, match=f"--nemo_gym_head: {unused_port}: no head server of NeMo Gym answers"):
        find_servers(str(unused_port), kind="agents", limit_s=5)


def test_something_else_at_its_address_is_no_head_server(gym, monkeypatch):
    monkeypatch.setattr(gym, "config", lambda: "no config")
    with pytest.raises(EngineError, match="its config is no map"):
        find_servers(gym.url, kind="agents", limit_s=5)
    monkeypatch.setattr(gym, "config", dict)
    with pytest.raises(EngineError, match="runs no agents there"):
        find_servers(gym.url, kind="agents", limit_s=5)


@pytest.mark.parametrize("port", ["none", "1/x@", -5, 70000, [1]], ids=str)
def test_a_port_that_is_none_is_named(gym, monkeypatch, port):
    monkeypatch.setattr(gym, "config", lambda: {"odd": {"resources_servers": {"odd": {"port": port}}}})
    with pytest.raises(EngineError, match="no address of a server") as found:
        find_servers(gym.url, kind="resources", limit_s=1)
    assert len(found.value.problems) == 1


def test_a_server_that_does_not_answer_is_waited_for_and_named(gym, monkeypatch, unused_port):
    late = {"late": {"resources_servers": {"late": {"port": unused_port}}}}
    monkeypatch.setattr(gym, "config", lambda: late)
    with pytest.raises(EngineError, match=f"late at http://127.0.0.1:{unused_port} does not answer within 0.3 s"):
        find_servers(gym.url, kind="resources", limit_s=0.3)


# --- rows -----------------------------------------------------------------------------------------------------


def read_row(**params):
    row = {"responses_create_params": params, "question": "an environment's", "prompt": "another's"}
    return ColumnPlan(list(row), {}, flag="--dataset", name="d").read(row, None)


def test_a_row_is_a_prompt_and_all_of_it_reaches_the_environment():
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True, "description": None}
    messages, columns = read_row(
        input=[
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": [{"type": "input_text", "text": "Count "}, {"text": "well."}]},
            {"role": "user", "content": "How many?", "type": "message"},
            {"type": "function_call", "name": "look", "arguments": '{"at": 1}', "call_id": "c"},
            {"type": "function_call_output", "output": "seven", "call_id": "c"},
            {"type": "reasoning", "summary": []},
            {"role": "assistant", "content": "Seven."},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "I look."},
            {"type": "function_call", "name": "look", "arguments": '{"at": 2}', "call_id": "d"},
            {"type": "function_call", "name": "look", "arguments": '{"at": 3}', "call_id": "e"},
            {"type": "function_call_output", "output": "seven", "call_id": "d"},
            {"type": "function_call_output", "output": "eight", "call_id": "e"},
        ],
        tools=[tool],
    )
    roles = ["system", "developer", "user", "assistant", "tool", "assistant", "user", "assistant", "tool", "tool"]
    assert [one["role"] for one in messages] == roles
    assert [one["content"] for one in messages[:2]] == ["Be brief.", "Count well."]
    assert messages[3]["tool_calls"] == [{"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}]
    assert messages[7]["content"] == "I look."
    assert [one["function"]["arguments"]["at"] for one in messages[7]["tool_calls"]] == [2, 3]
    assert columns["tools"] == [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    assert columns["question"] == "an environment's"
    assert columns["responses_create_params"]["tools"] == [tool]


def test_a_text_is_a_prompt():
    assert read_row(input="How many?")[0] == [{"role": "user", "content": "How many?"}]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"input": []},
        {"input": ["a"]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": [{"role": "robot", "content": "a"}]},
        {"input": [{"role": ["user"], "content": "a"}] * 2},
        {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"input": "a", "tools": ["b"]},
    ],
    ids=str,
)
def test_a_row_that_is_no_request_is_bad(wrong):
    with pytest.raises(RowError):
        read_row(**wrong)


# --- verify ---------------------------------------------------------------------------------------------------


def test_each_completion_is_verified_with_its_row(template, gym, source_for):
    gym.components = {"style": 0.5, "of_another_environment": None}
    wanted = requests(template)
    alone = {one.request_id: one for one in source_for(gym).engine.sample(wanted)}
    done = sampled(source_for(gym), wanted)
    assert [one.token_ids for one in done] == [alone[one.request_id].token_ids for one in wanted]
    assert rewards(done) == [odd_share(one.text) for one in done]
    assert sorted({path for path, _ in gym.calls}) == ["/verify"]
    body = gym.calls[0][1]
    assert body["expected"] == {"value": 7}
    assert body["hints"] == [{"text": "count"}]
    assert body["responses_create_params"] == {"input": ROW["responses_create_params"]["input"]}
    assert "absent" not in body
    for one in done:
        one.episode.metrics.pop("nemo_gym/verify_s")
        assert one.episode.metrics == {
            "rewards/style/mean": 0.5,
            "rollout/history_rewritten": 0,
            "rollout/out_of_turns": 0,
        }


@pytest.mark.parametrize(
    ("mode", "name", "reason"),
    [("verify", *one) for one in FAULTS.items()] + [("run", *one) for one in {**FAULTS, **RUN_FAULTS}.items()],
)
def test_a_fault_leaves_its_sample_out_and_no_other(template, gym, source_for, monkeypatch, mode, name, reason):
    monkeypatch.setattr(replies, "REPLY_BYTES", 4 << 20)
    gym.canned, gym.fault_of = canned(template), first_call_only(name)
    if mode == "run":  # the runs of a row are equal calls; the seventh is the other try
        numbers = iter(range(10**6))
        gym.fault_of = lambda body: name if next(numbers) in (0, 6) else None
    began = time.monotonic()
    done = sampled(source_for(gym, mode, limit_s=1.0), requests(template, 6))
    assert time.monotonic() - began < 5
    faults = [fault(one) for one in done]
    assert faults.count(None) == (6 if reason is None else 5), faults
    assert reason is None or f"environment: {reason}" in faults
    assert all(
        one.episode.rewards == [odd_share(one.text)] for one, why in zip(done, faults, strict=True) if why is None
    )
    left_out = GroupScores([[reward] for reward in rewards(done)], faults)
    group = RolloutGroup("p-0", 0, 0, requests(template)[0].prompt, done, left_out)
    metrics = round_metrics_of(group)
    known = [odd_share(one.text) for one, why in zip(done, faults, strict=True) if why is None]
    assert metrics["reward"] == pytest.approx(sum(known) / len(known), rel=1e-12)
    assert metrics["health/excluded_samples"] == (reason is not None)
    assert reason is None or metrics[f"health/excluded/{reason}"] == 1


def round_metrics_of(group):
    shape = {"generation_batches": 1, "num_global_batches": 1, "num_iterations": 1, "reward_weights": [1.0]}
    maker = BatchMaker(BatchConfig(num_generations=len(group.completions), **shape))
    return round_metrics([group], maker.advantages([group]))


@pytest.mark.parametrize("mode", ["verify", "run"])
def test_with_faults_in_a_fifth_of_the_calls_the_other_rewards_are_the_same(template, gym, source_for, mode):
    gym.canned = canned(template)
    wanted = requests(template, 40)
    clean = rewards(sampled(source_for(gym, mode), wanted))
    bad = [name for name, reason in {**FAULTS, **(RUN_FAULTS if mode == "run" else {})}.items() if reason]
    gym.fault_of = at_random(0.2, bad) if mode == "verify" else every_fifth(bad)
    faulty = rewards(sampled(source_for(gym, mode, limit_s=1.0), wanted))
    assert 2 <= faulty.count(None) <= 16
    assert all(one in (None, other) for one, other in zip(faulty, clean, strict=True))


def every_fifth(faults):
    """Runs of one row are equal calls: by their number instead."""
    count = iter(range(10**6))
    return lambda body: faults[(number // 5) % len(faults)] if (number := next(count)) % 5 == 0 else None


def test_calls_are_bounded(template, gym, source_for, monkeypatch):
    monkeypatch.setitem(play.CALLS, "verify", (3, 9))
    gym.fault_of = lambda body: "slow"
    source = source_for(gym, limit_s=5)
    source.limit_s = 1.2  # the last calls begin then
    assert None not in rewards(sampled(source, requests(template, 15)))
    assert gym.most_at_once == 3


def test_a_call_has_a_limit_of_its_own(template, gym, source_for):
    gym.canned, gym.fault_of = canned(template), lambda body: "slow"
    source = source_for(gym, "run", limit_s=5)
    source.limit_s = 0.2  # --rollout_timeout, less than a call takes
    assert rewards(sampled(source, requests(template, 2))) == [odd_share("canned")] * 2


def test_a_slow_host_keeps_no_other_one_waiting(template, gym, source_for, monkeypatch):
    monkeypatch.setitem(play.CALLS, "verify", (1, 2))
    gym.fault_of = lambda body: "slow"
    source = source_for(gym)
    with NemoGym() as quick:
        source.play.servers.resources["quick"] = quick.url
        slow = requests(template, 3)
        [one] = requests(template, 1, {**ROW, "agent_ref": {"name": "quick"}})
        one = replace(one, request_id="quick")

        async def first():
            tasks = [asyncio.create_task(source.generate(request)) for request in [*slow, one]]
            done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in left:
                task.cancel()
            return [task.result().request_id for task in done]

        assert on_a_loop(first) == ["quick"]


def test_a_component_with_the_name_of_a_reward_function_ends_the_run(template, gym, source_for):
    gym.components = {"accuracy": 1.0}
    with pytest.raises(ConfigError, match="--reward_funcs: accuracy: NeMo Gym gives a reward component of that name"):
        sampled(source_for(gym, reward_names=["environment", "accuracy"]), requests(template))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**ROW, "agent_ref": {"name": "even"}}, "--nemo_gym_agent: even: no resources of that name"),
        ({"solution": "7"}, "--dataset: a row has no responses_create_params"),
    ],
)
def test_a_row_that_cannot_be_sent_ends_the_run(template, gym, source_for, row, said):
    with pytest.raises(ConfigError, match=said):
        sampled(source_for(gym), requests(template, row=row))


# --- run ------------------------------------------------------------------------------------------------------


def canned(template):
    """Two calls of a policy: (prompt ids, token ids, log-probs)."""
    prompt, first, result, second = [[1, 2, 3], [11, 12], [5, 6, 7], [13, 14, 15]]
    return (prompt, first, [-0.5, -0.25]), ([*prompt, *first, *result], second, [-1.0, -2.0, 0.0])


def test_the_calls_of_an_agent_become_one_sample(template, gym, source_for):
    gym.canned = canned(template)
    source = source_for(gym, "run")
    source.play.versions_of = lambda keys: [[(3, 0, len(ids))] if ids == [11, 12] else None for _, ids, _ in keys]
    row = {**ROW, "responses_create_params": {"input": "Count.", "max_output_tokens": 4}}
    [done] = sampled(source, requests(template, 1, row))
    assert (done.token_ids, done.mask) == ([11, 12, 5, 6, 7, 13, 14, 15], [1, 1, 0, 0, 0, 1, 1, 1])
    assert done.logprobs == [-0.5, -0.25, 0, 0, 0, -1.0, -2.0, 0.0]
    assert (done.versions, done.finish_reason, done.text) == ([(3, 0, 2)], "length", "canned")
    assert (done.episode.prompt_ids, done.episode.num_turns) == ([1, 2, 3], 2)
    assert [one["role"] for one in done.episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert rewards([done]) == [odd_share("canned")]
    [(path, body)] = gym.calls
    assert path == "/run"
    params = {"input": "Count.", "max_output_tokens": 4, "temperature": 0.8, "top_p": 1.0}
    assert body["responses_create_params"] == params
    assert body["expected"] == {"value": 7}


def test_a_broken_prefix_can_end_a_sample_before_it(template, gym, source_for):
    gym.canned, gym.fault_of = canned(template), lambda body: "prefix_break"
    [done] = sampled(source_for(gym, "run", on_prefix_break="truncate"), requests(template, 1))
    assert (done.token_ids, done.mask, fault(done)) == ([11, 12], [], None)
    assert done.episode.metrics["rollout/history_rewritten"] == 1
    assert rewards([done]) == [odd_share("canned")]


# --- too many of them -----------------------------------------------------------------------------------------


def batch(reasons):
    scores = GroupScores([[None if why else 1.0] for why in reasons], list(reasons))
    episode = Episode([], 0, 1)
    done = [Completion(f"g/{i}", [1], [-1.0], "stop", episode=episode) for i in range(len(reasons))]
    return [RolloutGroup("g", 0, 0, Prompt("p", [], [1]), done, scores)]


def test_a_run_ends_when_more_than_half_of_twenty_batches_is_left_out():
    half = ["environment: timeout", None]
    limit = ExclusionLimit(0.5)
    for _ in range(3 * BATCHES):
        limit.add(2, reasons_of(batch(half)))
    told = (
        "21 of 40 samples of the last 20 rollout batches are excluded, "
        r"mostly: timeout \(20\), engine: error \(1\)"
    )
    with pytest.raises(EngineError, match=told):
        limit.add(2, reasons_of(batch(["environment: timeout", "engine: error"])))
    fresh = ExclusionLimit(0.0)
    for _ in range(BATCHES - 1):
        fresh.add(1, {"no_reward": 1})


def test_a_run_ends_when_all_of_its_first_samples_are_left_out():
    limit, late, never = ExclusionLimit(0.5), ExclusionLimit(0.5), ExclusionLimit(1.0)
    limit.add(31, {"no_reward": 31})
    with pytest.raises(EngineError, match=r"all of the first 32 samples are excluded, mostly: no_reward \(32\)"):
        limit.add(1, {"no_reward": 1})
    late.add(32, {"no_reward": 31})
    for one in (late, never):
        one.add(64, {"no_reward": 64})


# --- a command of the run -------------------------------------------------------------------------------------

PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("started", child.pid, flush=True)
time.sleep(600)
"""


def started(log):
    while not log.exists() or "started" not in log.read_text():
        time.sleep(0.01)
    return psutil.Process(int(log.read_text().split("started ")[1].split()[0]))


@pytest.mark.long
def test_a_command_ends_with_all_that_it_has_started(tmp_path):
    child = Child("gym", [sys.executable, "-c", PARENT])
    try:
        child.log_to(tmp_path / "gym.log")
        below = started(tmp_path / "gym.log")
        child.check()
    finally:
        child.close()
    psutil.wait_procs([below], timeout=5)
    assert not below.is_running() or below.status() == psutil.STATUS_ZOMBIE


def test_a_command_does_not_take_itself_for_a_rank(monkeypatch):
    """vLLM would wait for the store of torchrun's agent."""
    names = {"RANK", "NPROC_PER_NODE", "GROUP_RANK", "ROLE_NAME", "TORCHELASTIC_USE_AGENT_STORE"}
    for name in names:
        monkeypatch.setenv(name, "1")
    child = Child("gym", ["env"])
    child._process.wait(10)
    child.close()
    said = {line.partition("=")[0] for line in child._lines}
    assert "PATH" in said
    assert not names & said


def test_a_command_that_has_ended_is_told_with_its_last_lines():
    child = Child("gym", [sys.executable, "-c", "print(0); print('no such config'); raise SystemExit(3)"])
    child._process.wait(10)
    with pytest.raises(EngineError, match=r"gym: exited with status 3; .* 0 \| no such config$"):
        child.check()
    child.close()
    with pytest.raises(EngineError, match="exited with status 127"):
        missing = Child("gym", ["no-such-command-anywhere"])
        missing._process.wait(10)
        missing.check()
    with pytest.raises(ResourceError, match="cannot be started"):
        Child("gym", ["true"], folder=Path("/no/such/folder"))


def test_a_command_does_not_outlive_a_run_that_is_killed(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, time, pathlib\nfrom swift.rollout.child import Child\n"
        f"child = Child('gym', [sys.executable, '-c', {PARENT!r}])\n"
        f"child.log_to(pathlib.Path({str(tmp_path / 'gym.log')!r}))\ntime.sleep(600)\n"
    )
    run = psutil.Popen([sys.executable, str(script)])
    below = started(tmp_path / "gym.log")
    family = run.children(recursive=True)
    assert below in family
    run.kill()
    run.wait(5)
    _, left = psutil.wait_procs(family, timeout=10)
    assert [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
