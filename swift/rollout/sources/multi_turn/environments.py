"""Code that runs a trajectory: a scheduler or function of `multi_turns`, or an environment of `envs`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swift.data.messages import INSTRUCTIONS
from swift.errors import ConfigError, RewardError, first_line, suggest
from swift.models.template import Message
from swift.plugin.multi_turn import Env, MultiTurnScheduler, RolloutInferRequest
from swift.plugin.numbers import as_number, is_finite
from swift.rollout.sources.multi_turn.branches import BranchEngine, of_groups, of_run
from swift.rollout.sources.multi_turn.source import Play
from swift.rollout.sources.multi_turn.trajectory import Trajectory
from swift.rollout.sources.multi_turn.views import choice_of, messages_of, request_of

TOTAL_REWARD = "total_reward"
"""Entry of `rollout_infos` with the reward of `--use_gym_env`."""
CLOSE_S = 10.0
"""Timeout of closing an environment, in seconds."""


def find(
    multi_turn_scheduler: str | None,
    gym_env: str | None,
    max_turns: int | None,
    tokenizer: Any = None,
    num_generations: int = 1,
) -> Play | None:
    """The scheduler, function or environment of `--multi_turn_scheduler` or `--gym_env`; None without either.

    A scheduler with `plays_envs` plays the environment of `--gym_env`.

    Raises ConfigError: it is not registered, or is neither scheduler nor function.
    """
    from swift.plugin import envs, multi_turns

    if gym_env is not None:
        require_registered(envs, "--gym_env", gym_env)
    if multi_turn_scheduler is None:
        return of_envs(envs, gym_env) if gym_env is not None else None
    name = multi_turn_scheduler
    require_registered(multi_turns, "--multi_turn_scheduler", name)
    entry: Any = multi_turns[name]
    if gym_env is not None and not getattr(entry, "plays_envs", False):
        raise ConfigError(f"--gym_env: {gym_env}: --multi_turn_scheduler {name} plays no environment; drop one of them")
    if isinstance(entry, type):
        entry = _new_scheduler(entry, name, {"max_turns": max_turns, "tokenizer": tokenizer, "gym_env": gym_env})
    if isinstance(entry, MultiTurnScheduler):
        entry.tokenizer = tokenizer
        if hasattr(type(entry), "run"):
            entry.infer_engine = BranchEngine(name, tokenizer)
            makes_groups = type(entry).async_infer is not MultiTurnScheduler.async_infer
            return of_groups(entry, name, num_generations) if makes_groups else of_run(entry, name)
        return of_scheduler(entry, name)
    if not callable(entry):
        kind = type(entry).__name__
        raise ConfigError(f"--multi_turn_scheduler: {name}: is {kind}; register a MultiTurnScheduler or a function")
    return of_function(entry, name)


def require_registered(registry: Mapping[str, Any], flag: str, name: str) -> None:
    """Raises ConfigError with the nearest names if no plugin has registered the name."""
    if name not in registry:
        fix = suggest(name, sorted(registry)) if registry else "none is registered; give --external_plugins"
        raise ConfigError(f"{flag}: {name}: no plugin has registered it; {fix}")


def _new_scheduler(scheduler: type, name: str, arguments: dict[str, Any]) -> Any:
    """A scheduler with the maximum number of turns, and the other arguments if its constructor takes any keyword."""
    max_turns = arguments["max_turns"]
    try:
        kinds = [parameter.kind for parameter in inspect.signature(scheduler).parameters.values()]
        return scheduler(**(arguments if inspect.Parameter.VAR_KEYWORD in kinds else {"max_turns": max_turns}))
    except Exception as error:  # any error of the user's constructor
        raise ConfigError(
            f"--multi_turn_scheduler: {name}: {scheduler.__name__}(max_turns={max_turns}) raised "
            f"{type(error).__name__}: {first_line(error)}; its constructor must take max_turns"
        ) from error


async def _result(value: Any) -> Any:
    """A value, awaited if it is awaitable."""
    try:
        return await value if inspect.isawaitable(value) else value
    except KeyboardInterrupt as error:  # raised by the environment; it would end the event loop
        raise RuntimeError("it raised KeyboardInterrupt") from error


def of_scheduler(scheduler: MultiTurnScheduler, name: str) -> Play:
    """A trajectory with a scheduler of `multi_turns`."""

    async def play(trajectory: Trajectory) -> None:
        request = request_of(trajectory)
        try:
            await _result(scheduler.on_trajectory_start([request]))
            if request.messages != trajectory.messages:
                trajectory.begin(request.messages)
            await take_turns(trajectory, request)
        finally:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(asyncio.ensure_future(_result(scheduler.on_trajectory_end(request))))

    async def take_turns(trajectory: Trajectory, request: RolloutInferRequest) -> None:
        while True:
            await trajectory.answer()
            request.messages, choice = messages_of(trajectory), choice_of(trajectory)
            ended = await _result(scheduler.on_turn_end(request, choice, trajectory.turns)) or {}
            _add_infos(trajectory, ended.get("rollout_infos"))
            done = ended.get("done")
            if done is None:
                done = await _result(scheduler.check_finished(request, choice, trajectory.turns))
            if done or trajectory.out_of_turns():
                return
            step = await _result(scheduler.step(request, choice, trajectory.turns))
            if not isinstance(step, Mapping) or not hasattr(step.get("infer_request"), "messages"):
                raise RewardError(
                    f"--multi_turn_scheduler: {name}: step returned {type(step).__name__}; return a dict whose "
                    '"infer_request" is the request with the next messages'
                )
            _add_infos(trajectory, step.get("rollout_infos"))
            request = step["infer_request"]
            given = step.get("rollout_logprobs") or []
            if list(given) != trajectory.last_turn[1][: len(given)]:
                raise RewardError(
                    f"--multi_turn_scheduler: {name}: step returned rollout_logprobs that are not those of the engine; "
                    "leave them out"
                )
            if (ids := step.get("response_token_ids")) is None:
                trajectory.replace_chat(request.messages)
                continue
            try:
                trajectory.replace_turn(ids, step.get("response_loss_mask") or [1] * len(ids), request.messages)
            except ValueError as error:
                raise RewardError(f"--multi_turn_scheduler: {name}: step returned {error}") from error

    return play


def _add_infos(trajectory: Trajectory, infos: Mapping[str, Any] | None) -> None:
    """Columns for reward functions, and the reward of `--use_gym_env` so far."""
    trajectory.columns |= infos or {}
    if infos and TOTAL_REWARD in infos:
        trajectory.rewards = [_reward(infos[TOTAL_REWARD])]


def of_function(function: Callable[[list[dict[str, Any]]], Any], name: str) -> Play:
    """A trajectory with a function `f(rows) -> rows` of `multi_turns`, called with a row after each answer.

    A row has `messages`, `finish_reason`, `index` (of the sample in its group), `response_token_ids` and the columns;
    the function sets `finished`, and otherwise adds messages or changes the end of the last answer.
    """

    async def play(trajectory: Trajectory) -> None:
        while True:
            await trajectory.answer()
            request = request_of(trajectory)
            row = {
                **request.data_dict,
                "messages": request.messages,
                "finish_reason": trajectory.finish_reason,
                "index": int(request.uuid.rpartition("/")[2]),
                "response_token_ids": trajectory.last_ids,
            }
            rows = await _result(function([row]))
            if not isinstance(rows, Sequence) or len(rows) != 1 or "finished" not in rows[0]:
                raise RewardError(
                    f"--multi_turn_scheduler: {name}: must return the rows it was given, each with `finished`"
                )
            if rows[0]["finished"] or trajectory.out_of_turns():
                return
            trajectory.replace_chat(rows[0]["messages"])

    return play


def of_envs(envs: Mapping[str, type[Env]], default: str) -> Play:
    """A trajectory in an environment of `envs`: that of the row's `env_config`, or `default`."""

    async def play(trajectory: Trajectory) -> None:
        request = request_of(trajectory)
        config = request.data_dict.get("env_config") or {}
        name = config.get("name") or default
        require_registered(envs, "--gym_env", name)
        env = envs[name](config)
        try:
            observation, columns, system = await _result(env.reset(request))
            trajectory.columns |= columns or {}
            if observation is not None or system is not None:
                trajectory.begin(_opening(request.messages, observation, system))
            while True:
                await trajectory.answer()
                messages = [dict(message) for message in trajectory.messages]
                observation, reward, done, columns = await _result(env.step(messages))
                trajectory.reward(_reward(reward))
                trajectory.columns |= columns or {}
                if done or trajectory.out_of_turns():
                    return
                trajectory.add_messages({"role": "user", "content": observation})
        finally:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(asyncio.ensure_future(_result(env.close())))

    return play


def _reward(value: Any) -> float | None:
    """The reward of a step, checked as the value of a reward function."""
    try:
        number = as_number(value)
    except TypeError as error:
        raise TypeError(f"the reward of a step {error}") from None
    if number is not None and not is_finite(number):
        raise ValueError(f"the reward of a step is {number}, not a number that a 32-bit float holds")
    return number


def _opening(messages: list[Message], observation: str | None, system: str | None) -> list[Message]:
    """The chat at the start of an environment: its observation and system message, by default those of the row."""
    head = [message for message in messages if message["role"] in INSTRUCTIONS]
    rest = [message for message in messages if message["role"] not in INSTRUCTIONS]
    if system is not None:
        head = [{"role": "system", "content": system}]
    return [*head, *(rest if observation is None else [{"role": "user", "content": observation}])]
