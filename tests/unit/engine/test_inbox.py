"""The engine's inbox: the loop runs cycles under a flood of messages, and aborted requests cost the engine nothing."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import zmq

from eagle_server.engine import process
from eagle_server.engine.process import _Inbox
from eagle_server.request import Abort, FinishReason, FlushCache, Inbound, Request
from tests.support.engines import request


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        for socket in (pull, push):
            socket.set_hwm(0)
            socket.linger = 0
        pull.bind("inproc://inbox")
        push.connect("inproc://inbox")
        yield pull, push


def turns(inbox: _Inbox) -> list[list[Inbound]]:
    """What the inbox gives in each turn, until it is empty."""
    taken = []
    while not inbox.stays_empty(0):
        taken.append(inbox.take(wait=True))
    return taken


def names(messages: list[Inbound]) -> list[str]:
    return [getattr(message, "request_id", "flush") for message in messages]


def test_a_turn_of_the_loop_takes_a_bounded_number_of_messages_in_their_order(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    pull, push = sockets
    inbox, sent = _Inbox(pull), list[Inbound]()
    for number in range(1000):
        sent.append(request(number, [1, 2]))
        if number % 100 == 0:
            sent += [FlushCache(), Abort(f"{number} runs")]
    for message in sent:
        push.send(msgspec.msgpack.encode(message))
    taken = turns(inbox)
    assert max(map(len, taken)) <= process._GIVEN
    assert names([message for turn in taken for message in turn]) == names(sent)
    assert inbox.take_aborted() == []


def test_a_request_that_is_aborted_in_the_inbox_never_reaches_the_engine(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    pull, push = sockets
    inbox = _Inbox(pull)
    for number in range(1024):
        push.send(msgspec.msgpack.encode(request(number, [1, 2])))
    seen = inbox.take(wait=True)
    for number in range(1024):
        push.send(msgspec.msgpack.encode(Abort(str(number))))
    push.send(msgspec.msgpack.encode(request("neighbour", [1, 2])))
    seen += [message for turn in turns(inbox) for message in turn]
    requests = names([message for message in seen if isinstance(message, Request)])
    aborts = names([message for message in seen if isinstance(message, Abort)])
    assert requests[-1] == "neighbour"
    assert requests[:-1] == aborts
    dropped = inbox.take_aborted()
    assert {delta.finish_reason for delta in dropped} == {FinishReason.ABORT}
    assert sorted(int(name) for name in (*aborts, *(delta.request_id for delta in dropped))) == list(range(1024))
    assert len(aborts) <= 2 * process._GIVEN
