"""`swift rollout`: a generation server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift.startup import collector_resting

if TYPE_CHECKING:
    from swift.arguments import Resolved


def run(resolved: Resolved) -> int | None:
    """Serves until a signal comes, or prints the plan in a dry run."""
    with collector_resting():
        from swift.rollout.server.run import bind, check, serve

        plan = check(resolved.args, resolved.given)
    if resolved.args.dry_run:
        from swift.cli.dry_run import show

        bind(resolved.args.host, resolved.args.port).close()
        show(resolved, plan.lines())
        return 0
    return serve(resolved.args, plan)
