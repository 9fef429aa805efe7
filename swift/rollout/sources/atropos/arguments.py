"""Settings of `--rollout_source atropos`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from swift.errors import ConfigError
from swift.flags import flag

NEEDS = "rollout_source=atropos"


@dataclass(kw_only=True)
class AtroposArguments:
    """Environments of Atropos, their message API, and the use of their samples."""

    GROUP: ClassVar[str] = "Environments"

    atropos_url: str | None = flag(
        needs=NEEDS, everyday=False, unset="http://127.0.0.1:8000, or an API that `--atropos_env` starts"
    )
    """URL of the message API (`run-api`)."""

    atropos_env: list[str] = flag([], needs=NEEDS, everyday=False)
    """Commands that start environments, such as `"python my_env.py serve"`. The message API and the policy server are
    also started, each unless its address (`--atropos_url`, `--vllm_server_host`) is given."""

    atropos_timeout: float = flag(600.0, above=0, needs=NEEDS, everyday=False)
    """Time without data from the message API after which the run ends, in seconds."""

    atropos_require_logprobs: bool = flag(False, needs=NEEDS, everyday=False)
    """Whether to exclude samples without the sampler's log-probs, instead of training on them without correction."""

    use_env_advantages: bool = flag(False, needs=NEEDS, everyday=False)
    """Whether to use the environments' advantages, one per sample or per token, instead of those from scores."""

    def problems(self) -> Iterator[str]:
        if getattr(self, "rollout_source", "engine") == "atropos":
            yield from _combinations(self)


def _combinations(args: Any) -> Iterator[str]:
    served = args.vllm_server_host or args.vllm_server_base_url
    if not (served or args.atropos_env):
        yield (
            "--rollout_source: atropos: environments sample with a policy server; give --vllm_server_host, or "
            "--atropos_env, which starts one"
        )
    yield from _commands(args)
    if args.vllm_mode not in (None, "server"):
        yield f"--vllm_mode: {args.vllm_mode}: environments sample with a server; --vllm_mode server"
    if args.dataset:
        yield f"--dataset: {' '.join(args.dataset)}: prompts are those of the environments; leave it out"
    if args.max_steps <= 0:
        yield f"--max_steps: {args.max_steps}: environments have no end; give --max_steps"
    if args.val_dataset:
        yield f"--val_dataset: {' '.join(args.val_dataset)}: environments evaluate themselves; leave it out"
    if args.split_dataset_ratio > 0:
        yield f"--split_dataset_ratio: {args.split_dataset_ratio}: environments evaluate themselves; leave it out"
    if args.in_flight_updates:
        yield "--in_flight_updates: true: environments, not this run, sample; --in_flight_updates false"
    if args.reroll_start_fraction < 1:
        yield f"--reroll_start_fraction: {args.reroll_start_fraction}: environments choose the prompts; use 1"
    if args.atropos_require_logprobs:
        return
    needs = "needs the sampler's log-probs of every sample; --atropos_require_logprobs true"
    if args.kl_in_reward and args.beta > 0:
        yield f"--kl_in_reward: true: {needs}"
    if args.old_logprobs == "sampler":
        yield f"--old_logprobs: sampler: {needs}"


def _commands(args: Any) -> Iterator[str]:
    """Problems of starting the message API and the environments."""
    from swift.rollout.sources.atropos.processes import library, words

    if args.atropos_env and args.atropos_url is None and library() is None:
        yield (
            "--atropos_env: the message API needs atroposlib, which is not installed; "
            "pip install -r requirements/atropos.txt, or give --atropos_url"
        )
    for command in args.atropos_env:
        try:
            words(command, {})
        except ConfigError as error:
            yield from error.problems
