"""A user's TRL script up to its first logged optimizer step: `python -m swift.bench.trl_first_step WORK OUTPUT_DIR`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """See the module."""
    from transformers import TrainerCallback

    from swift.bench.trl_side import make_trainer
    from swift.bench.work import Work

    class Mark(TrainerCallback):
        """Leaves a file when the first step is logged."""

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (Path(sys.argv[2]) / "first_step").touch()

    make_trainer(Work.from_json(sys.argv[1]), sys.argv[2], max_steps=1, callbacks=[Mark()]).train()


if __name__ == "__main__":
    main()
