"""Policy versions of the completions of a policy server.

An environment sends tokens to the trainer without their policy versions. So the server stores the versions of
completions for clients without a run, by digests of prompt and completion with and without log-probs
(`swift.rollout.engines.wire.digest_of`), and the run that owns the server queries them. Equal short answers of several
versions differ in their log-probs only. The versions of other token sequences are unknown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swift.rollout.engines.wire import Spans, digest_of
from swift.types import Completion

LIMIT = 200_000
"""Maximum number of digests, two for each completion, about 50 MB; the least recently used one is removed."""


class SampledVersions:
    """See the module's docstring."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._spans: OrderedDict[str, Spans] = OrderedDict()

    def add(self, prompt_ids: Sequence[int], completion: Completion) -> None:
        """Store the versions of a completion; its entry without log-probs replaces that of equal tokens."""
        for logprobs in (completion.logprobs, ()):
            digest = digest_of(prompt_ids, completion.token_ids, logprobs)
            self._spans[digest] = completion.versions
            self._spans.move_to_end(digest)
        while len(self._spans) > self.limit:
            self._spans.popitem(last=False)

    def find(self, digest: str) -> Spans | None:
        """The versions of a completion, as in `Completion.versions`; None if it is unknown."""
        if digest in self._spans:
            self._spans.move_to_end(digest)
        return self._spans.get(digest)

    def clear(self) -> None:
        """Remove all entries, at the start of another run, whose versions start from 0."""
        self._spans.clear()
