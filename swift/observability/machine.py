"""`swift doctor`: whether this machine can train. A line per check: ok, warning or error, the latter two with a fix.

Nothing is downloaded or changed. `swift.observability.packages` checks libraries, `leftovers` what earlier runs left.
"""

from __future__ import annotations

import email.utils
import errno
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swift.devices import allowed_cores, available_bytes
from swift.errors import counted, first_line

Status = Literal["ok", "warning", "error"]
GIB = 1 << 30
HUB_TIMEOUT_S = 2.0
OLDEST = 1_735_689_600
"""2025-01-01, before the first version of swift: a clock that shows an earlier time is wrong."""
PORTS = {29500: "MASTER_PORT of several nodes", 8000: "--port of swift rollout"}


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the table. fix: a command or setting; "" if ok."""

    name: str
    status: Status
    found: str
    fix: str = ""


Checks = Iterator[Check]


def judged(name: str, found: str, fix: str, *, error: bool = False, warning: bool = False) -> Check:
    """A check that is an error, a warning, or neither, in which case it needs no fix."""
    status: Status = "error" if error else "warning" if warning else "ok"
    return Check(name, status, found, fix if status != "ok" else "")


def python() -> Checks:
    """The interpreter."""
    here = ".".join(str(part) for part in sys.version_info[:3])
    wrong = sys.version_info[:2] not in ((3, 11), (3, 12))
    yield judged("python", f"{here} at {sys.executable}", "install swift with Python 3.11 or 3.12", error=wrong)


def torch_build() -> Checks:
    """What torch is built for, the instructions that it uses, and its threads."""
    try:
        import torch
    except (ImportError, OSError) as problem:
        yield Check("torch", "error", first_line(problem), "pip install -r requirements/base.txt")
        return
    built = "ROCm" if torch.version.hip else f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    yield Check(
        "torch", "ok", f"{torch.__version__}, for {built}; instructions {torch.backends.cpu.get_cpu_capability()}"
    )
    threads, cores = torch.get_num_threads(), len(allowed_cores())
    yield judged(
        "threads",
        f"{counted(threads, 'thread')} of torch on {counted(cores, 'core')}",
        f"export OMP_NUM_THREADS={cores}: more threads than cores slow each other down",
        warning=threads > cores,
    )


def accelerators() -> Checks:
    """Devices, driver, memory, and how devices reach each other."""
    import torch

    driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists()
    if not torch.cuda.is_available():
        yield judged(
            "accelerator",
            "a GPU driver, but torch cannot use it" if driver else "none: training runs on the CPU",
            "install the torch build of this driver (https://pytorch.org), check CUDA_VISIBLE_DEVICES and `nvidia-smi`",
            error=driver,
        )
        return
    yield from _driver(torch.version.cuda)
    num = torch.cuda.device_count()
    for index in range(num):
        yield _device(index)
    apart = [
        f"{a}-{b}" for a in range(num) for b in range(num) if a < b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if num > 1:
        found = f"missing between {', '.join(apart)}" if apart else "between all devices"
        yield judged(
            "peer access",
            found,
            "training works through main memory, slower; see `nvidia-smi topo -m`",
            warning=bool(apart),
        )
    available = torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if available and not torch.version.hip else "present"
    yield judged(
        "nccl",
        version if available else "missing",
        "install torch with NCCL: several GPUs need it",
        error=not available and num > 1,
        warning=not available,
    )


def _driver(cuda: str | None) -> Checks:
    import torch

    if cuda is None:
        return
    number = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    newest, needed = (number // 1000, number % 1000 // 10), tuple(int(part) for part in cuda.split(".")[:2])
    yield judged(
        "driver",
        f"up to CUDA {newest[0]}.{newest[1]}; torch is built for {cuda}",
        f"update the driver, or install a torch for CUDA {newest[0]}",
        error=newest[0] < needed[0],
        warning=newest < needed,
    )


def _device(index: int) -> Check:
    import torch

    about, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
    found = f"{about.name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
    name, arch = f"cuda:{index}", f"sm_{about.major}{about.minor}"
    built = [arch for arch in torch.cuda.get_arch_list() if arch.startswith("sm_")]
    same = any(one.startswith(f"sm_{about.major}") and int(one[3:].rstrip("af")) <= int(arch[3:]) for one in built)
    if built and not same and not torch.version.hip:
        return Check(
            name, "error", f"{found}; {arch} is not among {' '.join(built)} of this torch", "install another torch"
        )
    return judged(name, found, "end what uses it: `nvidia-smi` lists the processes", warning=free < 0.8 * total)


def memory() -> Checks:
    """Main memory, shared memory, and open files."""
    free = available_bytes() / GIB
    yield judged(
        "memory", f"{free:.1f} GiB free", "end other programs, or raise the container's limit", warning=free < 4
    )
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free / GIB
        yield judged(
            "/dev/shm",
            f"{free:.1f} GiB free",
            "docker run --shm-size=8g (or --ipc=host), or `mount -o remount,size=8g /dev/shm`: vLLM and NCCL need it",
            warning=free < 1,
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limited = soft != resource.RLIM_INFINITY and soft < 4096
    most = "65536" if hard in (resource.RLIM_INFINITY, -1) else str(min(hard, 65536))
    yield judged(
        "open files",
        "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft}",
        f"ulimit -n {most}",
        warning=limited,
    )


def disks() -> Checks:
    """Where runs and downloads are written."""
    home = Path.home() / ".cache"
    caches = [Path(os.environ.get("HF_HOME", home / "huggingface")), Path(os.environ.get("MODELSCOPE_CACHE", home))]
    folders = {
        "disk of the working folder": Path.cwd(),
        "disk of HF_HOME": caches[0],
        "disk of MODELSCOPE_CACHE": caches[1],
    }
    seen: set[int] = set()
    for name, folder in folders.items():
        place = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        if place.stat().st_dev not in seen:
            seen.add(place.stat().st_dev)
            free, writable = shutil.disk_usage(place).free / GIB, os.access(place, os.W_OK)
            found = f"{free:.1f} GiB free at {place}" + ("" if writable else ", not writable")
            yield judged(
                name,
                found,
                "free it, or choose another one: --output_dir, HF_HOME, MODELSCOPE_CACHE",
                error=free < 0.5,
                warning=free < 10 or not writable,
            )


def ports() -> Checks:
    """Whether processes can listen, and whether the usual ports are free."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
    except OSError as problem:
        yield Check("ports", "error", f"127.0.0.1: {problem.strerror}", "allow sockets on the loopback interface")
        return
    used = []
    for port, of in PORTS.items():
        try:
            with socket.create_server(("127.0.0.1", port)):
                pass
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE:
                raise
            used.append(f"{port} ({of})")
    yield judged(
        "ports",
        f"in use: {', '.join(used)}" if used else "free",
        "choose another one, or end what listens there",
        warning=bool(used),
    )


def hubs(clock: Callable[[], float]) -> Checks:
    """Whether the hubs answer in two seconds, and whether this clock agrees with theirs."""
    import httpx

    offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")
    urls = {
        "ModelScope": os.environ.get("MODELSCOPE_DOMAIN", "https://www.modelscope.cn"),
        "Hugging Face": os.environ.get("HF_ENDPOINT", "https://huggingface.co"),
    }

    def asked(url: str) -> tuple[str, float | None]:
        try:
            reply = httpx.head(url if "//" in url else f"https://{url}", timeout=HUB_TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as problem:
            return first_line(problem), None
        date = (
            email.utils.parsedate_to_datetime(reply.headers["date"]).timestamp() if "date" in reply.headers else clock()
        )
        return "", date - clock()

    with ThreadPoolExecutor(len(urls)) as pool:
        replies = {} if offline else dict(zip(urls, pool.map(asked, urls.values()), strict=True))
    ahead = [skew for _, skew in replies.values() if skew is not None]
    found, wrong = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(clock())), clock() < OLDEST
    if ahead and abs(ahead[0]) > 60:
        found, wrong = f"{found}, {abs(ahead[0]):.0f} s {'behind' if ahead[0] > 0 else 'ahead of'} the hubs", True
    yield judged("clock", found, "set it (`timedatectl set-ntp true`): TLS and tokens depend on it", warning=wrong)
    if offline:
        yield Check("hubs", "ok", "HF_HUB_OFFLINE is set: not asked")
    for name, (problem, _) in replies.items():
        yield judged(
            name,
            f"no answer in {HUB_TIMEOUT_S:.0f} s ({problem})" if problem else "reached",
            "give local folders as --model and --dataset, or set HTTPS_PROXY, HF_ENDPOINT or MODELSCOPE_DOMAIN",
            warning=bool(problem),
        )
