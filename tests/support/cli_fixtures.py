"""Fixtures of tests that run whole commands; a conftest.py imports those that it needs."""

import json

import pytest
from cli_runs import Cli
from rollout_process import RolloutProcess

PLUGIN = '''
import os
import time
from pathlib import Path

from swift.plugin import ORM, orms

if os.environ.get("MARK_IMPORT"):
    Path(os.environ["MARK_IMPORT"]).touch()


class Odd(ORM):
    """Share of odd characters; nothing for some completions, the same for all of some prompts, drifting with time."""

    def __call__(self, completions, solution, trainer_state, **kwargs):
        if trainer_state.global_step >= int(os.environ.get("FAIL_FROM_STEP", 10**9)):
            raise RuntimeError("the judge is away")
        if trainer_state.global_step >= int(os.environ.get("SLOW_FROM_STEP", 10**9)):
            time.sleep(20)
        while "WAIT_FOR" in os.environ and trainer_state.global_step and not Path(os.environ["WAIT_FOR"]).exists():
            time.sleep(0.01)
        drift = 0.01 * trainer_state.global_step + 0.1 * trainer_state.epoch
        return [self.score(text, answer, drift) for text, answer in zip(completions, solution)]

    def score(self, text, answer, drift):
        if int(answer) % 5 == 0:
            return 0.5
        if len(text) % 7 == 0:
            return None
        return sum(ord(c) % 2 for c in text) / max(1, len(text)) + drift


orms["odd"] = Odd
'''


@pytest.fixture(scope="session")
def material(nano_folders, tmp_path_factory):
    """A nano model, prompts and a plugin, the same for all runs."""
    folder = tmp_path_factory.mktemp("material")
    for name, count in (("train", 22), ("val", 3)):
        rows = [{"prompt": f"{name} {n}" + "?" * (n % 4), "solution": str(n)} for n in range(1, count + 1)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "odd_plugin.py").write_text(PLUGIN)
    return nano_folders["qwen2"], folder


@pytest.fixture
def cli(material, tmp_path):
    model, folder = material
    with Cli(model, folder, tmp_path) as runs:
        yield runs


@pytest.fixture
def serve(cli):
    """Starts `swift rollout`, and ends it."""
    servers = []

    def start(*words, model=cli.model, **options):
        servers.append(RolloutProcess(model, cli.folder, *words, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
        assert server.left() == []
