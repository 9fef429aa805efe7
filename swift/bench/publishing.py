"""The row "publish": a vLLM engine in this process, new weights, and whether they arrived.

vLLM's CPU build repacks linear weights and drops the originals, so that TRL's `sync_weights`, which writes into the
loaded parameters, fails there. Both sides therefore publish to an engine whose weights stay as they are, as on a GPU:
oneDNN's packing is switched off before vLLM starts. swift publishes as a run in colocate mode does: the first time by a
reload, from then on engine and model share a single copy, which is checked tensor by
tensor before the caches are reset and the version is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swift.bench.contest import Gate, Stopwatch
from swift.bench.work import Work

Send = Callable[[Any, Any, int], None]
"""(engine, model, version): brings the model's weights to the engine."""


def serve(work: Work, gate: Gate, model: Any, send: Send) -> None:
    """Turns of `send` after a small change of the weights; only the sending is measured.

    Raises:
        RuntimeError: weights that were sent did not arrive.
    """
    import torch

    engine = _unpacked_engine(work)
    version = 0
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())

    def turn() -> dict[str, Any]:
        nonlocal version
        version += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + 1e-3)
        watch = Stopwatch()
        send(engine, model, version)
        took = watch.read()
        _check_arrived(engine, model)
        return {**took, "nbytes": nbytes, "tensors": sum(1 for _ in model.parameters())}

    try:
        gate.serve(turn)
    finally:
        engine.close()


def _unpacked_engine(work: Work) -> Any:
    import vllm._custom_ops as operators

    from swift.rollout.engines.spec import EngineSpec
    from swift.rollout.engines.vllm import build

    operators._supports_onednn = False
    return build(EngineSpec(backend="vllm", model=work.model, max_model_len=256, max_num_seqs=8))


def _check_arrived(engine: Any, model: Any) -> None:
    """The engine's embedding, last norm and down projections are those of the model; vLLM stores these as they come."""
    import torch

    runner = engine._llm.model_executor.driver_worker.model_runner
    theirs, ours = dict(runner.model.named_parameters()), dict(model.named_parameters())
    names = [name for name in ours if name in theirs and theirs[name].shape == ours[name].shape]
    if not any("down_proj" in name for name in names):
        raise RuntimeError("publish: the engine has none of the model's down projections to compare")
    for name in names:
        if not torch.equal(theirs[name].data, ours[name].data):
            raise RuntimeError(f"publish: {name} of the engine is not what was sent")
