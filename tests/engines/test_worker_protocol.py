"""Frames, what is in them, and what is refused."""

import math
import os
import socket
import struct

import pytest

from swift.errors import EngineAsleep, EngineError, PromptTooLong
from swift.rollout.engines.worker import protocol
from swift.types import Completion, Request, SamplingParams


def test_a_stream_is_cut_into_messages_whatever_pieces_it_arrives_in():
    messages = [{"call": "a", "text": "é" * n} for n in (0, 1, 500)]
    stream = b"".join(protocol.encode(message) for message in messages)
    for size in (1, 3, 7, len(stream)):
        decoder = protocol.Decoder()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [one for piece in pieces for one, _ in decoder.feed(piece)] == messages


def test_descriptors_arrive_with_the_message_that_names_them():
    ours, theirs = socket.socketpair()
    files = [os.memfd_create(f"file {n}") for n in range(3)]
    for number, file in enumerate(files):
        os.write(file, b"%d" % number)
    with ours, theirs:
        protocol.write(ours, protocol.encode({"call": "none"}))
        protocol.write(ours, protocol.encode({"call": "two", "fds": 2}), files[:2])
        protocol.write(ours, protocol.encode({"call": "one", "fds": 1}), files[2:])
        decoder, got = protocol.Decoder(), []
        while len(got) < 3:
            data, descriptors = protocol.read(theirs)
            got += decoder.feed(data, descriptors)
    contents = [(message["call"], [os.pread(one, 8, 0) for one in given]) for message, given in got]
    assert contents == [("none", []), ("two", [b"0", b"1"]), ("one", [b"2"])]
    for descriptor in [*files, *(one for _, given in got for one in given)]:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (struct.pack(">I", protocol.MAX_FRAME_BYTES + 1), "longer than"),
        (struct.pack(">I", 5) + b"hello", "no JSON object"),
        (struct.pack(">I", 2) + b"[]", "no JSON object"),
        (protocol.encode({"call": "x", "fds": 1}), "descriptors"),
    ],
)
def test_what_is_no_frame_is_refused(data, what):
    with pytest.raises(protocol.ProtocolError, match=what):
        list(protocol.Decoder().feed(data))


def test_a_frame_that_the_other_side_would_refuse_is_not_sent():
    with pytest.raises(protocol.ProtocolError, match="longer than"):
        protocol.encode({"text": "x" * protocol.MAX_FRAME_BYTES})


def test_requests_and_completions_survive_the_way():
    sampling = SamplingParams(max_new_tokens=7, temperature=0.1, stop=("a", "b"), stop_token_ids=(3,), seed=2**62)
    request = Request("g/1", [1, 2, 3], sampling)
    (message, _), *_ = protocol.Decoder().feed(protocol.encode(protocol.request_to_json(request)))
    assert protocol.request_from_json(message) == request
    completion = Completion("g/1", [5, 6], [-0.1, -1e-30], "stop", versions=[(1, 0, 1), (2, 1, 2)])
    (message, _), *_ = protocol.Decoder().feed(protocol.encode(protocol.completion_to_json(completion)))
    assert protocol.completion_from_json(message) == completion


def test_a_logprob_that_is_no_number_arrives_as_such():
    state = protocol.completion_to_json(Completion("r", [1, 2], [math.nan, -math.inf], "stop"))
    (message, _), *_ = protocol.Decoder().feed(protocol.encode(state))
    first, second = protocol.completion_from_json(message).logprobs
    assert math.isnan(first)
    assert second == -math.inf


def test_errors_keep_their_type_and_say_whose_they_are():
    long = protocol.error_from_json(protocol.error_to_json(PromptTooLong(9, 8)), "engine 1")
    assert isinstance(long, PromptTooLong)
    assert (long.length, long.limit) == (9, 8)
    assert str(long) == "engine 1: prompt: 9 tokens: longer than the engine's limit of 8 tokens"
    assert type(protocol.error_from_json(protocol.error_to_json(EngineAsleep("x: y")), "e")) is EngineAsleep
    foreign = protocol.error_from_json(protocol.error_to_json(RuntimeError("boom\nmore")), "e")
    assert type(foreign) is EngineError
    assert str(foreign) == "e: RuntimeError: boom"
