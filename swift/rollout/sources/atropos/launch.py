"""Message API, policy server and environments of one run, started in this order by `--atropos_env`.

before the model is connected    message API, then `swift rollout`, each unless its address is given
after the parity check           registration, then the environments
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from swift.flags import flags_of
from swift.models.arguments import CheckpointArguments
from swift.models.source import served_name
from swift.rollout.arguments import EngineArguments, GenerationArguments
from swift.rollout.sources.atropos.processes import Processes, answers, free_port, with_library, words

DEFAULT_URL = "http://127.0.0.1:8000"
API, SERVER = "atropos-api", "rollout-server"
API_START_S = 60.0
ADVICE = "correct the error in its last lines"
"""Advice after a process ended whose command is not the user's."""
OF_TRAINER = (
    "vllm_mode", "vllm_server_host", "vllm_server_port", "vllm_server_base_url", "vllm_server_timeout",
    "vllm_server_api_key", "num_infer_workers", "async_generate", "offload_model", "offload_optimizer",
    "gc_collect_after_offload", "move_model_batches", "sleep_level", "parity_check", "adapters", "weight_transport",
)  # fmt: skip
"""Engine settings of the trainer, which are not passed to the server."""


@dataclass(slots=True)
class AtroposProcesses:
    """The Atropos processes of this run, on rank 0.

    api_url, server_url: URLs of the message API and of the policy server; server_url is "" until it is set.
    """

    args: Any
    api_url: str = ""
    server_url: str = ""
    processes: Processes = field(default_factory=Processes)

    def __post_init__(self) -> None:
        self.api_url = self.args.atropos_url or DEFAULT_URL

    def start_api(self) -> None:
        """Start the message API and wait until it answers."""
        port = free_port()
        self.api_url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port)]
        self.processes.start(API, command, with_library(), advice=ADVICE)
        self.processes.wait_until(lambda: answers(f"{self.api_url}/info"), API, API_START_S)

    def start_server(self, max_model_len: int | None) -> None:
        """Start a policy server with the model and the engine settings of this run."""
        port, weights = free_port(), self.processes.new_folder("swift-server-") / "weights"
        weights.mkdir()
        settings = {
            name: getattr(self.args, name)
            for cls in (EngineArguments, GenerationArguments, CheckpointArguments)
            for name, flag in flags_of(cls).items()
            if name not in OF_TRAINER and getattr(self.args, name) != flag.default
        }
        settings |= {"host": "127.0.0.1", "port": port, "weights_folder": str(weights), "seed": self.args.seed}
        settings |= {
            "model": served_name(self.args),
            "system": "",  # environments send whole chats
            "use_vllm": self.args.use_vllm,
            "external_plugins": self.args.external_plugins,
        }
        settings |= {"vllm_max_model_len": max_model_len} if max_model_len else {}
        config = weights.with_name(f"{SERVER}.json")
        config.write_text(json.dumps(settings))
        self.server_url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "swift", "rollout", "--config", str(config)]
        self.processes.start(SERVER, command, advice=ADVICE)
        limit_s, advice = self.args.vllm_server_timeout, "raise --vllm_server_timeout; "
        self.processes.wait_until(lambda: answers(f"{self.server_url}/health"), SERVER, limit_s, advice)

    def start_environments(self) -> None:
        """Start the environments, with URLs and settings in environment variables and for `$NAME` in their commands."""
        variables = with_library() | {
            "ATROPOS_URL": self.api_url,
            "OPENAI_BASE_URL": f"{self.server_url}/v1",
            "OPENAI_API_KEY": self.args.vllm_server_api_key or "none",
            "SWIFT_MODEL": served_name(self.args),
            "SWIFT_NUM_GENERATIONS": str(self.args.num_generations),
            "SWIFT_MAX_COMPLETION_LENGTH": str(self.args.max_completion_length),
        }
        for number, command in enumerate(self.args.atropos_env):
            self.processes.start(f"environment-{number}", words(command, variables), variables, may_end=True)

    def close(self) -> None:
        self.processes.close()
