"""Rollouts of several turns whose prompts have images."""

import pytest
import torch
from image_rows import Plain, data_url
from sources import sampled
from trajectories import LIMITS, TURN, Again, Once

from swift.data.image_store import remember
from swift.data.images import ImageSource, read_image
from swift.errors import ConfigError
from swift.models import load_chat, load_for_inference
from swift.models.arguments import SeeingArguments
from swift.models.vision import placeholder_ids
from swift.plugin import MultiTurnScheduler
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.round_result import fault
from swift.rollout.sources.multi_turn.environments import of_envs, of_scheduler
from swift.rollout.sources.multi_turn.source import TrajectorySource
from swift.types import Prompt, Request, SamplingParams


@pytest.fixture(scope="module")
def seeing(vlm_folders):
    """Template and engine of a model that sees, and the same model in plain transformers."""
    args = SeeingArguments(model=str(vlm_folders("qwen3_vl")))
    template, model = load_chat(args), load_for_inference(args, device="cpu")
    template.vision.attach(model)
    return template, TransformersEngine(model, eos_token_ids=()), Plain(args.model)


@pytest.fixture
def played(seeing):
    """Completions of a trajectory source, for two prompts with other images."""
    template, engine, _ = seeing
    sources = []

    def of(play):
        sources.append(TrajectorySource(engine, template, LIMITS, play, "test", 30.0))
        return sampled(sources[-1], requests(template))

    yield of
    for source in sources:
        source.close()


def requests(template):
    found = []
    for seed in range(2):
        images = [read_image(data_url(seed), ImageSource())]
        remember(images)
        parts = [{"type": "image", "image": images[0].digest}, {"type": "text", "text": "How many?"}]
        messages = [{"role": "user", "content": parts}]
        prompt = Prompt(f"p{seed}", messages, template.encode_prompt(messages), {})
        sampling = SamplingParams(max_new_tokens=TURN, temperature=1.0, seed=seed)
        found.append(Request(f"p{seed}-0/0", prompt.token_ids, sampling, prompt))
    return found


def test_later_turns_see_the_image_of_the_first(seeing, played):
    template, _, plain = seeing
    wanted, banned = requests(template), torch.tensor(placeholder_ids(plain.model.config))
    for seed, (request, one) in enumerate(zip(wanted, played(of_scheduler(Again(), "again")), strict=True)):
        assert (one.episode.num_turns, fault(one)) == (3, None)
        text = plain.text([{"role": "user", "content": "<image>How many?"}], add_generation_prompt=True)
        made = plain.processed(text, [data_url(seed)])
        assert made["input_ids"][0].tolist() == template.vision.visible(request.prompt_ids)
        ids = torch.cat([made["input_ids"], torch.tensor([one.token_ids])], 1)
        kinds = torch.nn.functional.pad(made["mm_token_type_ids"], (0, len(one.token_ids)))
        made |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
        with torch.no_grad():
            logits = plain.model(**made).logits[0, -len(one.token_ids) - 1 : -1].index_fill(-1, banned, -torch.inf)
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(one.token_ids)[:, None])[:, 0]
        own = torch.tensor(one.mask, dtype=torch.bool)
        assert own.sum() == 3 * TURN
        assert float((torch.tensor(one.logprobs) - expected)[own].abs().max()) < 1e-4


class Picture(MultiTurnScheduler):
    """Shows an image after the answer."""

    def check_finished(self, request, choice, turn):
        return False

    def step(self, request, choice, turn):
        content = [{"type": "image_url", "image_url": {"url": data_url(3)}}]
        request.messages.append({"role": "user", "content": content})
        return {"infer_request": request}


class Blind(Once):
    """Replaces the prompt by a text."""

    async def reset(self, request):
        return "Look!", {}, None


@pytest.mark.parametrize(
    ("play", "problem"),
    [
        (of_scheduler(Picture(), "picture"), "a message after an answer has an image"),
        (of_envs({"blind": Blind}, "blind"), "replaces a prompt with images"),
    ],
)
def test_images_after_the_prompt_or_lost_ones_end_the_run(play, problem, played):
    with pytest.raises(ConfigError, match=problem):
        played(play)


class Echo(MultiTurnScheduler):
    """Repeats what stands for an image."""

    def check_finished(self, request, choice, turn):
        return False

    def step(self, request, choice, turn):
        request.messages.append({"role": "user", "content": "<|image_pad|>"})
        return {"infer_request": request}


def test_a_text_that_stands_for_an_image_excludes_its_sample(played):
    assert {one.episode.problem for one in played(of_scheduler(Echo(), "echo"))} == {"image token in a text"}
