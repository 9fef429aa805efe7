"""Which run owns the server's weights. Pure: callers pass the time.

A run takes the lease with an id of its own, and everything it sends renews it. While it lasts, other runs are refused
and told who holds it. A run that fell silent can be replaced; until somebody does so, it may come back as if nothing
was. Clients without a run id (OpenAI's API, TRL's client) may use what changes weights only while nobody holds the
lease.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from swift.rollout.server.limits import Refused

LIFETIME_S = 60.0
"""How long a silent run keeps the lease. Clients send a sign of life several times in that time."""


@dataclass(slots=True)
class Holder:
    """run_id: of the run. name: for people, such as host and process. expires_at: by the caller's clock."""

    run_id: str
    name: str
    expires_at: float


class Lease:
    """See the module's docstring.

    Args:
        lifetime_s: how long silence is tolerated.
    """

    def __init__(self, lifetime_s: float = LIFETIME_S) -> None:
        self.lifetime_s = lifetime_s
        self.holder: Holder | None = None
        self._resets = 0

    @contextlib.contextmanager
    def during_reset(self) -> Iterator[None]:
        """The holder cannot give signs of life while it waits for the engines: until the end nothing expires."""
        self._resets += 1
        try:
            yield
        finally:
            self._resets -= 1

    def silent(self, now: float) -> Holder | None:
        """The holder, when it has been silent for too long."""
        holder = self.holder
        return holder if holder is not None and not self._lasts(holder, now) else None

    def _lasts(self, holder: Holder, now: float) -> bool:
        return self._resets > 0 or holder.expires_at > now

    def take(self, run_id: str, name: str, now: float) -> bool:
        """Become the holder; returns whether it was another run before (or none).

        Raises:
            Refused: another run holds it.
        """
        before = self.holder
        if before is not None and before.run_id != run_id and self._lasts(before, now):
            raise self._held(before, now)
        self.holder = Holder(run_id, name, now + self.lifetime_s)
        return before is None or before.run_id != run_id

    def renew(self, run_id: str | None, now: float) -> None:
        """Check that a request may change things, and renew the lease of its run.

        Raises:
            Refused: another run holds the lease, or this one never took it (409, "no_lease").
        """
        holder = self.holder
        if holder is not None and holder.run_id == run_id:
            holder.expires_at = now + self.lifetime_s
        elif holder is not None and self._lasts(holder, now):
            raise self._held(holder, now)
        elif run_id is not None:
            raise Refused(409, "no_lease", f"run {run_id}: does not hold this server; POST /reset first")

    def release(self, run_id: str) -> bool:
        """Give it back; returns whether this run held it."""
        if self.holder is None or self.holder.run_id != run_id:
            return False
        self.holder = None
        return True

    def _held(self, holder: Holder, now: float) -> Refused:
        left = max(0.0, holder.expires_at - now)
        return Refused(
            409,
            "held",
            f"server: held by run {holder.run_id} ({holder.name}): its lease lasts {left:.0f} s more unless it is "
            "renewed; wait for that run, end it, or use another server",
            run_id=holder.run_id,
            holder=holder.name,
            expires_in_s=left,
        )
