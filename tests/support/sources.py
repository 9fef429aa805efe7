"""Sources of completions, driven by a loop of their own."""

from __future__ import annotations

import asyncio

from swift.rollout.engines.awaited import AwaitedEngine
from swift.rollout.loop import RolloutLoop
from swift.rollout.source import EngineSource


def source_of(engine, limit_s=None):
    """An engine as a source; None for None."""
    return None if engine is None else EngineSource(AwaitedEngine(engine, limit_s=limit_s))


def on_a_loop(work):
    """The result of a coroutine function."""
    loop = RolloutLoop()
    try:
        return loop.run(work())
    finally:
        loop.close(1.0)


def outcomes(source, requests):
    """What each request came to, in order: a completion or what was raised."""

    async def all_of_them():
        tasks = [asyncio.create_task(source.generate(request)) for request in requests]
        return await asyncio.gather(*tasks, return_exceptions=True)

    return on_a_loop(all_of_them)


def sampled(source, requests):
    """The completions, in order; raises the first failure, as a round does."""

    async def all_of_them():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(source.generate(request)) for request in requests]
        await source.free()
        return [task.result() for task in tasks]

    try:
        return on_a_loop(all_of_them)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def leave(source, requests, when):
    """Ask for completions, and take all requests back as soon as `when()` is true."""

    async def work():
        tasks = [asyncio.create_task(source.generate(request)) for request in requests]
        while not when():
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await source.free()

    on_a_loop(work)
