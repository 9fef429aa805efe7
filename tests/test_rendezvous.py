"""Where ranks of several nodes meet, and who has not come."""

import multiprocessing
import os
import socket

import psutil
import pytest
import torch.distributed as dist

from swift import rendezvous
from swift.errors import EngineError, ResourceError

ELSEWHERE = "127.0.0.2"  # not the loopback address of one node: as if there were several


@pytest.fixture
def place(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def of(rank, *, world_size=4, per_node=2):
        names = {"MASTER_ADDR": ELSEWHERE, "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": world_size}
        for name, value in (names | {"LOCAL_WORLD_SIZE": per_node}).items():
            monkeypatch.setenv(name, str(value))
        return port

    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(rendezvous, "PATIENT_S", 0.3)
    return of


def meet(answers, limit_s):
    try:
        rendezvous.process_group_place(limit_s)
        answers.put("met")
    except EngineError as error:
        answers.put(str(error))


def test_a_node_that_does_not_come_is_named_to_all_who_came(place, capfd):
    answers = multiprocessing.Queue()
    place(1)
    other = multiprocessing.get_context("fork").Process(target=meet, args=(answers, 20.0))
    other.start()
    place(0, world_size=6)
    with pytest.raises(EngineError, match=r"node 1, node 2: has not come to 127.0.0.2:\d+ within 1 s .*NODE_RANK"):
        rendezvous.process_group_place(1.0)
    assert "node 1, node 2: has not come" in answers.get(timeout=10)
    other.join()
    assert "waiting for node 1, node 2 at" in capfd.readouterr().err


def test_a_process_of_this_node_that_does_not_come_is_named(place, capfd):
    place(0, world_size=2)
    with pytest.raises(EngineError, match="rank 1: has not come"):
        rendezvous.process_group_place(1.0)
    assert "waiting for rank 1 at" in capfd.readouterr().err


def test_node_0_that_is_not_there_is_named(place):
    place(1)
    with pytest.raises(EngineError, match=r"node 0: cannot be reached at 127.0.0.2:\d+ within 1 s"):
        rendezvous.process_group_place(1.0)


def test_ranks_meet(place):
    answers = multiprocessing.Queue()
    place(1, world_size=2, per_node=1)
    other = multiprocessing.get_context("fork").Process(target=meet, args=(answers, 20.0))
    other.start()
    place(0, world_size=2, per_node=1)
    found = rendezvous.process_group_place(20.0)
    assert (found["rank"], found["world_size"]) == (0, 2)
    assert answers.get(timeout=10) == "met"
    other.join()


def test_a_taken_port_is_named(place):
    with socket.create_server(("", place(0))), pytest.raises(ResourceError, match="MASTER_PORT"):
        rendezvous.process_group_place(1.0)


def test_on_one_node_nothing_listens_at_another_address(place, monkeypatch):
    place(0, world_size=2, per_node=2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    answers = multiprocessing.Queue()
    ranks = [multiprocessing.get_context("fork").Process(target=listening, args=(rank, answers)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    found = [answers.get(timeout=30) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert {address for addresses in found for address in addresses} == {"127.0.0.1"}
    assert all(found)


def listening(rank, answers):
    """Addresses at which a rank of a process group of gloo listens, its store included; not what was inherited."""
    before = listeners()
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", **rendezvous.process_group_place(20.0))
    dist.new_group(backend="gloo")
    dist.barrier()
    answers.put([address.ip for address in listeners() - before])
    dist.barrier()


def listeners():
    return {one.laddr for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN}


def test_gloo_uses_the_interface_of_the_way_to_the_first_node(monkeypatch):
    for host, source in (("10.0.0.1", "10.0.0.7"), ("debian", "127.0.1.1")):  # the second is this machine's own name
        ways = {host: source, rendezvous.ANYWHERE: "10.0.0.7"}
        monkeypatch.setattr(rendezvous, "_source_address", ways.get)
        address = type("Address", (), {"address": "10.0.0.7"})
        monkeypatch.setattr(psutil, "net_if_addrs", lambda one=address: {"lo": [], "eth1": [one]})
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        rendezvous.lead_gloo(host)
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
        rendezvous.lead_gloo(host)
        assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0", "what the user names stays"


def test_the_way_to_this_machine_has_its_own_address():
    assert rendezvous._source_address("127.0.0.1") == "127.0.0.1"
    assert rendezvous._source_address("no.such.host.invalid") is None
