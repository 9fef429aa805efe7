"""Settings of `--rollout_source nemo_gym`, with the names of Axolotl's keys."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from swift.flags import flag
from swift.rollout.arguments import ENVIRONMENT_REWARDS

NEEDS = "rollout_source=nemo_gym"
UNSENT = ("top_k", "min_p", "repetition_penalty", "stop_words", "generation_kwargs", "vllm_guided_decoding_regex")
"""Sampling settings that are not sent to agents."""


@dataclass(kw_only=True)
class NemoGymArguments:
    """Servers of NeMo Gym, and their use."""

    GROUP: ClassVar[str] = "Environments"

    nemo_gym_mode: Literal["verify", "run"] = flag(
        "verify", aliases=("nemo_gym_multi_turn",), values={"true": "run", "false": "verify"}, needs=NEEDS,
        everyday=False,
    )  # fmt: skip
    """Use of NeMo Gym: verify scores completions of the engine, run samples them with agents and the policy server."""

    nemo_gym_head: str = flag(
        "http://127.0.0.1:11000", aliases=("nemo_gym_head_port",), needs=NEEDS, everyday=False, resume="free"
    )
    """URL of the head server; a number is a port of this machine."""

    nemo_gym_agent: str | None = flag(needs=NEEDS, everyday=False, unset="the only server")
    """Name of the default agent or resources server, for rows without a running server in `agent_ref`."""

    nemo_gym_verify_timeout: float = flag(30.0, above=0, needs=NEEDS, everyday=False)
    """Time limit of a /verify call, in seconds."""

    nemo_gym_run_timeout: float = flag(300.0, above=0, needs=NEEDS, everyday=False)
    """Time limit of a /run call, in seconds."""

    nemo_gym_server_timeout: float = flag(360.0, above=0, needs=NEEDS, everyday=False, resume="free")
    """Time until all servers must answer at the start, in seconds."""

    nemo_gym_command: str | None = flag(
        aliases=("nemo_gym_auto_start",), values={"true": "ng_run"}, needs=NEEDS, everyday=False,
        unset="the servers run already", resume="free")  # fmt: skip
    """Command that starts the servers with the run and ends them with it, such as `ng_run`."""

    nemo_gym_dir: str | None = flag(needs=NEEDS, everyday=False, unset="the working folder", resume="free")
    """Folder of NeMo Gym: working folder of the command, and of the paths in `--nemo_gym_datasets`."""

    nemo_gym_config_paths: list[str] = flag([], needs=NEEDS, everyday=False, resume="free")
    """Configs of the servers, given to the command as `+config_paths=[...]`."""

    nemo_gym_datasets: list[dict[str, Any]] = flag([], needs=NEEDS, everyday=False)
    """Training data as JSON: `{"path": ..., "server_name": ..., "max_samples": ...}`, added to `--dataset`."""

    def __post_init__(self) -> None:
        given: Any = self
        for entry in self.nemo_gym_datasets if given.rollout_source == "nemo_gym" else ():
            text = str(Path(self.nemo_gym_dir or "").expanduser() / Path(str(entry.get("path"))).expanduser())
            text += f"#{entry['max_samples']}" if entry.get("max_samples") else ""
            if text not in given.dataset:
                given.dataset = [*given.dataset, text]
        if self.nemo_gym_command == "false":
            self.nemo_gym_command = None
        names = {str(entry["server_name"]) for entry in self.nemo_gym_datasets if entry.get("server_name")}
        if self.nemo_gym_agent is None and len(names) == 1:
            [self.nemo_gym_agent] = names

    def problems(self) -> Iterator[str]:
        given: Any = self
        if given.rollout_source != "nemo_gym":
            return
        flag = "--rollout_source: nemo_gym"
        if not set(ENVIRONMENT_REWARDS) & set(given.reward_funcs):
            yield f"{flag}: no reward function takes its rewards; --reward_funcs environment, besides others"
        for entry in (entry for entry in self.nemo_gym_datasets if not isinstance(entry.get("path"), str)):
            yield f'--nemo_gym_datasets: {entry}: names no file; write {{"path": "train.jsonl"}}'
        names = {str(entry["server_name"]) for entry in self.nemo_gym_datasets if entry.get("server_name")}
        if len(names) > 1:
            yield (
                f"--nemo_gym_datasets: server_name {', '.join(sorted(names))}: rows of several servers name their own "
                'by "agent_ref": {"name": ...}; put it there'
            )
        if self.nemo_gym_config_paths and self.nemo_gym_command is None:
            yield "--nemo_gym_config_paths: nothing is started with them; --nemo_gym_auto_start true, or leave them out"
        if self.nemo_gym_command is not None:
            yield from self._command_problems(self.nemo_gym_command)
        if self.nemo_gym_mode == "run":
            yield from self._run_problems(given)

    def _command_problems(self, command: str) -> Iterator[str]:
        try:
            words = shlex.split(command)
        except ValueError as error:
            yield f"--nemo_gym_command: {command}: {error}; correct the quotation marks"
            return
        if not words or Path(words[0]).name != "ng_run":
            return
        try:
            has_port = self.nemo_gym_head.isdigit() or urlsplit(self.nemo_gym_head).port is not None
        except ValueError:
            has_port = False
        if not has_port:
            yield f"--nemo_gym_head: {self.nemo_gym_head}: ng_run is started at its port; give one, such as 11000"

    def _run_problems(self, given: Any) -> Iterator[str]:
        flag = "--nemo_gym_mode: run"
        if not (given.vllm_server_host or given.vllm_server_base_url):
            yield f"{flag}: agents sample with a policy server; start `swift rollout`, and give --vllm_server_base_url"
        for name in UNSENT:
            if getattr(given, name) not in (type(given).__dataclass_fields__[name].default, [], {}):
                yield (
                    f"--{name}: {getattr(given, name)}: agents receive temperature, top_p and max_completion_length "
                    "only; leave it out, or --nemo_gym_mode verify"
                )
