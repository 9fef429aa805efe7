"""A GRPO trainer from its own parts, on a nano model, with rewards computed in this process."""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import small_runs
import torch
from sources import source_of

from swift.observability.metrics import MetricStore
from swift.rl.losses import LossConfig
from swift.rollout.batches import PipelineConfig
from swift.rollout.collector import RolloutCollector
from swift.rollout.engines.transformers import TransformersEngine
from swift.rollout.pipeline import RolloutPipeline
from swift.rollout.round import EngineShare
from swift.rollout.scheduler import RolloutScheduler
from swift.rollout.weights.policy import PolicyWeights, adapter_weights
from swift.rollout.weights.sync import WeightSync
from swift.trainers.distributed import Collectives
from swift.trainers.grpo.callbacks import PipelineCallback
from swift.trainers.grpo.settings import GRPOSettings
from swift.trainers.grpo.trainer import GRPOTrainer
from swift.trainers.memory.colocate import ColocateCycle
from swift.trainers.memory.offload import model_tensors, optimizer_tensors
from swift.trainers.session import SignalTrap
from swift.trainers.trl.callbacks import StopOnSignal
from swift.types import GroupScores, SamplingParams

END = 262  # never sampled by these tests' rewards; completions end at their length


class Scorer(small_runs.Scorer):
    """Scores with `reward(completion, prompt)`; None and exclusions as given."""

    def __init__(self, reward):
        self.reward = reward

    def submit_group(self, group, progress):
        future = Future()
        values = [[self.reward(completion, group.prompt)] for completion in group.completions]
        excluded = ["no_reward" if value == [None] else None for value in values]
        future.set_result(GroupScores(values, excluded))
        return future


class LateScorer(Scorer):
    """Scores on threads of its own, and only once `seen` is set, which is cleared after each round."""

    WAIT_S = 60.0

    def __init__(self, reward, seen, *, needs_whole_batch=False):
        super().__init__(reward)
        self.seen, self.needs_whole_batch, self.calls = seen, needs_whole_batch, 0
        self.pool = ThreadPoolExecutor(max_workers=8)

    def submit_group(self, group, progress):
        return self.pool.submit(self._score, group, progress)

    def _score(self, group, progress):
        assert self.seen.wait(self.WAIT_S), "nobody did anything while rewards were computed"
        self.calls += 1
        return super().submit_group(group, progress).result()

    def drain_metrics(self, groups=None):
        self.seen.clear()
        return {}


def share_of_even_tokens(completion, prompt):
    """A reward with spread that a model can learn."""
    return sum(token % 2 == 0 for token in completion.token_ids) / len(completion.token_ids)


def all_different(completion, prompt):
    """A reward that no two completions share, so that every sample has an advantage."""
    return sum(token * (t + 1) for t, token in enumerate(completion.token_ids)) / 1000


def policy_of(folder, *, dtype=torch.float32, lora=None, seed=0):
    """A model, with LoRA of these options if there are any."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model if lora is None else get_peft_model(model, LoraConfig(target_modules="all-linear", **lora))


def make_trainer(
    folder,
    output_dir,
    *,
    model=None,
    reference=None,
    teacher=None,
    reward=all_different,
    generations=4,
    global_batch=8,
    num_global_batches=1,
    iterations=1,
    prompts=8,
    overlong_filter=False,
    eval_prompts=(),
    engine=None,
    scorer=None,
    depth=0,
    interval=1,
    sampling=None,
    eos=(),
    sequence_group=None,
    async_save=False,
    stochastic_rounding=False,
    **arguments,
):
    """A trainer whose global batch has `global_batch` completions.

    `engine` has weights of its own, which are published to it every `interval` steps; without it the model samples
    itself. `depth`: rounds sampled ahead on a thread. `arguments`: of `GRPOSettings` and TrainingArguments.
    """
    from transformers import AutoModelForCausalLM, TrainingArguments

    model = model if model is not None else AutoModelForCausalLM.from_pretrained(folder)
    collectives = Collectives()
    metrics = MetricStore()
    rounds = []
    settings = {"loss": LossConfig(), "temperature": 1.0, "max_completion_length": 8, "per_device": 8, "max_samples": 8}
    for one in dataclasses.fields(GRPOSettings):
        if one.name in arguments:
            settings[one.name] = arguments.pop(one.name)
    routes = settings.get("router_replay") == "rollout"
    engine = engine or TransformersEngine(model, eos_token_ids=list(eos), returns_routes=routes)
    distribution = SamplingParams(settings["max_completion_length"], temperature=1.0, **(sampling or {}))
    share = EngineShare(collectives.rank, collectives.world_size)
    collector = RolloutCollector(source_of(engine), distribution, 42, str, scorer or Scorer(reward), collectives, share)
    scheduler = RolloutScheduler(
        small_runs.NumberedPrompts(prompts),
        groups_per_batch=global_batch * num_global_batches // generations,
        batches_per_epoch=None,
    )
    config = PipelineConfig(
        num_generations=generations,
        num_generations_eval=generations,
        generation_batches=1,
        num_global_batches=num_global_batches,
        num_iterations=iterations,
        reward_weights=[1.0],
        overlong_filter=overlong_filter,
        prefetch_depth=depth,
    )

    def observe(scored):
        rounds.append(scored)
        if scored.split == "train":
            metrics.add_many(scored.metrics)

    weight_sync = WeightSync(
        engine, source=lambda: PolicyWeights(model), interval=interval, ranks=collectives, timer=metrics.timer
    )
    pipeline = RolloutPipeline(
        scheduler, collector, config, timer=metrics.timer, observer=observe, weight_sync=weight_sync
    )
    options = {
        "max_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "ignore_data_skip": True,
        "lr_scheduler_type": "constant",
        **arguments,
    }
    beside = {"ref_logprobs": reference, "teacher_logprobs": teacher}
    trainer = GRPOTrainer(
        model=model,
        args=TrainingArguments(str(output_dir), **options),
        settings=GRPOSettings(**settings),
        pipeline=pipeline,
        collectives=collectives,
        metrics=metrics,
        beside={name: model for name, model in beside.items() if model is not None},
        eval_prompts=eval_prompts,
        sequence_group=sequence_group,
        async_save=async_save,
        stochastic_rounding=stochastic_rounding,
    )
    if trainer.logprobs.frozen:
        pipeline.batches.frozen_pass = trainer.logprobs.score_frozen
    trainer.rounds = rounds
    trainer.add_callback(PipelineCallback(trainer, epoch=lambda: 0.0))
    trainer.add_callback(StopOnSignal(SignalTrap(), collectives))
    return trainer


class Step(NamedTuple):
    """What one global batch makes, before clipping or an update."""

    gradients: dict
    values: dict
    samples: list


def one_step(trainer, prepare=lambda samples: None, arriving=None):
    """A step on a global batch that `prepare` may change."""
    trainer.create_optimizer()
    batch = next(trainer.pipeline.steps(trainer.progress))
    prepare(batch.samples)
    batch.arriving = arriving
    trainer.training_step(trainer.model, batch)
    trainer._get_grad_norm(trainer.model)  # as Trainer does next; metrics are read there
    gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    return Step(gradients, trainer.metrics.commit(), batch.samples)


def relative_difference(a, b):
    total = sum(float((a[name] - b[name]).norm() ** 2) for name in a) ** 0.5
    return total / sum(float(gradient.norm() ** 2) for gradient in b.values()) ** 0.5


def passes_of(trainer, *, with_tokens=False):
    """The completions (and tokens) of each forward pass that the trainer will make."""
    passes, original = [], trainer.logprobs.scores

    def counting(model, batch, *more, **named):
        size = len(batch.samples)
        passes.append((size, batch.tokens.inputs["input_ids"].numel()) if with_tokens else size)
        return original(model, batch, *more, **named)

    trainer.logprobs.scores = counting
    return passes


def logs_of(trainer):
    """Training log rows."""
    return [row for row in trainer.state.log_history if "loss" in row]


def colocate(trainer, engine, flags, *, batches=None, adapters=False):
    """Sample with an engine that has weights of its own; with `flags`, engine and trainer take turns.

    `batches`: groups of layers that a weight sync gathers at a time. `adapters`: only they are sent.

    Returns:
        what is noted while it samples: bytes of model and optimizer on the device, and lines of the log.
    """
    for tensor in (*trainer.model.parameters(), *trainer.model.buffers()):
        tensor.data = tensor.data.clone()  # what is mapped from a file cannot be released
    weight_sync = WeightSync(
        engine,
        source=lambda: PolicyWeights(trainer.model, move_model_batches=batches),
        adapter=(lambda: adapter_weights(trainer.model)) if adapters else None,
        ranks=trainer.collectives,
    )
    pipeline = trainer.pipeline
    pipeline.collector.source, pipeline.weight_sync = source_of(engine), weight_sync
    pipeline.collector.around = contextlib.nullcontext
    noted = {"seen": [], "lines": []}
    if flags is None:
        return noted
    cycle = ColocateCycle(
        engine,
        weight_sync,
        **flags,
        log=noted["lines"].append,
        metrics=trainer.metrics,
        ranks=trainer.collectives,
        device=torch.device("cpu"),
        copies_on_host=True,
        limit_s=60.0,
    )
    cycle.attach(trainer.model, lambda: trainer.optimizer)

    @contextlib.contextmanager
    def phase(step, *, current=False):
        with cycle(step, current=current):
            noted["seen"].append(sizes(trainer))
            yield

    pipeline.phase = phase
    return noted


def sizes(trainer):
    """Bytes of model and optimizer that are on the device."""

    def held(tensors):
        plain = [local(tensor) for tensor in tensors]
        return {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in plain}

    model, optimizer = held(model_tensors(trainer.model)), held(optimizer_tensors(trainer.optimizer))
    return [sum(model.values()), sum(size for key, size in optimizer.items() if key not in model)]


def local(tensor):
    """A rank's own part."""
    return getattr(tensor, "_local_tensor", tensor)
