"""Routing replay in training: the sampler's experts (R3), or those of the trainer's first pass (R2)."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from grpo_parts import END, all_different, logs_of, make_trainer, one_step
from hybrids import hybrid
from torch import nn

from swift.errors import ConfigError, NumericError
from swift.models.forward import TokenSequence, pad
from swift.models.reference import FrozenReference
from swift.models.routing import routing_of
from swift.rl.losses import LossConfig
from swift.rollout.engines.transformers import TransformersEngine
from swift.trainers.grpo.routes import replay_of, require_experts

MIXTURES = ("qwen3_moe", "mixtral", "qwen3_next")


def mixture(arch, small_model):
    sizes = {"vocab_size": 263, "eos_token_id": None, "pad_token_id": 0}
    special = {"mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}}
    model = hybrid(arch, **sizes) if arch == "qwen3_next" else small_model(arch, **sizes, **special.get(arch, {}))
    return model.eval()


def routers(model):
    return [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]


class Noise:
    """Noise on the scores of a sampler's routers, of this share of their standard deviation."""

    def __init__(self, model, size):
        for number, router in enumerate(routers(model)):
            router.register_forward_pre_hook(self.disturb)
            router.size, router.generator = size, torch.Generator().manual_seed(number)

    @staticmethod
    def disturb(router, args):
        (hidden,) = args
        noise = torch.randn(hidden.shape, generator=router.generator)
        return (hidden + router.size * hidden.std() * noise,)


def disturbed(model, size=1e-3, **options):
    """An engine with a copy of the weights and noise on its routers."""
    own = copy.deepcopy(model)
    Noise(own, size)
    return TransformersEngine(
        own, eos_token_ids=[END], returns_routes=True, reload=lambda: copy.deepcopy(model), **options
    )


def stepped(model, tmp_path, mode, **settings):
    options = {"generations": 16, "global_batch": 64, "max_samples": 64, "max_completion_length": 24, **settings}
    trainer = make_trainer(
        None, tmp_path / mode, model=copy.deepcopy(model), engine=disturbed(model), router_replay=mode, **options
    )
    return one_step(trainer)


@pytest.mark.parametrize("arch", MIXTURES)
def test_with_noise_on_the_samplers_routers_the_mismatch_falls_tenfold(arch, small_model, tmp_path):
    model = mixture(arch, small_model)
    plain, replayed = (stepped(model, tmp_path, mode).values for mode in ("off", "rollout"))
    for name in ("mismatch/k3", "mismatch/logp_abs_diff_max"):
        assert replayed[name] < plain[name] / 10, (name, plain[name], replayed[name])
    assert 0 < replayed["routing/choices_differ_frac"] < replayed["routing/tokens_differ_frac"] < 0.2
    assert "routing/tokens_differ_frac" not in plain


def test_without_noise_replay_changes_nothing(small_model, tmp_path):
    model = mixture("qwen3_moe", small_model)
    steps = []
    for mode in ("off", "rollout"):
        engine = TransformersEngine(
            copy.deepcopy(model), eos_token_ids=[END], returns_routes=True, reload=lambda: model
        )
        trainer = make_trainer(
            None, tmp_path / mode, model=copy.deepcopy(model), engine=engine, router_replay=mode, max_samples=3
        )
        steps.append(one_step(trainer))
    assert steps[1].values["routing/tokens_differ_frac"] == 0
    for name, gradient in steps[0].gradients.items():
        if gradient is not None:
            torch.testing.assert_close(steps[1].gradients[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen3_next", "lfm2_moe"])
@pytest.mark.parametrize("rows", [64, 3])
def test_the_engine_returns_the_experts_of_the_prompt_and_of_all_tokens_but_the_last(arch, rows, small_model, tmp_path):
    model = hybrid(arch, vocab_size=263) if arch != "qwen3_moe" else mixture(arch, small_model)
    plain = copy.deepcopy(model)
    engine = TransformersEngine(model, eos_token_ids=list(range(0, 256, 9)), returns_routes=True, max_rows=rows)
    trainer = make_trainer(None, tmp_path, model=model, engine=engine, max_completion_length=12)
    samples = next(trainer.pipeline.steps(trainer.progress)).samples
    assert len({len(sample.token_ids) for sample in samples}) > 2

    for sample in samples:
        tokens = pad([TokenSequence(sample.prompt_ids.tolist(), sample.token_ids.tolist())])
        with torch.no_grad(), routing_of(plain).recording() as recording:
            plain(**tokens.inputs)
        expected = routing_of(plain).array(recording)
        assert sample.routes.dtype == np.uint8 and sample.routes.shape == expected.shape
        assert np.array_equal(np.sort(sample.routes, -1), np.sort(expected, -1))
    assert len(routing_of(model).layers) == samples[0].routes.shape[1]


def test_a_padded_row_and_a_packed_stream_replay_the_same(small_model, tmp_path):
    model, gradients = mixture("qwen3_moe", small_model), []
    for number, packable in enumerate((True, False)):
        own = copy.deepcopy(model)
        own._supports_attention_backend = packable
        trainer = make_trainer(
            None, tmp_path / str(number), model=own, engine=disturbed(model), router_replay="rollout"
        )
        assert (trainer.rows_because is None) == packable
        gradients.append(one_step(trainer).gradients)
    for name, gradient in gradients[0].items():
        if gradient is not None:
            torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=2e-6)


def test_the_reference_chooses_its_own_experts(small_model, tmp_path):
    model, seen = mixture("qwen3_moe", small_model), []
    reference = FrozenReference(copy.deepcopy(model))
    engine = disturbed(model, size=1.0)
    trainer = make_trainer(
        None, tmp_path, model=copy.deepcopy(model), engine=engine, reference=reference, router_replay="rollout",
        loss=LossConfig(beta=0.1), iterations=2,
    )  # fmt: skip
    routers(reference.module)[0].register_forward_hook(lambda _, __, output: seen.append(output[2]))
    samples = one_step(trainer).samples
    plain = make_trainer(
        None, tmp_path / "plain", model=copy.deepcopy(model), engine=disturbed(model, size=1.0),
        reference=FrozenReference(copy.deepcopy(model)), loss=LossConfig(beta=0.1), iterations=2,
    )  # fmt: skip
    assert seen
    for mine, other in zip(samples, one_step(plain).samples, strict=True):
        assert np.array_equal(mine.token_ids, other.token_ids)
        np.testing.assert_allclose(mine.ref_logprobs, other.ref_logprobs, atol=1e-5)


# --- R2 ---------------------------------------------------------------------------------------------------------------


def trained(model, path, mode, **settings):
    options = {"num_global_batches": 2, "iterations": 2, "max_samples": 3, "max_steps": 8, "learning_rate": 3e-2}
    trainer = make_trainer(None, path, model=copy.deepcopy(model), router_replay=mode, **{**options, **settings})
    passes, own = [], trainer.logprobs.training_scores

    def noted(policy, batch, entropy):
        result = own(policy, batch, entropy)
        passes.append(
            [(id(sample), None if sample.routes is None else sample.routes.copy()) for sample in batch.samples]
        )
        return result

    trainer.logprobs.training_scores = noted
    trainer.train()
    return trainer, passes


def test_later_updates_use_the_experts_of_the_first_pass(small_model, tmp_path):
    model = mixture("qwen3_moe", small_model)
    trainer, passes = trained(model, tmp_path / "on", "trainer")
    kept = {}
    for name, routes in (one for held in passes for one in held):
        assert routes is not None
        assert np.array_equal(kept.setdefault(name, routes), routes)
    logs = logs_of(trainer)
    assert [("routing/tokens_differ_frac" in row) for row in logs] == [False, True, True, True] * 2
    assert logs[1]["routing/tokens_differ_frac"] == 0 or logs[1]["step"] % 4 == 2  # other samples, the first pass ahead
    assert max(row.get("routing/tokens_differ_frac", 0) for row in logs) > 0.05  # the policy has moved


def test_one_update_keeps_no_routes(small_model, tmp_path):
    model = mixture("qwen3_moe", small_model)
    _, passes = trained(model, tmp_path, "trainer", num_global_batches=1, iterations=1, max_steps=1)
    assert all(routes is None for held in passes for _, routes in held)


@pytest.mark.parametrize("mode", ["trainer", "rollout"])
def test_a_resumed_run_replays_the_same_routes(small_model, tmp_path, mode):
    model = mixture("qwen3_moe", small_model)
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}

    def made(path):
        own = copy.deepcopy(model)
        engine = TransformersEngine(own, eos_token_ids=[END], returns_routes=mode == "rollout")
        return make_trainer(
            None, path, model=own, engine=engine, router_replay=mode, num_global_batches=2, iterations=2, max_samples=3,
            learning_rate=1e-2, reward=all_different, **options,
        )  # fmt: skip

    whole = made(tmp_path / "run")
    whole.train()
    again = made(tmp_path / "again")
    checkpoint = tmp_path / "run" / "checkpoint-2"
    again.load_pipeline_state(checkpoint)
    held = again.pipeline.batch.samples
    assert all(sample.routes is not None and sample.routes.ndim == 3 for sample in held)
    again.train(resume_from_checkpoint=str(checkpoint))
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, dict(again.model.named_parameters())[name]), name


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_models_without_experts_are_refused(small_model):
    line = r"--moe_router_replay: rollout: the experts of --model cannot be replayed \(it is no mixture of experts\)"
    for check in (lambda model: require_experts(model, "rollout"), lambda model: replay_of(model, "rollout", "cpu")):
        with pytest.raises(ConfigError, match=line):
            check(small_model("qwen3"))
    require_experts(small_model("qwen3"), "off")
    with torch.device("meta"):
        require_experts(small_model("qwen3_moe"), "trainer")


def test_routes_of_another_model_end_the_run(small_model, tmp_path):
    model = mixture("qwen3_moe", small_model)
    trainer = make_trainer(None, tmp_path, model=model, router_replay="rollout")

    def cut(samples):
        for sample in samples:
            sample.routes = np.zeros((len(sample.prompt_ids) + len(sample.token_ids) - 1, 1, 2), dtype=np.uint8)

    with pytest.raises(NumericError, match="the experts of 1 layers, and the policy has 2"):
        one_step(trainer, cut)


def test_rows_of_all_layers_are_read_by_the_number_of_the_layer(small_model, tmp_path):
    model = small_model("deepseek_v3", n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1)
    replay = replay_of(model.eval(), "rollout", torch.device("cpu"))
    assert replay.routing.layers == [1]
    routes = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    assert np.array_equal(replay._of_layers(routes), routes[:, 1:])
    assert isinstance(model, nn.Module)


def test_a_sample_without_the_engines_experts_ends_the_run(small_model, tmp_path):
    model = mixture("qwen3_moe", small_model)
    engine = TransformersEngine(model, eos_token_ids=[END])
    trainer = make_trainer(None, tmp_path, model=model, engine=engine, router_replay="rollout")
    with pytest.raises(NumericError, match="8 of 8 samples lack those of the engine; this is a bug"):
        one_step(trainer)
