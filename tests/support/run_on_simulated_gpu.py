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


def main():
    path, *words = sys.argv[1:]
    found = {"steps": -1}
    if "grpo" not in words:
        without_kernels()
    with simulated_gpu() as ledger:
        if "--deepspeed" in words:
            with_deepspeed()
        from transformers.trainer_callback import CallbackHandler

        import swift.cli.main as cli
        from swift.trainers.grpo.step import GlobalBatchStep

        begin, end = CallbackHandler.on_step_begin, CallbackHandler.on_step_end
        passes = GlobalBatchStep.run

        def peak():
            """The most bytes since the last call."""
            most, ledger.peak_bytes = ledger.peak_bytes, ledger.live_bytes
            return most

        def run(step, model, policy, batch, *more):
            peak()
            loss = passes(step, model, policy, batch, *more)
            found["training_bytes"] = peak()
            found["samples"] = [
                [one.group, one.prompt_ids.size, one.token_ids.size, one.advantage]
                for one in (batch.samples[i] for i in batch.global_batch())
            ]
            return loss

        def on_step_begin(*args):
            found["steps"] += 1
            if found["steps"] == 1:
                ledger.clear()
            return begin(*args)

        def on_step_end(*args):
            for name in ("waits", "copies", "attention"):
                found[name] = [[what, line, count] for (what, line), count in getattr(ledger, name).most_common()]
            found["update_bytes"], found["resident_bytes"] = peak(), ledger.live_bytes
            return end(*args)

        CallbackHandler.on_step_begin, CallbackHandler.on_step_end = on_step_begin, on_step_end
        GlobalBatchStep.run = run
        code = cli.main(words)
    Path(path).write_text(json.dumps({**found, "operations": ledger.operations}))
    return code


if __name__ == "__main__":
    sys.exit(main())
