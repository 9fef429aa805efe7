"""Messages between ranks through the store: order, several readers, a store that is gone, and strangers at the door."""

import os

import pytest
import torch.distributed as dist
from trap import trap

from swift.errors import EngineError
from swift.rollout.mailbox import PREFIX, End, Mailbox, Sample


@pytest.fixture
def mailboxes(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    made = [Mailbox() for _ in range(3)]
    made[0].keeps = store
    return made


def test_messages_of_a_channel_come_in_order_and_each_reader_has_its_own_place(mailboxes):
    one, two, three = mailboxes
    assert two.read("work") is None
    one.post("work", Sample([1, 2]))
    three.post("work", Sample([3]))
    one.post("other", End())
    assert [two.read("work"), two.read("work"), two.read("work")] == [Sample([1, 2]), Sample([3]), None]
    assert one.read("work") == Sample([1, 2])
    assert two.read("other") == End()


def test_what_was_read_by_all_can_be_swept_and_later_messages_still_arrive(mailboxes):
    one, two, _ = mailboxes
    one.post("work", Sample([1]))
    assert two.read("work") == Sample([1])
    one.sweep()
    assert two.read("work") is None
    one.post("work", Sample([2]))
    assert two.read("work") == Sample([2])


def test_a_store_that_is_gone_is_told_in_one_line(mailboxes):
    one, two, three = mailboxes
    del one.keeps
    for use in (lambda: two.post("work", End()), lambda: three.read("work")):
        with pytest.raises(EngineError, match="rank 0: its store cannot be reached"):
            use()


def test_what_a_stranger_leaves_in_the_store_is_refused_and_not_executed(mailboxes, tmp_path):
    owned = tmp_path / "owned"
    stranger = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    for channel, content in (("done", trap(owned)), ("work", b"hello")):
        stranger.set(f"{PREFIX}/{channel}/{stranger.add(f'{PREFIX}/{channel}', 1)}", content)
        with pytest.raises(EngineError, match="a message that no rank of this run wrote"):
            mailboxes[0].read(channel)
    assert not owned.exists()
