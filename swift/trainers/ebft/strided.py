"""Strided EBFT (arXiv:2603.12248): documents are continued from many places at once, without an engine.

A transformers Trainer whose loss samples blocks, compares their features with those of the document, and returns

    rl_coef sum(-A lp) / N_rl  +  ce_coef sum(-lp at temperature 1) / N_ce

over the sampled tokens (lp at the temperature that samples) and the documents' own, once each. N_rl and N_ce count the
global batch: all micro-batches and ranks. The seed of a token depends on the run's seed, the step, its document and its
position there, so ranks, batches and a resume change no sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swift.errors import ConfigError
from swift.models.attention.choice import choose_attention
from swift.models.autocast import autocasting
from swift.models.features import FeatureNetwork, load_features
from swift.models.scoring import ScoreRequest, prepare_scoring, score_requests
from swift.models.sharded_sampling import gathered_for_generation
from swift.models.transfer import to_device
from swift.rl.energy import PooledMap, energies, pooled_whitening
from swift.rl.linear_logprobs import LogitMap
from swift.trainers.atomic_trainer import AtomicTrainer
from swift.trainers.ebft.blocks import (
    Blocks,
    Document,
    block_features,
    block_stream,
    block_uniforms,
    joined_ids,
    reference_features,
    sample_blocks,
)
from swift.trainers.ebft.documents import encode
from swift.trainers.ebft.rewards import energy_options
from swift.trainers.trl.method import Method, load_texts

if TYPE_CHECKING:
    from transformers.trainer_utils import EvalLoopOutput

    from swift.arguments.ebft_strided import StridedArguments

METRICS = (
    "ebft/alignment", "ebft/diversity", "ebft/reward", "ebft/effective_reward", "ebft/cfm_loss", "ebft/advantages_std",
    "ebft/rl_loss", "ebft/ce_loss", "ebft/num_blocks", "ebft/anchor_offset", "ebft/rank_deficient_frac",
)  # fmt: skip
"""What is logged, as means over log windows; `num_blocks` and `anchor_offset` over documents, the rest over blocks or
tokens."""


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """Statistics of the global batch that its micro-batches need.

    num_sampled, num_targets: sampled tokens, and those with a cross-entropy. pooled: the map of pooled whitening, by
    all references.
    """

    num_sampled: int
    num_targets: int
    pooled: PooledMap | None


class StridedSteps(AtomicTrainer):
    """The trainer; what it overrides:

    _prepare_for_training   shards the frozen network too
    get_batch_samples   counts the global batch
    compute_loss        samples, scores, returns the loss
    log                 adds the metrics of the window
    prediction_step, evaluation_loop    the same on evaluation documents, with samples that no step changes

    Args:
        settings: of the run.
        features: the frozen network.
    """

    def __init__(self, *, settings: StridedArguments, features: FeatureNetwork, **trainer_arguments: Any) -> None:
        self.settings, self.features = settings, features
        self._totals: dict[str, dict[str, list[Any]]] = {"train": {}, "eval": {}}
        super().__init__(**trainer_arguments)
        self.loss_is_scaled_for_ga = True

    def _prepare_for_training(self, *arguments: Any, **named: Any) -> Any:
        """Wrap the model, and prepare the network as it is wrapped."""
        prepared = super()._prepare_for_training(*arguments, **named)
        self.features.model.prepare(self.accelerator)
        return prepared

    def get_batch_samples(self, *arguments: Any, **named: Any) -> tuple[list, GlobalBatch]:
        """The micro-batches of a step, and statistics of the global batch."""
        batches, _ = super().get_batch_samples(*arguments, **named)
        documents = [document for batch in batches for document in batch["documents"]]
        return batches, self._global_batch(documents, len(documents), samples=bool(self.settings.ebft_rl_coef))

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """This rank's and micro-batch's part of the loss, times the number of ranks, over which gradients are means."""
        documents = inputs["documents"]
        return self._loss(model, documents, len(documents), num_items_in_batch, "train")

    def prediction_step(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        """Books an evaluation batch; the first documents are repeated where the ranks' last batches are not full."""
        documents, last = inputs["documents"], self.accelerator.gradient_state
        counted = len(documents)
        if last.end_of_dataloader and last.remainder > 0:
            counted = min(counted, max(0, last.remainder - self.collectives.rank * counted))
        with torch.no_grad(), self.compute_loss_context_manager():
            batch = self._global_batch(documents, counted, samples=True)
            return self._loss(model, documents, counted, batch, "eval").detach(), None, None

    def evaluation_loop(self, *arguments: Any, metric_key_prefix: str = "eval", **named: Any) -> EvalLoopOutput:
        """Trainer's, with the metrics; the loss is that of all documents, however they are cut into batches."""
        self._totals["eval"] = {}
        output = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **named)
        means, settings = self._means("eval"), self.settings
        means["loss"] = sum(
            coefficient * means.get(name, 0.0)
            for name, coefficient in (("ebft/rl_loss", settings.ebft_rl_coef), ("ebft/ce_loss", settings.ebft_ce_coef))
        )
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in means.items()})
        return output

    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        """Trainer's, with the metrics of the steps since the last line."""
        super().log({**logs, **self._means("train")} if "loss" in logs else logs, *arguments)

    # --- a micro-batch ------------------------------------------------------------------------------------------

    def _global_batch(self, documents: Sequence[Document], counted: int, *, samples: bool) -> GlobalBatch:
        """Of all ranks' documents the first `counted` of each; samples: some will be compared with them."""
        settings, own = self.settings, documents[:counted]
        per_block = settings.ebft_n_samples_per_prompt * settings.ebft_generate_max_len
        num_blocks = sum(len(document.anchors) for document in own)
        mine = [per_block * num_blocks, sum(len(document.targets) for document in own)]
        num_sampled, num_targets = map(int, self.collectives.sum([float(count) for count in mine]))
        pooled = None
        if samples and settings.ebft_whitening == "pooled":
            device = self.args.device
            size, length = self.args.per_device_train_batch_size, settings.ebft_generate_max_len
            features = torch.cat(
                [
                    reference_features(self.features, documents[start : start + size], length, device)
                    for start in range(0, len(documents), size)
                ]
            )
            parts = self.collectives.all_gather(features[:num_blocks].cpu())
            pooled = pooled_whitening(torch.cat(parts).to(device), settings.ebft_whitening_shrinkage)
        return GlobalBatch(num_sampled, num_targets, pooled)

    def _loss(
        self, model: nn.Module, documents: Sequence[Document], counted: int, batch: GlobalBatch, phase: str
    ) -> Tensor:
        settings, evaluates = self.settings, phase == "eval"
        num_samples = settings.ebft_n_samples_per_prompt if settings.ebft_rl_coef or evaluates else 0
        stream = block_stream(documents, num_samples=num_samples, length=settings.ebft_generate_max_len)
        ids = joined_ids(documents, self.args.device)
        blocks = Blocks(stream, ids, ids.new_empty(0))
        requests, loss = [], torch.zeros((), device=ids.device)
        if num_samples:
            tokens = self._sampled(model, documents, ids, stream, phase)
            blocks = Blocks(stream, ids, tokens)
            advantages = self._advantages(blocks, counted, batch, phase)  # before there is a graph
            predictors = to_device(stream.predecessors().flatten(), ids.device)
            logit_map = LogitMap(temperature=settings.ebft_temperature)
            requests.append(ScoreRequest(predictors, tokens.flatten(), logit_map, "none"))
        if settings.ebft_ce_coef or evaluates:
            own = zip(stream.starts, documents[:counted], strict=False)
            places = [start + at for start, document in own for at in document.targets]
            index = to_device(places, ids.device, dtype=torch.long)
            requests.append(ScoreRequest(index - 1, ids[index], LogitMap(), "none"))
        found = list(score_requests(model, blocks.inputs(), tuple(requests)))
        if num_samples:
            logprobs = found.pop(0)
            surrogate = -(advantages * logprobs.view(tokens.shape)[:, : len(advantages)]).sum()
            self._note(phase, "ebft/rl_loss", surrogate, len(advantages) * len(tokens))
            loss = loss + settings.ebft_rl_coef * surrogate / max(1, batch.num_sampled)
        if found:
            entropy = -found[0].sum()
            self._note(phase, "ebft/ce_loss", entropy, index.numel())
            loss = loss + settings.ebft_ce_coef * entropy / max(1, batch.num_targets)
        return loss * self.collectives.world_size

    def _sampled(self, model: Any, documents: Sequence[Document], ids: Tensor, stream: Any, phase: str) -> Tensor:
        """Tokens [g, C] of the policy as it is."""
        settings, module = self.settings, getattr(model, "module", model)
        step = self.state.global_step if phase == "train" else phase
        uniforms = block_uniforms(
            documents, settings.ebft_n_samples_per_prompt, settings.ebft_generate_max_len, settings.seed, step
        )
        trains = module.training
        module.eval()
        try:
            with gathered_for_generation(module), autocasting(module):
                return sample_blocks(
                    module,
                    ids,
                    stream,
                    uniforms,
                    temperature=settings.ebft_temperature,
                    top_p=settings.ebft_top_p,
                )
        finally:
            module.train(trains)

    def _advantages(self, blocks: Blocks, counted: int, batch: GlobalBatch, phase: str) -> Tensor:
        """[C] of each column of the documents that count; all its tokens have it."""
        settings, num_samples = self.settings, self.settings.ebft_n_samples_per_prompt
        columns = [column for column in blocks.stream.columns if column[0] < counted]
        raw, own = (
            tensor[: len(columns) // num_samples] for tensor in block_features(self.features, blocks, num_samples)
        )
        if not columns:
            return raw.new_empty(0)
        found = energies(raw, own, **energy_options(settings), pooled=batch.pooled)
        num_blocks = len(own)
        for name, value in found.metrics.items():
            self._note(phase, name, value * num_blocks, num_blocks)
        self._note(phase, "ebft/num_blocks", num_blocks, counted)
        first = dict(reversed(columns))  # the first anchor of each document
        self._note(phase, "ebft/anchor_offset", sum(first.values()), counted)
        return found.advantages.flatten()

    # --- metrics ------------------------------------------------------------------------------------------------

    def _note(self, phase: str, name: str, total: Tensor | float, weight: float) -> None:
        sums = self._totals[phase].setdefault(name, [0.0, 0.0])
        sums[0] = sums[0] + (total.detach().double() if isinstance(total, Tensor) else total)
        sums[1] += weight

    def _means(self, phase: str) -> dict[str, float]:
        """The metrics since the last call, over all ranks."""
        mine = [self._totals[phase].get(name, [0.0, 0.0]) for name in METRICS]
        sums = self.collectives.sum([float(value) for pair in mine for value in pair])
        self._totals[phase] = {}
        pairs = zip(METRICS, sums[::2], sums[1::2], strict=True)
        return {name: total / weight for name, total, weight in pairs if weight}


def _parts(args: Any, policy: Any) -> dict[str, Any]:
    """Packs the policy.

    Raises:
        ConfigError: it cannot be packed.
    """
    if (obstacle := choose_attention(policy)) is not None:
        raise ConfigError(
            f"--model: {args.model}: {obstacle}: blocks of strided EBFT need packed attention; "
            "use another model, or --ebft_mode structured"
        )
    prepare_scoring(policy)
    return {"settings": args, "features": load_features(args, policy), "data_collator": _documents}


def _documents(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The collator: nothing is padded."""
    return {"documents": tuple(Document(**row) for row in rows)}


STRIDED = Method(
    trainer="transformers:Trainer",
    config="transformers:TrainingArguments",
    encode=encode,
    template=load_texts,
    shares_rows=False,
    options=lambda args: {"remove_unused_columns": False, "label_names": []},
    parts=_parts,
    overrides=(StridedSteps,),
    logged=METRICS,
    shown=(("ebft/cfm_loss", "cfm"), ("ebft/ce_loss", "ce")),
)
