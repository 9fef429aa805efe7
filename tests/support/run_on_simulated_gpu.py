"""`swift` on a simulated GPU: `python run_on_simulated_gpu.py LEDGER rlhf ...` writes what happened there as JSON.

Waits and copies are those from the beginning of the second optimizer step to the end of the last one: what is made once
is made before, and checkpoints are written after.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))

from simulated_gpu import simulated_gpu


def without_kernels():
    """TRL's losses without its Triton kernels, and without products that only CUDA has."""
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    chunked_logprob._TRITON_AVAILABLE = chunked_logprob._MM_OUT_DTYPE = False
    utils.is_triton_available = lambda: False


def with_deepspeed():
    """DeepSpeed's accelerator is that of the process that started this one, which has none."""
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    set_accelerator(CUDA_Accelerator())


def record(ledger):
    """Hooks into the trainers; gives what they find, which a run completes."""
    from transformers.trainer_callback import CallbackHandler

    from swift.observability.curves import Curves
    from swift.trainers.atomic_trainer import AtomicTrainer
    from swift.trainers.ebft.rewards import FeatureRewards
    from swift.trainers.grpo.step import GlobalBatchStep

    found = {"steps": -1}
    begin, end, begin_step = CallbackHandler.on_step_begin, CallbackHandler.on_step_end, AtomicTrainer.begin_step
    passes, passes_of_trl, features = GlobalBatchStep.run, AtomicTrainer.training_step, FeatureRewards.score

    def peak():
        """The most bytes since the last call."""
        most, ledger.peak_bytes = ledger.peak_bytes, ledger.live_bytes
        return most

    def run(step, model, policy, batch, *more):
        peak()
        loss = passes(step, model, policy, batch, *more)
        found["training_bytes"] = peak()
        samples = [batch.samples[i] for i in batch.global_batch()]
        for name, all_ in (("samples", samples), ("references", batch.references)):
            found[name] = [[one.group, one.prompt_ids.size, one.token_ids.size, one.advantage] for one in all_]
        return loss

    def training_step(trainer, *args, **named):
        loss = passes_of_trl(trainer, *args, **named)
        found["training_bytes"] = max(found["training_bytes"], peak())
        return loss

    def score(rewards, groups):
        peak()
        metrics = features(rewards, groups)
        found["feature_bytes"] = peak()
        return metrics

    def on_begin(trainer):
        if found["steps"] == 0:  # of the second step, before its rollout
            ledger.clear()
        begin_step(trainer)

    def on_step_begin(*args):
        found["steps"] += 1
        found["training_bytes"] = 0
        peak()
        return begin(*args)

    def on_step_end(*args):
        for name in ("waits", "copies", "attention"):
            found[name] = [[what, line, count] for (what, line), count in getattr(ledger, name).most_common()]
        found["update_bytes"], found["resident_bytes"] = peak(), ledger.live_bytes
        return end(*args)

    CallbackHandler.on_step_begin, CallbackHandler.on_step_end = on_step_begin, on_step_end
    AtomicTrainer.begin_step, AtomicTrainer.training_step = on_begin, training_step
    GlobalBatchStep.run, FeatureRewards.score = run, score
    Curves._draw = lambda curves: None  # which takes as long as a step
    return found


def main():
    path, *words = sys.argv[1:]
    if "grpo" not in words:
        without_kernels()
    with simulated_gpu() as ledger:
        if "--deepspeed" in words:
            with_deepspeed()
        import swift.cli.main as cli

        found = record(ledger)
        code = cli.main(words)
    Path(path).write_text(json.dumps({**found, "operations": ledger.operations}))
    return code


if __name__ == "__main__":
    sys.exit(main())
