"""Start of NeMo Gym before a model is loaded: starts its servers if configured, finds them, waits until they answer."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from swift.errors import ConfigError
from swift.models.source import served_name
from swift.rollout.child import Child
from swift.rollout.sources.nemo_gym.gym import NemoGym
from swift.rollout.sources.nemo_gym.servers import find_servers, head_url

if TYPE_CHECKING:
    from swift.trainers.distributed import Collectives


def nemo_gym_of(args: Any, reward_names: list[str]) -> NemoGym:
    """The `NemoGym` of these settings."""
    limit_s = args.nemo_gym_verify_timeout if args.nemo_gym_mode == "verify" else args.nemo_gym_run_timeout
    model = served_name(args)
    return NemoGym(args.nemo_gym_mode, args.nemo_gym_agent, limit_s, model, frozenset(reward_names))


@contextlib.contextmanager
def serving(
    play: Any, args: Any, ranks: Collectives, *, policy_servers: Sequence[str], interrupted: Callable[[], None]
) -> Iterator[None]:
    """Serve NeMo Gym inside the context if `play` is a `NemoGym`; collective. Rank 0 starts and finds the servers.

    Args:
        play: player of the trajectories.
        args: settings of the run.
        ranks: processes of the run.
        policy_servers: URLs of the `swift rollout` servers.
        interrupted: raises after a request to stop.

    Raises:
        ConfigError, ResourceError: the command cannot be started.
        EngineError: servers do not answer in time.
    """
    if not isinstance(play, NemoGym):
        yield
        return
    with contextlib.ExitStack() as stack:
        with ranks.together():
            if ranks.is_main:
                if args.nemo_gym_command is not None:
                    play.child = _start(args, policy_servers)
                    stack.callback(play.child.close)

                def check() -> None:
                    interrupted()
                    if play.child is not None:
                        play.child.check()

                play.servers = find_servers(
                    args.nemo_gym_head,
                    kind="resources" if play.mode == "verify" else "agents",
                    limit_s=args.nemo_gym_server_timeout,
                    starting=play.child is not None,
                    check=check,
                )
        play.servers = ranks.broadcast(play.servers)
        yield


def _start(args: Any, policy_servers: Sequence[str]) -> Child:
    """Start the command of the settings; `ng_run` gets the port of the head server and the policy servers."""
    words = shlex.split(args.nemo_gym_command)
    folder = Path(args.nemo_gym_dir).expanduser() if args.nemo_gym_dir else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--nemo_gym_dir: {args.nemo_gym_dir}: no such folder; give the one of NeMo Gym")
    if not words:
        raise ConfigError("--nemo_gym_command: is empty; give a command, such as ng_run")
    if args.nemo_gym_config_paths:
        words.append(f"+config_paths=[{','.join(args.nemo_gym_config_paths)}]")
    variables = {"PATH": f"{(folder or Path.cwd()) / '.venv' / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    if Path(words[0]).name == "ng_run":
        overrides = {"head_server.host": "127.0.0.1", "head_server.port": urlsplit(head_url(args.nemo_gym_head)).port}
        if args.nemo_gym_mode == "run":
            key = args.vllm_server_api_key or os.environ.get("SWIFT_API_KEY")
            variables |= {"SWIFT_API_KEY": key} if key else {}
            overrides["policy_base_url"] = f"[{','.join(f'{server}/v1' for server in policy_servers)}]"
            overrides["policy_model_name"] = served_name(args)
            overrides["policy_api_key"] = "${oc.env:SWIFT_API_KEY}" if key else "none"
        words += [f"+{name}={value}" for name, value in overrides.items()]
    return Child("--nemo_gym_command", words, folder=folder, variables=variables)
