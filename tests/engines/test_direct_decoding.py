"""The direct forward pass of plain decoders: equal to the model's own, shared prompts, rows that join and leave."""

import random
from dataclasses import replace

import pytest
import torch

from swift.models.cpu_training import use_fast_products
from swift.models.forward import Span, choose_attention
from swift.models.scoring import prepare_scoring
from swift.rollout.engines import transformers as engine_module
from swift.rollout.engines.plain_decoder import PlainDecoder, obstacle, plain_decoder
from swift.rollout.engines.prompt_cache import PromptCache, positions_needed
from swift.rollout.engines.transformers import TransformersEngine
from swift.types import Request, SamplingParams

ENDS = (1, 2, 3, 4, 5, 6, 7, 8)
PROMPTS = [[5, 6, 7], [9] * 40, [20, 21, 22, 23, 24, 25], [3 + i % 50 for i in range(17)]]


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def with_lora(folder):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load(folder), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def requests_for(prompts, *, samples=4, tokens=40, stop=ENDS):
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.9, stop_token_ids=stop)
    return [
        Request(f"{p}/{s}", ids, replace(sampling, seed=1000 * p + s))
        for p, ids in enumerate(prompts)
        for s in range(samples)
    ]


def run(engine, requests):
    return {completion.request_id: completion for completion in engine.generate(requests)}


def same(first, second):
    """Equal to the last bit."""
    assert first.keys() == second.keys()
    assert all((first[k].token_ids, first[k].logprobs) == (second[k].token_ids, second[k].logprobs) for k in first)


@pytest.mark.parametrize("make", [load, with_lora])
def test_completions_are_those_of_the_models_own_forward(nano_folder, make):
    engine = TransformersEngine(make(nano_folder), eos_token_ids=[])
    requests = requests_for(PROMPTS)
    direct = run(engine, requests)
    assert engine._decoder is not None
    engine._decoder = None
    own = run(engine, requests)
    assert len({len(completion.token_ids) for completion in own.values()}) > 4, "rows leave at different times"
    for name, completion in own.items():
        assert direct[name].token_ids == completion.token_ids
        assert direct[name].finish_reason == completion.finish_reason
        assert direct[name].logprobs == pytest.approx(completion.logprobs, abs=1e-5)


def test_what_else_is_in_the_batch_changes_no_bit(nano_folder):
    engine = TransformersEngine(load(nano_folder), eos_token_ids=[])
    requests = requests_for(PROMPTS)
    together = run(engine, requests)
    assert engine._decoder is not None
    engine._decoder.refresh()
    assert engine._decoder.same_in_any_batch()
    for part in (requests[:1], requests[5:7], requests[3:12]):
        same(run(engine, part), {request.request_id: together[request.request_id] for request in part})


def late(engine, requests, steps):
    """Submit `requests` when the engine has done so many steps; returns what was sampled until then."""
    waiting = list(requests)
    seen = []

    def between():
        if waiting and engine.counters.decode_steps >= steps:
            seen.append(engine.counters.decode_steps)
            for request in waiting:
                engine.submit(request)
            waiting.clear()

    engine.between_steps = between
    return seen


@pytest.mark.parametrize("steps", [1, 7, 33])
def test_requests_that_come_later_join_the_running_batch_and_change_no_bit(nano_folders, steps):
    engine = TransformersEngine(load(nano_folders["qwen2"]), eos_token_ids=[])
    requests = requests_for(PROMPTS, tokens=60, stop=())
    alone = run(engine, requests)
    engine.counters = engine_module.EngineCounters()
    first, later = (
        requests[:8],
        [replace(one, sampling=replace(one.sampling, max_new_tokens=50)) for one in requests[8:]],
    )
    late(engine, later, steps)
    joined = run(engine, first)
    assert engine.counters.decode_steps == max(60, steps + 50)
    assert engine.counters.prefill_tokens == sum(map(len, PROMPTS))
    for request in requests:
        found, expected = joined[request.request_id], alone[request.request_id]
        count = 60 if request in first else 50
        assert (found.token_ids, found.logprobs) == (expected.token_ids[:count], expected.logprobs[:count])
        assert found.versions == [(0, 0, count)]


def test_the_versions_of_a_row_that_joined_count_from_its_own_first_token(nano_folders):
    engine = TransformersEngine(load(nano_folders["qwen2"]), eos_token_ids=[])
    requests = requests_for(PROMPTS[:2], samples=1, tokens=12, stop=())
    submit = late(engine, requests[1:], 4)
    inner = engine.between_steps

    def between():
        inner()
        engine.version = 1 if engine.counters.decode_steps >= 6 else 0

    engine.between_steps = between
    done = run(engine, requests[:1])
    assert submit == [4]
    assert done["0/0"].versions == [(0, 0, 6), (1, 6, 12)]
    assert done["1/0"].versions == [(0, 0, 2), (1, 2, 12)]


def test_where_kernels_mix_rows_nobody_joins(nano_folders, monkeypatch):
    monkeypatch.setattr(PlainDecoder, "same_in_any_batch", lambda decoder: False)
    engine = TransformersEngine(load(nano_folders["qwen2"]), eos_token_ids=[])
    requests = requests_for(PROMPTS[:2], samples=1, tokens=10, stop=())
    late(engine, requests[1:], 2)
    assert len(run(engine, requests[:1])) == 2
    assert engine.counters.decode_steps == 20


def test_no_more_rows_join_than_there_is_room_for(nano_folders):
    engine = TransformersEngine(load(nano_folders["qwen2"]), eos_token_ids=[], max_rows=6)
    requests = requests_for(PROMPTS, tokens=20)
    most = []
    step = engine._stepped

    def noting(run):
        most.append(len(run.live()))
        return step(run)

    engine._stepped = noting
    same(run(engine, requests), run(TransformersEngine(load(nano_folders["qwen2"]), eos_token_ids=[]), requests))
    assert max(most) == 6


def test_an_aborted_request_that_was_about_to_join_has_no_tokens(nano_folders):
    engine = TransformersEngine(load(nano_folders["qwen2"]), eos_token_ids=[])
    requests = requests_for(PROMPTS[:2], samples=1, tokens=10, stop=())
    late(engine, requests[1:], 3)
    inner = engine.between_steps

    def between():
        inner()
        if engine.counters.decode_steps == 3:
            engine.abort(["1/0"])

    engine.between_steps = between
    done = run(engine, requests[:1])
    assert (done["1/0"].finish_reason, done["1/0"].token_ids) == ("abort", [])
    assert len(done["0/0"].token_ids) == 10


def test_weights_that_change_are_taken_at_the_next_version_and_at_the_next_batch(nano_folders):
    engine = TransformersEngine(load(nano_folders["qwen2"]), eos_token_ids=[])
    requests = requests_for(PROMPTS[:1], samples=1, tokens=12, stop=())
    before = run(engine, requests)["0/0"]

    def between():
        if engine.counters.decode_steps == 18 and engine.version == 0:
            with torch.no_grad():
                engine.model.lm_head.weight.mul_(1.5)
            engine.version = 1

    engine.between_steps = between
    during = run(engine, requests)["0/0"]
    assert during.logprobs[:6] == before.logprobs[:6] and during.logprobs[6] != before.logprobs[6]
    with torch.no_grad():
        engine.model.lm_head.weight.div_(1.5)
    assert run(engine, requests)["0/0"].logprobs == pytest.approx(before.logprobs, abs=1e-5)


def test_a_model_that_is_watched_or_patched_keeps_its_own_forward(nano_folders):
    engine = TransformersEngine(load(nano_folders["qwen2"]), eos_token_ids=[])
    requests = requests_for(PROMPTS[:1], samples=2, tokens=3)
    seen = []
    hook = engine.model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    watched = run(engine, requests)
    assert seen
    hook.remove()
    assert {k: c.token_ids for k, c in run(engine, requests).items()} == {k: c.token_ids for k, c in watched.items()}
    own = engine.model.model.norm.forward
    engine.model.model.norm.forward = lambda rows: own(rows) * 0.5
    assert "patched forward" in obstacle(engine.model)
    assert run(engine, requests)["0/0"].logprobs != watched["0/0"].logprobs


@pytest.mark.parametrize("make", [load, with_lora])
def test_what_the_trainer_puts_into_its_model_is_no_obstacle(nano_folders, make):
    model = make(nano_folders["qwen2"])
    choose_attention(model)
    assert prepare_scoring(model) is None
    assert use_fast_products(model) > 0
    assert obstacle(model) is None
    assert plain_decoder(model) is not None


@pytest.mark.parametrize("arch", ["mixtral", "granite", "cohere", "olmo2"])
def test_other_decoders_keep_their_own_forward(small_model, arch):
    model = small_model(arch, sliding_window=None)
    choose_attention(model)
    assert plain_decoder(model) is None


def test_a_decoder_that_computes_something_else_is_found_by_the_trial(nano_folders):
    model = load(nano_folders["qwen2"])
    choose_attention(model)
    assert plain_decoder(model) is not None
    kind = type(model.model.norm)
    model.model.norm.__class__ = type(
        "OtherNorm", (kind,), {"forward": lambda self, rows: kind.forward(self, rows) * 1.01}
    )
    assert obstacle(model) is None
    assert plain_decoder(model) is None


def naive(query, keys, values, scale):
    """[H, D] attending to [T, Hkv, D]."""
    repeats = query.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    weights = torch.einsum("hd,thd->ht", query * scale, keys).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values).flatten()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (6, 1)])
def test_rows_that_come_and_go_attend_to_their_prompt_and_their_own_tokens(seed, heads, groups):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    cache, rows = PromptCache(), []  # a row: keys and values of its whole sequence
    for _ in range(60):
        if not rows or chance.random() < 0.1:
            lengths = [chance.choice([1, 7, 16, 140]) for _ in range(chance.randint(1, 3))]
            spans = [Span(sum(lengths[:i]), length) for i, length in enumerate(lengths)]
            keys, values = torch.randn(2, sum(lengths), groups, 8)
            which = [chance.randrange(len(spans)) for _ in range(chance.randint(1, 6))]
            cache.add([(keys, values)], spans, which, [60] * len(which))
            rows += [(keys[spans[i].start : spans[i].stop], values[spans[i].start : spans[i].stop]) for i in which]
        query, key, value = (torch.randn(len(rows), count, 8) for count in (heads, groups, groups))
        cache.begin_step()
        found = cache.attend(0, query, key, value, 0.3, len(rows) + seed)[: len(rows)]
        rows = [
            (torch.cat([k, a[None]]), torch.cat([v, b[None]])) for (k, v), a, b in zip(rows, key, value, strict=True)
        ]
        expected = torch.stack([naive(q, k, v, 0.3) for q, (k, v) in zip(query, rows, strict=True)])
        assert (found - expected).abs().max() < 1e-5
        kept = [i for i in range(len(rows)) if chance.random() > 0.05]
        rows = [rows[i] for i in kept]
        cache.keep(kept)
        assert cache.num_rows == len(rows)


def test_a_prompt_is_held_once_for_its_rows():
    cache = PromptCache()
    keys, values = torch.randn(2, 160, 2, 8)
    cache.add([(keys, values)], [Span(0, 160)], [0] * 8, [16] * 8)
    assert cache.nbytes() == 2 * 2 * 8 * 4 * positions_needed([8], 160, 16) == 2 * 2 * 8 * 4 * (160 + 8 * 16)


def test_a_row_that_is_not_numbers_spoils_no_other():
    cache = PromptCache()
    keys, values = torch.randn(2, 30, 2, 8)
    cache.add([(keys, values)], [Span(0, 10), Span(10, 20)], [0, 0, 1], [16] * 3)
    for _ in range(3):
        cache.begin_step()
        query, key = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
        query[1], key[1] = torch.nan, torch.nan
        found = cache.attend(0, query, key, key, 0.3, 3)
        assert found.isfinite().all(1).tolist() == [True, False, True]
    cache.keep([0, 2])
    cache.begin_step()
    assert cache.attend(0, torch.randn(2, 4, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8), 0.3, 2).isfinite().all()
