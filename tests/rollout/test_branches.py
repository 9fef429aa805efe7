"""Schedulers with a `run` of their own: one line of turns, branches of a group, and what they may return."""

import asyncio

import pytest
import torch
from oracle import logprobs_of
from sources import sampled
from trajectories import LIMITS, TURN, Again, requests

from swift.errors import RewardError
from swift.infer_engine.protocol import RolloutOutput
from swift.plugin import MultiTurnScheduler, multi_turns
from swift.rollout.round_result import fault
from swift.rollout.sources.multi_turn.environments import find, of_scheduler

ASKED = {"role": "user", "content": "And now?"}


def answered(messages, response):
    return [*messages, {"role": "assistant", "content": response.choices[0].message.content}]


class Line(MultiTurnScheduler):
    """Three answers, one after the other."""

    outputs = None

    async def run(self, infer_request, request_config, **kwargs):
        messages, lengths = infer_request.messages, []
        for turn in (1, 2, 3):
            response = await self.infer_engine.infer_async(infer_request, request_config)
            lengths.append(len(response.choices[0].token_ids))
            messages[:] = answered(messages, response)
            if turn < 3:
                messages.append({"role": "user", "content": f"And now? {turn}"})
        infos = {"asked": 2}
        return RolloutOutput(response=response, messages=messages, rollout_infos=infos, **self.outputs or {})


class Fork(MultiTurnScheduler):
    """A group: all its samples branch from one first answer; the last one ends there."""

    async def async_infer(self, infer_requests, request_config, **kwargs):
        outputs = await super().async_infer(infer_requests[:1], request_config, **kwargs)
        for output, request in zip(outputs, infer_requests, strict=True):
            output.response.id = request.uuid
        return outputs

    async def run(self, infer_request, request_config, **kwargs):
        request_config.logprobs = True
        ask = self.infer_engine.infer_async
        first = await ask(infer_request, request_config)
        root = answered(infer_request.messages, first)
        infer_request.messages = [*root, ASKED]
        leaves = await asyncio.gather(*(ask(infer_request, request_config) for _ in range(3)))
        chats = [*(answered(infer_request.messages, leaf) for leaf in leaves), root]
        return [RolloutOutput(response=one, messages=chat) for one, chat in zip([*leaves, first], chats, strict=True)]


def played(scheduler, name="own", count=4):
    multi_turns[name] = scheduler
    return find(name, None, None, None, count)


def test_a_line_has_the_tokens_that_steps_have(template, source_for):
    lines = sampled(source_for(played(Line)), requests(template, 2))
    steps = sampled(source_for(of_scheduler(Again(), "again"), LIMITS), requests(template, 2))
    for line, step in zip(lines, steps, strict=True):
        assert (line.token_ids, line.mask, line.columns) == (step.token_ids, step.mask, step.columns)
        assert line.episode.messages == step.episode.messages


def test_branches_share_the_tokens_of_their_stem(policy, source_for):
    model, template = policy
    wanted = requests(template, 4)
    done = sampled(source_for(played(Fork)), wanted)
    assert [one.request_id for one in done] == [request.request_id for request in wanted]
    assert {tuple(one.token_ids[:TURN]) for one in done} == {tuple(done[3].token_ids)}
    assert [one.episode.num_turns for one in done] == [2, 2, 2, 1]
    assert len({tuple(one.token_ids[-TURN:]) for one in done[:3]}) == 3, "a seed per branch"
    for request, one in zip(wanted, done, strict=True):
        assert fault(one) is None
        own = torch.tensor(one.mask or [1] * TURN, dtype=torch.bool)
        assert int(own.sum()) == TURN * one.episode.num_turns
        expected = logprobs_of(model, request.prompt_ids, one.token_ids, 0.8)
        assert float((torch.tensor(one.logprobs) - expected)[own].abs().max()) < 1e-5


def test_a_mask_leaves_out_sampled_tokens(template, source_for):
    mask = [[0] * TURN, [1] * TURN, [1] * TURN]
    line = type("Masked", (Line,), {"outputs": {"response_loss_mask": mask}})
    (one,) = sampled(source_for(played(line)), requests(template, 1))
    (whole,) = sampled(source_for(played(Line)), requests(template, 1))
    assert one.token_ids == whole.token_ids
    assert one.mask == [0] * TURN + whole.mask[TURN:]


class Warm(Line):
    async def run(self, infer_request, request_config, **kwargs):
        request_config.temperature = 0.3
        return await super().run(infer_request, request_config)


class Split(Line):
    async def run(self, infer_request, request_config, **kwargs):
        return [await super().run(infer_request, request_config)] * 2


class Elsewhere(Line):
    async def run(self, infer_request, request_config, **kwargs):
        output = await super().run(infer_request, request_config)
        output.messages = [*output.messages, ASKED]
        return output


class Few(Fork):
    async def run(self, infer_request, request_config, **kwargs):
        return (await super().run(infer_request, request_config))[:3]

    async def async_infer(self, infer_requests, request_config, **kwargs):
        return await super().async_infer(infer_requests[:3], request_config)


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [
        (Warm, "request_config.temperature: 0.3: answers are sampled with the settings of the run"),
        (Split, "run returned 2 samples for one request"),
        (Elsewhere, "run returned messages that do not end with an answer"),
        (
            type("Short", (Line,), {"outputs": {"response_loss_mask": [0, 1]}}),
            "run returned a response_loss_mask of 2 values",
        ),
        (Few, "async_infer returned 3 samples, none of them p-0/3"),
    ],
)
def test_what_cannot_be_trained_on_ends_the_run(template, source_for, scheduler, line):
    with pytest.raises(RewardError, match=f"--multi_turn_scheduler: own: {line}"):
        sampled(source_for(played(scheduler)), requests(template))
