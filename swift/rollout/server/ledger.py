"""Which weights sampled what: the version ledger of a policy server.

An environment that samples here hands tokens to the trainer, not their versions. So the server keeps the versions of
what it has sampled for others, under digests of prompt and completion with and without its log-probs
(`swift.rollout.engines.wire.digest_of`), and the run that owns it asks for them. Short answers come again under other
weights, and only their log-probs tell them apart. What was not sampled here as it stands is unknown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swift.rollout.engines.wire import Spans, digest_of
from swift.types import Completion

LIMIT = 200_000
"""Digests that are remembered, two for each completion, about 50 MB; the least recently used one goes first."""


class VersionLedger:
    """See the module's docstring."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._spans: OrderedDict[str, Spans] = OrderedDict()

    def add(self, prompt_ids: Sequence[int], completion: Completion) -> None:
        """A completion that was sampled; without log-probs the same tokens a second time replace the first."""
        for logprobs in (completion.logprobs, ()):
            digest = digest_of(prompt_ids, completion.token_ids, logprobs)
            self._spans[digest] = completion.versions
            self._spans.move_to_end(digest)
        while len(self._spans) > self.limit:
            self._spans.popitem(last=False)

    def find(self, digest: str) -> Spans | None:
        """The versions of a completion, as in `Completion.versions`; None where it is unknown."""
        if digest in self._spans:
            self._spans.move_to_end(digest)
        return self._spans.get(digest)

    def clear(self) -> None:
        """Forget everything: versions count anew with another run."""
        self._spans.clear()
