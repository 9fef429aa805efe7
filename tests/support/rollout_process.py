"""A `swift rollout` process on a free port."""

import contextlib
import os
import signal
import time

import httpx
import psutil
from preloaded import Program
from processes import alive

START_LIMIT_S = 240.0
END_LIMIT_S = 40.0


class Reachable:
    """A server by its `url` and `key`."""

    def client(self):
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)


class RolloutProcess(Reachable):
    """See the module's docstring; its family are its workers."""

    def __init__(self, model, folder, *words, port=0, key=None, wait=True):
        self.model = str(model)
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"server-{time.monotonic_ns()}.log"
        self.key = key
        command = [
            "-m", "swift", "rollout", "--model", self.model, "--port", str(port), "--torch_dtype",
            "float32", *words, *(["--api_key", key] if key else []),
        ]  # fmt: skip
        if "--use_vllm" not in words and "--infer_backend" not in words:
            command += ["--use_vllm", "false"]
        self.process = Program(command, output=self.log)
        self.url = self.wait_until_ready() if wait else None

    def text(self):
        return self.log.read_text(errors="replace")

    def wait_until_ready(self):
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            ready = next((line for line in self.text().splitlines() if line.startswith("ready ")), None)
            if ready is not None:
                self.family = psutil.Process(self.process.pid).children(recursive=True)
                return ready.split()[1]
            assert self.process.poll() is None, self.text()[-3000:]
            time.sleep(0.05)
        self.kill()
        raise AssertionError(f"not ready after {START_LIMIT_S} s:\n{self.text()[-3000:]}")

    @property
    def port(self):
        return int(self.url.rpartition(":")[2])

    def stop(self):
        """SIGTERM, as people end it; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_LIMIT_S)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(END_LIMIT_S)

    def left(self, limit_s=20.0):
        """Processes of it that are still there after a while."""
        deadline = time.monotonic() + limit_s
        while True:
            left = [one for one in self.family if alive(one.pid)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)
