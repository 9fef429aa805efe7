"""Messages between ranks through the store: order, several readers, and a store that is gone."""

import pytest
import torch.distributed as dist

from swift.errors import EngineError
from swift.trainers.board import StoreBoard


@pytest.fixture
def boards(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    made = [StoreBoard(None) for _ in range(3)]
    made[0].keeps = store
    return made


def test_messages_of_a_channel_come_in_order_and_each_reader_has_its_own_place(boards):
    one, two, three = boards
    assert two.read("work") is None
    one.post("work", [1, 2])
    three.post("work", {"b": 2.5})
    one.post("other", "end")
    assert [two.read("work"), two.read("work"), two.read("work")] == [[1, 2], {"b": 2.5}, None]
    assert one.read("work") == [1, 2]
    assert two.read("other") == "end"


def test_what_was_read_by_all_can_be_swept_and_later_messages_still_arrive(boards):
    one, two, _ = boards
    one.post("work", 1)
    assert two.read("work") == 1
    one.sweep()
    assert two.read("work") is None
    one.post("work", 2)
    assert two.read("work") == 2


def test_a_store_that_is_gone_is_told_in_one_line(boards):
    one, two, three = boards
    del one.keeps
    for use in (lambda: two.post("work", 1), lambda: three.read("work")):
        with pytest.raises(EngineError, match="rank 0: its store cannot be reached"):
            use()


def test_beats_of_others_are_counted_and_ones_own_are_not(boards):
    one, two, three = boards
    assert [board.beats() for board in boards] == [0, 0, 0]
    one.beat()
    one.beat()
    three.beat()
    assert [board.beats() for board in boards] == [1, 3, 2]
    one.sweep()
    assert two.beats() == 3
