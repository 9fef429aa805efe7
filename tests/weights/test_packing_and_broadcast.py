"""Ways of weights without an engine: packing, parcels of the object store, process groups, the choice among them."""

import contextlib
import json
import os
import pickle
import threading
import time
from dataclasses import asdict
from types import SimpleNamespace

import psutil
import pytest
import torch
from processes import wait_for

from swift.errors import SyncFailed
from swift.rollout.engines.actor_client import ActorClient
from swift.rollout.weights import broadcast, object_store
from swift.rollout.weights.base import Bucket
from swift.rollout.weights.broadcast import (
    Announcement,
    BroadcastGroup,
    BroadcastReceiver,
    BroadcastSender,
    Invitation,
)
from swift.rollout.weights.digest import checksum, checksums, digest_of

# --- packing and the object store -----------------------------------------------------------------------------------


def every_bit(dtype):
    """All 16-bit patterns as numbers, NaNs with payload included."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def tensors():
    shared = torch.randn(7, 3)
    return [
        ("bf16", every_bit(torch.bfloat16)),
        ("fp16", every_bit(torch.float16)),
        ("fp32", torch.randn(5, 3).t()),
        ("embedding", shared),
        ("head", shared),
        ("int", torch.tensor([1, -1], dtype=torch.int64)),
        ("flag", torch.tensor([True, False, True])),
        ("scalar", torch.tensor(3.5)),
        ("none", torch.zeros(0, 4)),
    ]


def written_out(tensor):
    """The checksum by its definition, one word after the other."""
    mix, data = 0x9E3779B97F4A7C15, tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    total = sum(word * (2 * mix * i + 1) for i, word in enumerate(data[:whole].clone().view(torch.int64).tolist()))
    total += sum((byte + 1) * (mix * (i + 3) | 1) for i, byte in enumerate(data[whole:].tolist()))
    return total % 2**64


@pytest.mark.parametrize("count", [0, 1, 3, 7, 1023, 2048, 2049, 4100, 2 * 1024 * 130 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_a_checksum_is_the_weighted_sum_of_all_words_however_they_are_summed(count, dtype):
    tensor = (torch.randn(count, generator=torch.Generator().manual_seed(count)) * 100).to(dtype)
    assert checksum(tensor) == written_out(tensor)
    assert checksum(tensor[1:]) == written_out(tensor[1:]), "it begins at an odd address"


def test_checksums_of_many_tensors_are_those_of_each():
    given = [tensor for _, tensor in tensors()]
    assert checksums(given) == [written_out(tensor) for tensor in given]


def test_the_place_of_every_word_counts():
    tensor = torch.randn(3000, 2, generator=torch.Generator().manual_seed(0))
    found = {checksum(tensor)}
    for one, other in [(0, 1), (0, 1024), (1023, 1024), (5, 2999)]:
        swapped = tensor.clone()
        swapped[[one, other]] = tensor[[other, one]]
        found.add(checksum(swapped))
    rolled, flipped = tensor.roll(512, 0), tensor.flip(0)
    assert len(found | {checksum(rolled), checksum(flipped), checksum(tensor[:-1])}) == 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_checksum_is_the_same_on_a_gpu():
    given = [tensor for _, tensor in tensors()] + [torch.randn(2 * 1024 * 130 + 5)]
    assert checksums([tensor.cuda() for tensor in given]) == checksums(given)


def test_packed_tensors_come_out_bit_for_bit_and_a_tied_one_takes_no_room():
    given = tensors()
    flat, entries = broadcast.pack(Bucket(given))
    assert digest_of(broadcast.unpack(flat, entries)) == digest_of(given)
    places = {name: offset for name, _, _, offset in entries}
    assert places["head"] == places["embedding"]
    assert all(offset % broadcast.ALIGNMENT == 0 for offset in places.values())


def test_a_table_of_contents_that_does_not_fit_is_refused():
    with pytest.raises(SyncFailed, match=r"lies at 0\.\.16 of a bucket of 8 bytes"):
        broadcast.unpack(torch.zeros(8, dtype=torch.uint8), [("a", "float32", (4,), 0)])


def test_a_parcel_gives_the_tensors_back_bit_for_bit_and_a_tied_one_once():
    given = tensors()
    tied = [*given, ("tied", given[0][1])]
    parcels = [object_store.byte_arrays_of(Bucket(one)) for one in (given, tied)]
    sizes = [len(pickle.dumps(parcel, protocol=5)) for parcel in parcels]
    assert sizes[1] - sizes[0] < given[0][1].nbytes / 10
    assert digest_of(object_store.tensors_of(pickle.loads(pickle.dumps(parcels[1], protocol=5)))) == digest_of(tied)
    assert object_store.tensors_of(object_store.byte_arrays_of(Bucket([]))) == []


# --- broadcast ---------------------------------------------------------------------------------------------------


def in_thread(work):
    """Starts `work`; a function that waits for it and gives what it returned, or raises."""
    outcome = []

    def run():
        try:
            outcome.append((work(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait():
        thread.join(60)
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    return wait


class Receivers:
    """Engines in threads of this process. ranks: how many processes each has."""

    def __init__(self, ranks, **options):
        self.sender = BroadcastSender(ranks, **options)
        self.ends = {name: [BroadcastReceiver(torch.device("cpu")) for _ in range(n)] for name, n in ranks.items()}
        self.invited = []

    def deliver(self, bucket, names=()):
        """What each process of these engines got, with a thread for each engine and JSON-safe steps as over a wire."""

        def deliver(name):
            header = json.loads(json.dumps(self.sender.announce(name, bucket)))
            self.invited += [name] if "invitation" in header else []
            announced = Announcement([], header=header)
            assert announced.infos == bucket.infos
            waits = [
                in_thread(lambda end=end, rank=rank: end.receive(announced.for_rank(rank)).tensors)
                for rank, end in enumerate(self.ends[name])
            ]
            received = []
            self.sender.send(lambda: received.extend(wait() for wait in waits))
            return received

        waits = [in_thread(lambda name=name: deliver(name)) for name in names or self.ends]
        return [tensors for wait in waits for tensors in wait()]


def test_a_broadcast_reaches_every_process_bit_for_bit_until_one_fails():
    group, given = Receivers({"a": 1, "b": 2, "c": 1}, timeout_s=20), tensors()
    for _ in range(2):
        received = group.deliver(Bucket(given))
        assert [digest_of(tensors) for tensors in received] == [digest_of(given)] * 4
    assert sorted(group.invited) == ["a", "b", "c"]
    for end in group.ends["b"]:
        end.close()
    with pytest.raises(SyncFailed, match="gloo broadcast"):
        group.deliver(Bucket(given))
    assert not group.sender.is_open
    with pytest.raises(SyncFailed, match="gloo broadcast"):
        group.deliver(Bucket(given))


def test_a_sender_that_gives_up_frees_the_engines_that_wait_for_it():
    group, given = Receivers({"a": 1}, timeout_s=300), tensors()
    group.deliver(Bucket(given))
    waiting = in_thread(lambda: group.ends["a"][0].receive(Announcement([], header={"entries": [], "size": 4})))
    group.sender.close()
    with pytest.raises(SyncFailed, match="gloo broadcast"):
        waiting()


def test_one_engine_that_fails_frees_the_threads_of_the_others():
    group = Receivers({"a": 1, "b": 1}, timeout_s=300)
    sending = in_thread(lambda: group.deliver(Bucket(tensors()), ["a"]))
    wait_for(lambda: group.invited)
    group.sender.fail("b failed")
    with pytest.raises(SyncFailed, match="gloo broadcast: b failed"):
        sending()


@pytest.mark.parametrize("joined", [False, True])
def test_an_engine_that_refuses_a_bucket_ends_the_broadcast_at_once(joined):
    """Also when its thread is the one that sends, in the rendezvous or in the middle of a broadcast."""
    group = Receivers({"a": 1, "b": 1}, timeout_s=300)
    if joined:
        group.deliver(Bucket(tensors()))
    bucket, began = Bucket(tensors()), time.monotonic()

    def refuse():
        raise SyncFailed("weights: b: out of memory")

    def deliver(name):
        header = group.sender.announce(name, bucket)
        end, announced = group.ends[name][0], Announcement([], header=header)
        group.sender.send(refuse if name == "b" else lambda: end.receive(announced))

    waits = [in_thread(lambda name=name: deliver(name)) for name in ("a", "b")]
    with pytest.raises(SyncFailed, match="out of memory"):
        waits[0]()
    with pytest.raises(SyncFailed, match="out of memory"):
        waits[1]()
    group.sender.close()
    assert time.monotonic() - began < 5
    with pytest.raises(SyncFailed, match="out of memory"):
        group.sender.announce("a", bucket)


def test_a_receiver_that_never_comes_is_waited_for_in_bounds():
    began = time.monotonic()
    with pytest.raises(SyncFailed, match="gloo"):
        sender = BroadcastSender({"a": 1}, timeout_s=1.0)
        sender.announce("a", Bucket(tensors()))
        sender.send(lambda: time.sleep(5))
    with pytest.raises(SyncFailed, match="another engine was not told in time"):
        sender = BroadcastSender({"a": 1, "b": 1}, timeout_s=1.0)
        sender.announce("a", Bucket(tensors()))
        sender.send(lambda: time.sleep(5))
    assert time.monotonic() - began < 30
    place = Invitation("127.0.0.1", port=1, rank=1, size=2, backend="gloo", timeout_s=0.5)
    receiver = BroadcastReceiver(torch.device("cpu"))
    with pytest.raises(SyncFailed, match=r"store at 127\.0\.0\.1"):
        receiver.receive(Announcement([], header={"entries": [], "size": 0, "invitation": asdict(place)}))
    with pytest.raises(SyncFailed, match="without a group"):
        receiver.receive(Announcement([], header={"entries": [], "size": 0}))


def test_the_place_to_meet_listens_at_its_own_address_only():
    sender = BroadcastSender({"a": 1}, timeout_s=1.0)
    port = sender.announce("a", Bucket(tensors()))["invitation"]["port"]
    seen = {one.laddr.ip for one in psutil.Process().net_connections() if one.laddr.port == port}
    assert seen == {"127.0.0.1"}


class FakeNccl:
    """A process group whose communicator and collectives hang as told."""

    made = ()
    connects = completes = True

    class Options:
        _timeout = None

    def __init__(self, store, rank, size, options):
        self.seen = os.environ.get(broadcast.ERROR_HANDLING)
        self.limit_s = options._timeout.total_seconds()
        self.calls = []
        FakeNccl.made.append(self)

    def eager_connect_single_device(self, device):
        self.calls.append("connect")
        if not FakeNccl.connects:
            time.sleep(60)

    def broadcast(self, tensors, options):
        self.calls.append("broadcast")
        return SimpleNamespace(wait=lambda: None)

    def abort(self):
        self.calls.append("abort")


@pytest.fixture
def nccl(monkeypatch):
    """NCCL of this test's making, without a GPU."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    event = SimpleNamespace(record=lambda: None, query=lambda: FakeNccl.completes)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(FakeNccl, "made", [])
    monkeypatch.setattr(FakeNccl, "connects", True)
    monkeypatch.setattr(FakeNccl, "completes", True)
    return FakeNccl


def nccl_group(store, rank, *, timeout_s=0.5):
    return BroadcastGroup(store, Invitation("127.0.0.1", 0, rank, 2, "nccl", timeout_s), torch.device("cuda:0"))


def test_a_failing_collective_does_not_end_the_process(nccl, monkeypatch):
    monkeypatch.setenv(broadcast.ERROR_HANDLING, "3")
    group = nccl_group(torch.distributed.HashStore(), 1)
    assert (nccl.made[0].seen, nccl.made[0].limit_s > 1) == ("0", True)
    assert os.environ[broadcast.ERROR_HANDLING] == "3"
    nccl.completes = False
    with pytest.raises(SyncFailed, match=r"nccl broadcast: 4 bytes: 0\.5 s passed"):
        group.broadcast(torch.zeros(4, dtype=torch.uint8))
    assert nccl.made[0].calls == ["connect", "broadcast", "abort"]
    with pytest.raises(SyncFailed, match="its group is gone"):
        group.broadcast(torch.zeros(4, dtype=torch.uint8))


def test_the_trainer_does_not_connect_to_an_engine_that_never_joins(nccl):
    with pytest.raises(SyncFailed, match="nccl group of 2: rank 0"):
        nccl_group(torch.distributed.HashStore(), 0)
    assert nccl.made[0].calls == ["abort"]


def test_a_communicator_that_is_never_made_is_waited_for_in_bounds(nccl):
    nccl.connects = False
    began = time.monotonic()
    with pytest.raises(SyncFailed, match=r"rank 1: the others did not connect within 0\.5 s"):
        nccl_group(torch.distributed.HashStore(), 1)
    assert time.monotonic() - began < 30
    assert nccl.made[0].calls == ["connect", "abort"]


def test_both_ends_of_a_group_find_each_other(nccl):
    store = torch.distributed.HashStore()
    trainer = in_thread(lambda: nccl_group(store, 0, timeout_s=10))
    nccl_group(store, 1, timeout_s=10)
    trainer().broadcast(torch.zeros(4, dtype=torch.uint8))


# --- the choice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "devices", "way"),
    [
        ("cpu", ("cpu:1",), "object_store"),
        ("cpu", ("cuda:1",), "object_store"),
        ("cuda:0", ("cpu:0",), "object_store"),
        ("cuda:0", ("cuda:1",), "broadcast"),
        ("cuda:0", ("cuda:0", "cuda:1"), "broadcast"),
    ],
)
def test_the_way_follows_from_the_devices(tensor, devices, way):
    client = SimpleNamespace(devices=devices)
    assert ActorClient.default_transport(client, torch.device(tensor)) == way
