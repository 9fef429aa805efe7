"""`--push_to_hub`: the repository is created before the run begins, and the model is uploaded when it is done.

transformers uploads the run's folder while checkpoints are written into it, logs and optimizer included; here only the
model is uploaded, from a complete checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift.errors import ResourceError, first_line

NOT_UPLOADED = [
    "optimizer*", "scheduler*", "scaler.pt", "rng_state*", "trainer_state.json", "training_args.bin", "args.json",
    "manifest*", "reference.pt", "global_step*", "latest", "zero_to_*", "pytorch_model_fsdp*", "fsdp_state*",
]  # fmt: skip
"""Files of a checkpoint that only a resumed run needs."""


def check_hub(args: Any) -> None:
    """Creates the repository if there is none.

    Raises:
        ResourceError: the hub does not answer, or refuses.
    """
    if args.push_to_hub:
        _request(args, "create_repo", private=args.hub_private_repo, exist_ok=True)


def push(args: Any, folder: Path, trainer: Any) -> list[str]:
    """Uploads the best checkpoint, else the last one; returns a line to print.

    Raises:
        ResourceError: the hub does not answer; the run's checkpoints are complete.
    """
    from swift.trainers.checkpoint import last_checkpoint

    if not args.push_to_hub:
        return []
    best = trainer.state.best_model_checkpoint if args.load_best_model_at_end else None
    checkpoint = best or last_checkpoint(folder)
    _request(args, "upload_folder", folder_path=checkpoint, ignore_patterns=NOT_UPLOADED)
    return [f"hub: {checkpoint} is uploaded as {args.hub_model_id}"]


def _request(args: Any, request: str, **arguments: Any) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    failures: Any = (
        *HfHubHTTPError.__bases__,
        HFValidationError,
        OSError,
    )  # the base classes are those of the installed httpx
    try:
        getattr(HfApi(token=args.hub_token), request)(repo_id=args.hub_model_id, **arguments)
    except failures as error:  # the hub's own are OSErrors
        raise ResourceError(
            f"--push_to_hub: {args.hub_model_id}: the hub refuses {request}: {first_line(error)}; check the network, "
            "--hub_model_id and --hub_token, or leave --push_to_hub out"
        ) from error
