"""A pool over engines of this process: its clients call the host of an engine without an actor around it."""

import contextlib
import threading
from dataclasses import replace

from swift.errors import EngineDead
from swift.rollout.engines.actor_client import ENGINE_METHODS
from swift.rollout.engines.base import EngineCounters
from swift.rollout.engines.client import EngineClient
from swift.rollout.engines.events import Lost, Timeouts
from swift.rollout.engines.pool import EnginePool
from swift.rollout.engines.process import on_thread
from swift.rollout.engines.ray_actor import EngineHost
from swift.rollout.weights.object_store import byte_arrays_of


class LocalClient(EngineClient):
    """To an engine in this process; `again` makes another one when it died."""

    stored = "object_store"
    devices = ("cpu",)
    restartable = False
    loading = threading.Lock()  # transformers changes its classes while it loads: two threads leave them changed

    def __init__(self, engine, name, timeouts, again):
        super().__init__(name, timeouts, keeps_weights=again is not None)
        self.again = again
        self._taking = threading.Lock()
        self._begin(engine)

    def _begin(self, engine):
        self.engine, self.instance, self.host = engine, object(), EngineHost()
        self.host.open(engine, self._bring)

    def connect(self):
        return replace(self.engine.capabilities, shares_weights=False)

    def _bring(self):
        with self._taking:
            arrivals, counters = self.host.take(0.0)
            self.instance_counters = EngineCounters(**counters)
            for arrival in arrivals:
                self.deliver(self.instance, arrival)

    def post(self, instance, requests):
        self.host.submit(list(requests))

    def abort(self, request_ids):
        self.host.abort(request_ids)

    def rebuild(self):
        with self.loading:
            super().rebuild()

    def call(self, name, timeout_s, **fields):
        try:
            return self.host.do(name, **fields) if name in ENGINE_METHODS else getattr(self.host, name)(**fields)
        except EngineDead as error:
            raise Lost(str(error)) from None

    def abort_update(self, update):
        with contextlib.suppress(EngineDead):
            self.host.abort_update(update)
            self.host._live.do(lambda engine: None).result(60)  # it has taken effect

    def send_bucket(self, update, way, payload, timeout_s):
        return on_thread(
            lambda: self.call("bucket", timeout_s, update=update, way=way, payload=payload), "bucket"
        ).result

    def default_transport(self, device):
        return "object_store"

    def receivers(self):
        return self.engine.receivers

    def payload(self, way, bucket, version):
        return [(info, array.copy()) for info, array in byte_arrays_of(bucket)]

    def address(self):
        return "127.0.0.1"

    def replace(self, how):
        self.host.close()
        if self.again is None:
            raise EngineDead(f"{self.name}: {how}")
        self._begin(self.again())
        return EngineCounters(restarts=1)

    def ask_health(self):
        return self.host.health()

    def end(self):
        self.host.close()


def local_pool(*engines, again=None, **timeouts):
    """Engines of this process as one."""
    bounds = Timeouts(**timeouts)
    return EnginePool([LocalClient(engine, f"engine {n}", bounds, again) for n, engine in enumerate(engines)])


def engines_of(pool):
    """Those that are alive."""
    return [client.engine for client in pool.engines]
