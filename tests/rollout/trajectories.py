"""Requests of trajectories, and schedulers and environments that several test files play."""

import asyncio

from swift.plugin import Env, MultiTurnScheduler
from swift.rollout.sources.multi_turn.trajectory import Limits
from swift.types import Prompt, Request, SamplingParams

TURN = 5
LIMITS = Limits(max_turns=3, scope="per_round", max_model_len=2000)


def requests(template, count=4, **columns):
    messages = [{"role": "user", "content": "How many?"}]
    prompt = Prompt("p", messages, template.encode_prompt(messages), {"solution": "3", **columns})
    sampling = [SamplingParams(max_new_tokens=TURN, temperature=0.8, seed=seed) for seed in range(count)]
    return [Request(f"p-0/{i}", prompt.token_ids, one, prompt) for i, one in enumerate(sampling)]


class Again(MultiTurnScheduler):
    """Asks again, whatever the answer."""

    def check_finished(self, request, choice, turn):
        return False

    def step(self, request, choice, turn):
        request.messages.append({"role": "user", "content": f"And now? {turn}"})
        return {"infer_request": request, "rollout_infos": {"asked": turn}}


class Once(Env):
    """Over after an answer; what it does in `step` is the test's."""

    closed = asleep = 0

    async def reset(self, request):
        return None, {}, None

    async def step(self, messages):
        return "", 1.0, True, {}

    async def close(self):
        Once.closed += 1


def sleepy(seconds):
    """An environment whose step takes so long."""

    class Sleepy(Once):
        async def step(self, messages):
            Once.asleep += 1
            await asyncio.sleep(seconds)
            return "", 1.0, True, {}

    return Sleepy
