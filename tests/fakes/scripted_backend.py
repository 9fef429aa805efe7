"""A backend plugin for worker processes: `ScriptedEngine` with faults that `engine_kwargs` choose.

step_s: seconds of a step. frozen: request ids that make the engine stand still for good. endless: request ids that
never end by themselves. bucket_s: seconds that a bucket takes. crash_on: request ids at which it raises something that
is no error of ours. children: processes to start ("plain", "stubborn", "mapped"). fail: fails to start, "config" or
"crash", or at every start but the first, which leaves a file of that name.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from scripted_engine import ScriptedEngine

from swift.errors import ConfigError
from swift.plugin import inference_backends

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
MAPPED = (
    "import signal, time; from multiprocessing import resource_tracker as t, shared_memory as s;"
    "m = s.SharedMemory('psm_swift%d' % __import__('os').getpid(), create=True, size=4096);"
    "t.unregister(m._name, 'shared_memory'); print('up', flush=True); time.sleep(600)"
)
PLAIN = "print('up', flush=True); import time; time.sleep(600)"


class ScriptedWorker(ScriptedEngine):
    def __init__(self, spec):
        kwargs = dict(spec.engine_kwargs)
        fail = kwargs.get("fail")
        if fail == "config":
            raise ConfigError("--model: scripted: is refused, as told; choose another")
        if fail == "crash":
            print("about to crash, as told", flush=True)
            os._exit(3)
        if fail is not None:
            if Path(fail).exists():
                raise ValueError("scripted: starts only once, as told")
            Path(fail).touch()
        super().__init__(step_s=kwargs.get("step_s", 0.0), max_model_len=spec.max_model_len or 4096)
        self.kwargs = kwargs
        self.children = []
        for kind in kwargs.get("children", ()):
            code = {"stubborn": STUBBORN, "mapped": MAPPED, "plain": PLAIN}[kind]
            child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
            child.stdout.readline()
            self.children.append(child)

    def _told(self, what):
        """Outstanding requests that were named for a fault, whatever the queue calls them."""
        return [name for name in self._outstanding if name.rpartition(":")[2] in self.kwargs.get(what, ())]

    def _step(self):
        self.counters.decode_steps += 1
        self.counters.decode_rows += len(self._outstanding)
        if self._told("frozen"):
            stand_still()
        if self._told("crash_on"):
            raise RuntimeError("scripted: crash, as told")
        for name in self._told("endless"):
            self._outstanding[name].length = 1 << 30
        return super()._step()

    def take(self, bucket):
        time.sleep(self.kwargs.get("bucket_s", 0.0))

    def facts(self):
        return {
            "pid": os.getpid(),
            "affinity": sorted(os.sched_getaffinity(0)),
            "omp": os.environ.get("OMP_NUM_THREADS"),
            "children": [child.pid for child in self.children],
        }


def stand_still():
    while True:
        time.sleep(0.05)


inference_backends["scripted"] = ScriptedWorker
