"""What else may happen to a run's folder: two runs at once, a full disk, a damaged checkpoint."""

import shutil
import subprocess
import sys

import pytest
from cli_runs import ROOT, assert_same_run, environment, error_lines

from swift.trainers.checkpoint import list_checkpoints, verify

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_a_folder_is_for_one_live_run(cli):
    flags = {"max_steps": 30, "save_steps": 100}
    cli.finish("resumed", max_steps=1, save_steps=100)
    for name, step, resume in (("new", 1, None), ("resumed", 2, "last")):
        slow = {**flags, "variables": {"SLOW_FROM_STEP": step}, "resume_from_checkpoint": resume}
        first = cli.start(name, **slow)
        first.reach(step)
        err = cli.start(name, **slow).ends(3)
        (line,) = error_lines(err)
        assert line.startswith(f"swift: error: run folder: {first.folder}: in use by process {first.process.pid} on ")
        assert "Traceback" not in err
        assert first.alive
        first.kill()


# A file system of so many KiB that only the command sees; what is left on it is copied out at the end.
SMALL_DISK = """
mount -t tmpfs -o size="$1"k tmpfs "$2" && out="$3" && full="$2" && shift 3
"$@"
code=$?
cp -a "$full/." "$out"
exit $code
"""


def behind(cli, *words, output, **flags):
    """Exit code and error lines of a command of which these words stand before it."""
    done = subprocess.run(
        [*map(str, words), sys.executable, "-m", "swift", *cli.words(output, **flags)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, error_lines(done.stderr)


@pytest.fixture
def own_mounts():
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace of its own")
    return "unshare", "-rm", "sh", "-c"


@pytest.mark.parametrize(("limit", "subject"), [("-f 40", "disk"), ("-v 400000", "memory")])
def test_a_limit_of_the_shell_is_told_in_one_line(cli, limit, subject):
    code, (line,) = behind(cli, "sh", "-c", f'ulimit {limit}; exec "$@"', "sh", output="run", max_steps=2)
    assert (code, line.split(":")[2]) == (3, f" {subject}"), line


READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'


@pytest.mark.long
def test_a_read_only_run_is_not_resumed(cli, own_mounts):
    folder = cli.finish("run", max_steps=1, save_steps=1)
    words = (*own_mounts, READ_ONLY, "sh", folder)
    code, lines = behind(cli, *words, output="run", max_steps=2, resume_from_checkpoint="last")
    assert code == 2
    assert lines == [
        f"swift: error: --output_dir: {folder}: cannot be written (Read-only file system); choose another folder"
    ]


def kib(folder) -> int:
    """What the files below a folder take on a disk with blocks of 4 KiB."""
    return sum(-(-path.stat().st_size // 4096) * 4 for path in folder.rglob("*") if path.is_file())


FLAGS = {"max_steps": 8, "save_steps": 2}


@pytest.fixture(scope="module")
def straight(finished):
    """A run on a large disk."""
    return finished(**FLAGS)


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0.1, id="in-the-weights", marks=pytest.mark.long),
        pytest.param(0.6, id="in-the-optimizer", marks=pytest.mark.long),
        pytest.param(0.85, id="near-the-end", marks=pytest.mark.long),
    ],
)
def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(cli, own_mounts, straight, share):
    full, saved = cli.folder / "full", cli.folder / "saved"
    full.mkdir()
    saved.mkdir()
    checkpoint_kib = kib(straight / "checkpoint-2")
    other_kib = kib(straight) - 4 * checkpoint_kib - kib(straight / "images")
    size = int(other_kib + (2 + share) * checkpoint_kib)
    code, lines = behind(cli, *own_mounts, SMALL_DISK, "sh", size, full, saved, output="full", **FLAGS)
    assert code == 3
    assert lines
    assert all(line.startswith("swift: error: disk: ") and "no space left" in line for line in lines)
    assert list_checkpoints(saved) == [saved / "checkpoint-2", saved / "checkpoint-4"]
    assert all(verify(checkpoint) for checkpoint in list_checkpoints(saved))
    resumed = cli.finish("saved", **FLAGS, resume_from_checkpoint="last")
    assert_same_run(resumed, straight)


def test_last_passes_over_a_damaged_checkpoint(cli):
    straight = cli.finish("straight", max_steps=6)
    torn = cli.folder / "torn"
    shutil.copytree(straight, torn)
    shutil.rmtree(torn / "checkpoint-6")
    weights = torn / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    cli.finish("torn", max_steps=6, resume_from_checkpoint="last")
    assert f"{weights}: incomplete, 1000 of " in cli.printed
    assert f"resuming {torn} from checkpoint-2" in cli.printed
    assert_same_run(torn, straight)


@pytest.mark.long
@pytest.mark.parametrize("mask", ["022", "077"])
def test_what_a_run_writes_is_as_readable_as_the_umask_allows(cli, mask):
    code, _ = behind(cli, "sh", "-c", f'umask {mask}; exec "$@"', "sh", output="run", max_steps=2)
    assert code == 0
    modes = {path: path.stat().st_mode & 0o777 for path in (cli.folder / "run").rglob("*") if path.name != "lock"}
    wanted = {path: (0o777 if path.is_dir() else 0o666) & ~int(mask, 8) for path in modes}
    assert {str(path): f"{modes[path]:o}" for path in modes if modes[path] != wanted[path]} == {}
