"""A method of your own: a share of DPO's loss.

    swift rlhf --external_plugins examples/train/preference/method.py --rlhf_type shared_dpo --share 0.5 ...

Its settings become flags; dry run, checkpoints and resume follow. The methods in swift/methods/ have the same form.
"""

from dataclasses import dataclass, replace

from swift.flags import flag
from swift.plugin import methods
from swift.trainers.preferences.reference import reference_parts

dpo = methods["dpo"]


@dataclass(kw_only=True)
class Parameters(dpo.parameters):
    """Settings of this method."""

    share: float = flag(0.5, above=0, group="Objective")
    """Share of the loss of DPO."""


class Shared:
    """Mixin before DPO's trainer."""

    def __init__(self, *, share, **arguments):
        super().__init__(**arguments)
        self.share = share

    def compute_loss(self, *arguments, **named):
        return self.share * super().compute_loss(*arguments, **named)


methods["shared_dpo"] = replace(
    dpo,
    parameters=Parameters,
    summary="a share of DPO",
    overrides=(Shared, *dpo.overrides),
    parts=lambda args, model: {"share": args.share, **reference_parts(args, model)},
)
