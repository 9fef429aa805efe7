"""Does the sampler sample from the policy that the trainer trains? Compared on real prompts, token by token.

    as loaded      engine and trainer read the same checkpoint
    with noise     both get the same noise on one tensor of each kind, the engine's by a publication
    restored       the true weights are published again, the prompts stay the same

A wrong temperature or a shifted log-prob shows in the first stage. A publication that does nothing does not, as the
checkpoint on disk equals the trainer's weights: the second stage finds it. What an engine remembers of earlier weights
shows in the third.

`check` runs the stages, `noise` chooses and makes the noise, `gaps` measures, `tolerance` judges, `causes` guesses why.
"""

from swift.rollout.parity.check import ParityCheck, ParityReport, Publisher, Stage
from swift.rollout.parity.gaps import Drawn, Gaps
from swift.rollout.parity.tolerance import Limits, Verdict, limits_for

__all__ = ["Drawn", "Gaps", "Limits", "ParityCheck", "ParityReport", "Publisher", "Stage", "Verdict", "limits_for"]
