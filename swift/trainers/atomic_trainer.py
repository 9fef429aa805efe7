"""A transformers.Trainer whose checkpoints are valid or do not exist.

Overridden methods:

    _prepare_for_training  shards the model (ZeRO-3, FSDP2) layer by layer
    _load_from_checkpoint, _load_optimizer_and_scheduler, _load_rng_state   load tensors and data only: see `loading`
    _save_checkpoint       writes to a staging folder, which is sealed and renamed (`swift.trainers.checkpoint`)
    _save_optimizer_and_scheduler  FSDP's state in shards; with `async_save`, from a copy, while training goes on
    _get_output_dir        while that is being written, the staging folder
    _save                  stores gathered weights as if they had never been sharded
    _load_best_model       counts its time as saving
    _issue_warnings_after_load  accepts that tied weights are stored once
    create_optimizer       gives parameters their learning rates; updates 16-bit weights through float32 masters,
                           or rounds them stochastically
    create_scheduler       accepts a warmup that lasts to the end
    train, get_batch_samples, training_step   save the last step if the next one fails: see `saved_if_it_fails`;
                           notice the end of a save in the background

A subclass may add to a checkpoint: `state_beside_weights` gathers on all ranks, `add_to_checkpoint` writes on rank 0.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from transformers import Trainer

from swift.elastic import note_checkpoint
from swift.errors import ConfigError, NumericError, first_line
from swift.models.checkpoint_tensors import (
    as_saved_unsharded,
    computing_dtype,
    is_peft,
    is_rearranged,
    load_rearranged,
)
from swift.models.quantisation import keep_quant_states
from swift.models.rates import Rates
from swift.models.sharded import is_sharding, shard
from swift.models.tuners import load_relative, make_relative
from swift.models.unloaded import keep_unloaded
from swift.models.vision import copy_files, vision_of
from swift.observability.files import write_json, writing
from swift.rollout.engines.process import random_state
from swift.trainers.checkpoint import commit_checkpoint, entries, loading, rotate, staging_folder, step_of
from swift.trainers.distributed import Collectives
from swift.trainers.optimizers.master_weights import keep_master_weights
from swift.trainers.optimizers.stochastic_rounding import StochasticRounding
from swift.trainers.parallel import resharding, shards, zero_checkpoints

if TYPE_CHECKING:
    from swift.observability.metrics import MetricStore


def _nothing() -> list[Path]:
    return []


class AtomicTrainer(Trainer):
    """Saves checkpoints atomically, of which `save_total_limit` stay, each with `run_settings` in args.json.

    async_save: the state of the optimizer (FSDP: and the float32 weights) is copied to the host, and written, hashed
    and synced to the disk while training goes on. A checkpoint exists once that is done; a failure is raised at the
    step that follows. stochastic_rounding: bfloat16 weights have no float32 masters. rates: learning rates that
    differ.
    """

    def __init__(
        self,
        *,
        collectives: Collectives,
        metrics: MetricStore,
        run_settings: Mapping[str, Any] | None = None,
        save_total_limit: int | None = None,
        async_save: bool = False,
        stochastic_rounding: bool = False,
        rates: Rates | None = None,
        **trainer_arguments: Any,
    ) -> None:
        self.collectives = collectives
        self.metrics = metrics
        self.run_settings = dict(run_settings or {})
        self.save_total_limit = save_total_limit
        self.async_save = async_save
        self.stochastic_rounding = stochastic_rounding
        self.rates = rates or Rates()
        self._staging: Path | None = None
        self._write_late: Callable[[], list[Path]] = _nothing
        self._background: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "save") if async_save else None
        self._pending: Future[None] | None = None
        self._saved_step = -1
        self._trained: dict[str, nn.Parameter] = {}
        self._reset_random = random_state()
        super().__init__(**trainer_arguments)
        self._savers = collectives.again() if async_save else collectives

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's; FSDP2 would round what models return, log-probs and losses too, to 16 bits."""
        super().create_accelerator_and_postprocess()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.mixed_precision_policy is not None:
            plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)
        if (mesh := self.accelerator.torch_device_mesh) is not None:  # accelerate makes its groups without a timeout
            for part in (mesh, mesh[tuple(self.accelerator.parallelism_config.fsdp_dim_names)]):
                for group in part.get_all_groups():
                    _set_pg_timeout(timedelta(seconds=self.args.ddp_timeout), group)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Trainer's, for a model that is already sharded; a checkpoint may be of a run that sharded in another way."""
        folder = Path(resume_from_checkpoint or "")
        recuts = resume_from_checkpoint is not None and resharding.way_of(folder) != self._way
        if recuts and self._way:
            with loading(folder):
                self._load_whole(folder)
        if is_sharding(self.accelerator):
            keep_quant_states(self.model, self.accelerator.device)
            shard(self.model, self.accelerator)
        kept = None if recuts else resume_from_checkpoint
        prepared = super()._prepare_for_training(max_steps, train_dataloader, kept)
        if recuts:
            with loading(folder):
                self._load_recut(folder)
        return prepared

    @property
    def _way(self) -> str:
        """How this run shards, as `resharding.way_of` names it."""
        if self.is_deepspeed_enabled:
            return "zero3" if self.accelerator.state.deepspeed_plugin.zero_stage == 3 else "zero"
        return "fsdp" if self.is_fsdp_enabled else ""

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Trainer's; small updates of 16-bit weights are not rounded away."""
        made = self.optimizer is None
        optimizer: Optimizer = super().create_optimizer(model)
        if made:
            self.rates.give(optimizer, self.model)
            names = {parameter: name for name, parameter in self.model.named_parameters()}
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._trained = {names[one]: one for one in parameters if one in names}  # not masters on another device
        # fp16's loss scaling needs gradients at the weights that the optimizer holds; ZeRO and FSDP have own masters
        if made and not (self.args.fp16 or self.is_deepspeed_enabled or self.is_fsdp_enabled):
            rounding = StochasticRounding(self.args.seed) if self.stochastic_rounding else None
            keep_master_weights(optimizer, rounding=rounding)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Trainer's; a polynomial would be divided by the steps after the warmup, of which there may be none."""
        warmup = self.args.get_warmup_steps(num_training_steps)
        if self.args.lr_scheduler_type == "polynomial" and warmup >= num_training_steps:
            self.args.warmup_steps, num_training_steps = warmup, warmup + 1
        return super().create_scheduler(num_training_steps, optimizer)

    def state_beside_weights(self) -> Any:
        """State that a checkpoint holds beside Trainer's files and the settings; collective."""

    def add_to_checkpoint(self, folder: Path, state: Any) -> None:
        """Write the result of `state_beside_weights`, on rank 0."""

    # --- an end between two updates -----------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | None = None, **arguments: Any) -> Any:
        """Trainer's; the checkpoint that it resumes from is not saved again."""
        if resume_from_checkpoint is not None:
            self._saved_step = step_of(Path(resume_from_checkpoint)) or -1
        try:
            result = super().train(resume_from_checkpoint=resume_from_checkpoint, **arguments)
        except BaseException as error:
            if self._pending is not None and (failure := self._pending.exception()) is not None:  # waits for it
                error.add_note(f"checkpoint-{self._saved_step}: cannot be saved: {first_line(failure)}")
            raise
        self._finish_save()
        return result

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Trainer's; a metric that evaluation does not give is refused."""
        name = str(self.args.metric_for_best_model).removeprefix("eval_")
        known = [metric.removeprefix("eval_") for metric in metrics if metric.startswith("eval_")]
        if self.args.metric_for_best_model is not None and name not in known:
            raise ConfigError(f"--metric_for_best_model: {name}: not measured; there are: {', '.join(sorted(known))}")
        return bool(super()._determine_best_metric(metrics, trial))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Trainer's, of all rows: an incomplete last batch is left out of training only."""
        drops, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.args.dataloader_drop_last = drops

    def get_batch_samples(self, *arguments: Any, **named: Any) -> tuple[list, Any]:
        """Trainer's; the first call of a step. Where the data end, so does the epoch."""
        self.begin_step()
        with self.saved_if_it_fails():
            batch, items = super().get_batch_samples(*arguments, **named)
        self.control.should_epoch_stop = self.control.should_epoch_stop or not batch
        return batch, items

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Trainer's; a micro-batch."""
        with self.saved_if_it_fails():
            return super().training_step(*arguments, **named)

    def begin_step(self) -> None:
        """Remember the random state after the last step, because the next step may draw numbers before it fails."""
        if self._pending is not None and not self.collectives.any(not self._pending.done()):
            self._finish_save()
        self._reset_random = random_state()

    @contextlib.contextmanager
    def saved_if_it_fails(self) -> Iterator[None]:
        """Save the last step if the block fails, before the failure propagates.

        Only if weights and state are still those of the last step, so that a resumed run continues exactly.
        """
        try:
            yield
        except Exception as error:
            if 0 < self.state.global_step != self._saved_step and self.is_as_after_last_step(error):
                self._save_after(error)
            raise

    def is_as_after_last_step(self, error: Exception) -> bool:
        """Whether `error` left weights and state alone, on all ranks: with several, one alone may have failed."""
        return not (isinstance(error, NumericError) or self.collectives.active or self.is_deepspeed_enabled)

    def _save_after(self, error: Exception) -> None:
        self.model.zero_grad(set_to_none=True)  # their memory
        self._reset_random()
        try:
            self._save_checkpoint(self.model, None)
            self._finish_save()
        except Exception as failure:
            error.add_note(f"checkpoint-{self.state.global_step}: cannot be saved: {first_line(failure)}")

    # --- reading and writing ------------------------------------------------------------------------------------

    def _load_best_model(self) -> None:
        """Trainer's; in the phase "save", since reading a large model takes as long as saving it."""
        self._finish_save()
        best = Path(self.state.best_model_checkpoint)
        with self.metrics.timer("save"), loading(best):
            if (best / shards.FOLDER).is_dir():
                shards.load_weights(best / shards.FOLDER, self.model)
            elif hasattr(self.model, "adapter_start"):
                load_relative(self.model, best)
            elif self._is_rearranged(best):
                load_rearranged(self.model, best)
            else:
                super()._load_best_model()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Trainer's."""
        folder = Path(resume_from_checkpoint)
        with loading(resume_from_checkpoint):
            if self._way == resharding.way_of(folder) == "fsdp":
                shards.load_weights(folder / shards.FOLDER, self.model)
            else:
                self._load_whole(folder)

    def _load_whole(self, folder: Path) -> None:
        """The weights of a checkpoint into a model that is not sharded, or not yet."""
        sharded, self.is_fsdp_enabled = self._way == "fsdp", False  # it would seek FSDP's own files
        try:
            if hasattr(self.model, "adapter_start"):
                load_relative(self.model, folder)
            elif not is_peft(self.model) and is_rearranged(self.model, folder):
                load_rearranged(self.model, folder)
            else:
                super()._load_from_checkpoint(str(folder))
        finally:
            self.is_fsdp_enabled = sharded

    def _load_recut(self, folder: Path) -> None:
        """The state of optimizer and schedule of a run that sharded in another way."""
        ranks = self.collectives
        with resharding.read(folder, list(self._trained), ranks) as saved:
            if self.is_deepspeed_enabled:
                with zero_checkpoints.scratch(folder, "cut", ranks) as room:
                    resharding.load_zero(self.model_wrapped.optimizer, self._trained, saved, room, ranks)
            else:
                resharding.load(self.optimizer.optimizer, self._trained, saved)
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)  # of accelerate's
        resharding.load_schedule(schedule, torch.load(folder / "scheduler.pt", weights_only=True))

    def _is_rearranged(self, folder: Path) -> bool:
        """Whether the files have other names than the model, such as of fused experts, by which Trainer would load."""
        return not self._way and not is_peft(self.model) and is_rearranged(self.model, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Trainer's."""
        folder = Path(checkpoint or "") / shards.FOLDER
        with loading(checkpoint or ""):
            if checkpoint is not None and folder.is_dir():
                shards.load_optimizer(folder, self.model, self.optimizer)
                schedule = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
                self.lr_scheduler.load_state_dict(schedule)
            else:
                super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Trainer's."""
        with loading(checkpoint or ""):
            super()._load_rng_state(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Tied weights are stored once, so their other names are not missing."""
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(
            SimpleNamespace(missing_keys=missing, unexpected_keys=load_result.unexpected_keys)
        )
        self.model.tie_weights()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Weights that were gathered to be saved are written as if they had never been sharded."""
        if state_dict is None or is_peft(self.model):
            super()._save(output_dir, state_dict)
            if hasattr(self.model, "adapter_start"):
                make_relative(self.model, Path(output_dir or self.args.output_dir))
            return
        super()._save(output_dir, as_saved_unsharded(self.model, state_dict))
        if (dtype := computing_dtype(self.model)) is not None:  # the config got that of the masters
            self.model.config.dtype = dtype
            self.model.config.save_pretrained(output_dir or self.args.output_dir)

    def _get_output_dir(self, trial: Any) -> str:
        """While a checkpoint is being written, the staging folder."""
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Trainer's; FSDP's state, or a copy of the optimizer's, is left to `_write_late`."""
        if self.is_deepspeed_enabled or not (self.is_fsdp_enabled or self.async_save):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        folder = Path(output_dir)
        if self.is_fsdp_enabled:
            state = shards.Shards(self.model, self.optimizer, copied=self.async_save)
            self._write_late = lambda: state.write(folder / shards.FOLDER, self._savers)
        elif self.args.should_save:
            copy = tree_map_only(Tensor, lambda tensor: tensor.to("cpu", copy=True), self.optimizer.state_dict())

            def write() -> list[Path]:
                torch.save(copy, folder / "optimizer.pt")
                return []

            self._write_late = write
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint so that it is valid or does not exist."""
        if self.state.global_step != self._saved_step:
            self._finish_save()
            self._saved_step = self.state.global_step
            with self.metrics.timer("save"):
                self._write_checkpoint(model, trial)

    def _write_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step, run_dir = self.state.global_step, Path(self.args.output_dir)
        final, staging = run_dir / f"checkpoint-{step}", staging_folder(run_dir, step)
        state = self.state_beside_weights()
        with self.collectives.together(), writing(run_dir):
            self._require_finite(step)
            if self.collectives.is_main:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir()
        self._staging = staging
        try:
            with self.collectives.together(), writing(run_dir):
                # without it Trainer does not look for the best checkpoint in the staging folder, behind a barrier of
                # its own, which a rank whose disk is full would never reach
                best, self.state.best_global_step = self.state.best_global_step, None
                try:
                    super()._save_checkpoint(model, trial)
                finally:
                    self.state.best_global_step = best
                if best and (best == step or (run_dir / f"checkpoint-{best}").exists()):
                    self.state.best_model_checkpoint = str(run_dir / f"checkpoint-{best}")
                if self.collectives.is_main:
                    self.state.save_to_json(str(staging / final.name / "trainer_state.json"))
                    write_json(staging / final.name / "args.json", self.run_settings, indent=1)
                    if (vision := vision_of(self.model)) is not None:
                        copy_files(vision.folder, staging / final.name)
                        keep_unloaded(vision.folder, staging / final.name)
                    self.add_to_checkpoint(staging / final.name, state)
        except BaseException:
            self._remove(staging)
            raise
        finally:
            self._staging = None
        write, self._write_late = self._write_late, _nothing
        best_checkpoint, ends = self.state.best_model_checkpoint, bool(self.control.should_training_stop)
        seal = partial(self._seal, step, staging / final.name, final, write, best_checkpoint, ends=ends)
        if self._background is not None:
            self._pending = self._background.submit(seal)
        else:
            seal()

    def _require_finite(self, step: int) -> None:
        """Raises NumericError: a weight that this rank trains is not finite, after an update that nothing followed."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        own = [getattr(one, "ds_tensor", getattr(one, "_local_tensor", one)).detach() for one in trained]
        found = [tensor.isfinite().all() for tensor in own if tensor.numel()]
        if found and not torch.stack(found).all():
            raise NumericError(
                f"weights: not finite after step {step}, so that they are not saved; lower --learning_rate or "
                "--weight_decay"
            )

    def _seal(
        self, step: int, folder: Path, final: Path, write: Callable[[], list[Path]], best: str | None, *, ends: bool
    ) -> None:
        """Write what is left, each rank its own, and let the checkpoint exist; perhaps while training goes on."""
        ranks = self._savers
        try:
            with ranks.together(), writing(final.parent):
                own = entries(folder, write())
            parts = ranks.gather(own)
            with ranks.together(), writing(final.parent):
                if parts is not None:
                    note = partial(note_checkpoint, ends=ends)
                    commit_checkpoint(folder, final, step=step, known=ChainMap(*parts), announce=note)
                    if self.save_total_limit:
                        rotate(final.parent, self.save_total_limit, keep=best)
        finally:
            self._remove(folder.parent)

    def _finish_save(self) -> None:
        """Wait until the last checkpoint exists, if it is still being written; its failure is raised on all ranks."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self.metrics.timer("save"), self.collectives.together(), self.collectives.waiting():
                pending.result()

    def _remove(self, staging: Path) -> None:
        if self.collectives.is_main:
            shutil.rmtree(staging, ignore_errors=True)
