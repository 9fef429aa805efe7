"""Callers of engines and sources: on a loop of their own, or beside a loop on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import queue

from swift.rollout.loop import RolloutLoop
from swift.rollout.sources.base import EngineSource


def source_of(engine):
    """An engine as a source; None for None."""
    return None if engine is None else EngineSource(engine)


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


class Caller:
    """Asks an engine for completions on a loop in the background, so that a test can do other things meanwhile."""

    def __init__(self, engine):
        self.engine, self.loop = engine, RolloutLoop(threaded=True)
        self.tasks, self.ended = [], queue.Queue()

    def ask(self, *requests):
        """Ask for completions; those of one call begin together."""

        async def begin():
            for request in requests:
                task = asyncio.create_task(self.engine.generate(request))
                task.add_done_callback(self.ended.put)
                self.tasks.append(task)

        self.loop.run(begin())

    def completions(self, limit_s=120.0):
        """As they come, until nothing is outstanding; raises what one of them raised."""
        while self.tasks:
            task = self.ended.get(timeout=limit_s)
            self.tasks.remove(task)
            yield task.result()

    def hold(self):
        """Pause the engine between two tokens."""
        self.loop.do(self.engine.hold)
        self.engine.pause()
        self.loop.run(self.engine.rest())

    def release(self):
        """Go on."""
        self.engine.resume()
        self.loop.do(self.engine.release)

    def close(self):
        """Leave whatever is outstanding."""
        self.loop.close(10.0)


@contextlib.contextmanager
def asking(engine, *requests):
    """A caller that has asked for these."""
    caller = Caller(engine)
    try:
        caller.ask(*requests)
        yield caller
    finally:
        caller.close()


def nothing_left(engine):
    """Whether nothing is outstanding at an engine."""
    return not getattr(engine, "_asked", ()) and not getattr(engine, "_running", ())
