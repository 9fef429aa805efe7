"""What no wrong or random input may do.

That is: give a traceback, hang, take memory without bound, lose a checkpoint, leave a process behind, run code of a
data file, show a secret, or end with code 0 and wrong weights. HOSTILE_SEED draws other cases than those of last time.
"""

import contextlib
import os
import random
import signal
import time
import zlib

import ends
import inputs
import peers
import psutil
import pytest
from cli_runs import Run, printed_command
from commands import SECRET, SECRETS, TRAINING, Attempt, short_run
from safetensors import safe_open

from swift.trainers.checkpoint import list_checkpoints, verify

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

SEED = int(os.environ.get("HOSTILE_SEED", "1"))
CODES = {0, 2, 3, 4, 5, 6, 75}
LIMIT_S, STOP_S, MEMORY = 120, 30, 6 << 30
"""Seconds after which a run that is long by what it was told is ended (threads of plugins may take 60 at the end),
seconds that this may take, and bytes."""
SERVER_MEMORY, REQUESTS = 2 << 30, 40


def drawn(kinds):
    """The cases of some kinds, as arguments of a test."""
    cases = [(kind, number) for kind, count in kinds.items() for number in range(count)]
    return pytest.mark.parametrize(
        ("kind", "number"), cases, ids=[f"{kind.__name__}-{number}" for kind, number in cases]
    )


def chance(name: str, number: int) -> random.Random:
    return random.Random(zlib.crc32(f"{SEED} {name} {number}".encode()))


@drawn(inputs.KINDS)
def test_a_hostile_input_ends_in_order(cli, kind, number):
    attempt = kind(chance(kind.__name__, number), cli)
    assert_in_order(cli, attempt, *follow(cli, attempt))


@drawn(ends.KINDS)
def test_an_end_at_any_moment_loses_nothing(cli, kind, number):
    attempt = kind(chance(kind.__name__, number), cli)
    code, out, err, run = follow(cli, attempt)
    told = assert_in_order(cli, attempt, code, out, err, run)
    if code == 0:
        return
    saved = list_checkpoints(run.folder) if run.folder.is_dir() else []
    words = None
    if code == 75 and run.step:
        assert saved, told
        verify(saved[-1])
        words = printed_command(err)
    if words:
        again = cli.start_printed(words, "out")
    else:
        flags = [
            "--save_steps",
            "100",
            *(["--resume_from_checkpoint", "last"] if saved else ["--overwrite_output_dir", "true"]),
        ]
        again = cli._popen([*attempt.words, *flags], run.folder, attempt.variables)
    code, out, err = again.wait()
    assert code == 0, told + err
    assert run.step == 30


@pytest.mark.parametrize("number", range(12))
def test_a_server_that_lies_ends_a_run_in_order(cli, serve, number):
    rng = chance("lies", number)
    with peers.Liar(rng, serve().url, after=rng.choice([0, 0, 1, 2, 5, 10, 20])) as liar:
        flags = {"vllm_server_base_url": liar.url, "vllm_server_timeout": 5, "max_length": 40}
        attempt = Attempt(short_run(cli, "rlhf", **flags))
        told = assert_in_order(cli, attempt, *(ended := follow(cli, attempt)))
        assert ended[0] in (0, 4), f"{liar.lie.__name__}: {told}"


@pytest.mark.parametrize("number", range(4))
def test_a_server_answers_after_any_requests(serve, number):
    server, rng = serve(), chance("requests", number)
    asked = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4, "temperature": 0}
    with server.client() as http:
        reply = http.post("/v1/chat/completions", json=asked)
        assert reply.status_code == 200, reply.text
        first = reply.json()["choices"]
        for _ in range(REQUESTS):
            request = peers.random_request(rng)
            begun = time.monotonic()
            with contextlib.suppress(peers.httpx.RemoteProtocolError):
                status = http.request(**request, timeout=20).status_code
                told = {**request, "content": request["content"][:300]}
                assert status < 500 or status == 503, (status, told)
            assert time.monotonic() - begun < 20
            assert psutil.Process(server.process.pid).memory_info().rss < SERVER_MEMORY
        for route in ("/resume", "/wake_up"):  # the owner of a server may let it rest
            assert http.post(route).status_code == 200
        assert http.get("/health").status_code == 200
        reply = http.post("/v1/chat/completions", json=asked)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"] == first
    assert "Traceback" not in server.text()


def assert_in_order(cli, attempt: Attempt, code: int, out: str, err: str, run: Run) -> str:
    """The command ended as it may; what can be told of it."""
    told = f"{attempt}\ncode {code}\n{out[-3000:]}\n{err[-3000:]}"
    unheard = -code == attempt.signum and (code == -signal.SIGKILL or not run.folder.exists())
    assert code in CODES or unheard, told
    assert "Traceback" not in out + err, told
    assert "\x1b" not in (out + err).replace("\x1b[", "") and "\x1b[2J" not in out + err, told
    if code in CODES - {0, 75}:
        assert "swift: error: " in err or "\nproblem: " in out, told
    assert not list(cli.folder.rglob("EXECUTED")), told
    written = [path for path in run.folder.rglob("*") if path.is_file()] if run.folder.is_dir() else []
    assert SECRET not in out + err, told
    assert [path for path in written if path.stat().st_size < 1 << 20 and SECRET.encode() in path.read_bytes()] == [], (
        told
    )
    if code == 0 and attempt.words[0] in (*TRAINING, "export", "merge-lora"):
        for path in written:
            if path.suffix == ".safetensors":
                assert_finite(path, told)
    return told


def assert_finite(path, told: str) -> None:
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            assert file.get_tensor(name).isfinite().all(), (name, told)


def follow(cli, attempt: Attempt):
    """Start it, do to it what is to be done, and see that it ends in time, small, and alone."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    variables = {**SECRETS, **attempt.variables, "HOSTILE_MARK": mark}
    run = cli._popen(attempt.words, cli.folder / "out", variables)
    begun, sent = time.monotonic(), False
    while run.alive:
        elapsed = time.monotonic() - begun
        if attempt.signum and not sent and run.step >= attempt.after_step:
            time.sleep(attempt.after_s)
            (attempt.victim(run) if attempt.victim else run.process).send_signal(attempt.signum)
            sent = True
        if elapsed > LIMIT_S and not sent:  # a run that is long by what it was told
            run.process.terminate()
            sent = True
        assert elapsed < LIMIT_S + STOP_S, f"{attempt.words}: still there after {elapsed:.0f} s"
        assert memory(run) < MEMORY, f"{attempt.words}: takes more than {MEMORY} bytes"
        time.sleep(0.02)
    code, out, err = run.wait()
    assert_alone(mark, attempt.words)
    return code, out, err, run


def memory(run: Run) -> int:
    """Bytes of the command and all below it."""
    total = 0
    for process in run.family():
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def assert_alone(mark: str, words: list[str]) -> None:
    """Fails when a process that bears the mark outlives the command by ten seconds."""
    deadline = time.monotonic() + 10
    while left := [process for process in psutil.process_iter() if bears(process, mark)]:
        if time.monotonic() > deadline:
            lines = [process.cmdline() for process in left]
            for process in left:
                process.kill()
            raise AssertionError(f"{words}: left behind: {lines}")
        time.sleep(0.2)


def bears(process: psutil.Process, mark: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("HOSTILE_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE
    return False
