"""Events over ZeroMQ: vLLM's frames, gaps that a replay closes, and restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from eagle_server.cache.block_events import AllBlocksCleared, BlockEvents
from eagle_server.cache.radix import RadixCache, bigrams
from eagle_server.engine.kv_events import KVEventPublisher
from tests.support.kv_events import KVEventSubscriber, cached_prefixes

SIZE = 4


@pytest.fixture
def endpoints(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


@pytest.fixture
def subscribe(endpoints: tuple[str, str]) -> Iterator[Callable[[], KVEventSubscriber]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(KVEventSubscriber(*endpoints)))


class Cache:
    """A prefix cache that publishes every change."""

    def __init__(self, publisher: KVEventPublisher) -> None:
        self.publisher = publisher
        self.tree = RadixCache(1, BlockEvents(1, SIZE))
        self.page = 0
        self.publish()

    def publish(self) -> None:
        assert self.tree.events is not None
        self.publisher.publish(self.tree.events.take())

    def change(self, count: int = 1, seed: int = 0) -> None:
        draw = np.random.default_rng((seed, self.page))
        for _ in range(count):
            tokens = draw.integers(0, 3, 20).tolist()
            self.tree.insert(bigrams(tokens), range(self.page, self.page + 19))
            self.page += 19
            self.tree.evict(int(draw.integers(0, 12)))
            self.publish()

    def agrees(self, subscriber: KVEventSubscriber) -> bool:
        return subscriber.mirror.prefixes() == cached_prefixes(self.tree, SIZE)


def test_a_message_is_topic_sequence_number_and_batch() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.bind("tcp://127.0.0.1:*")
        socket.subscribe(b"kv@pod")
        port = socket.last_endpoint.decode().rpartition(":")[2]
        numbers = list[int]()
        with closing(KVEventPublisher(f"tcp://localhost:{port}", topic="kv@pod@model")) as publisher:  # it connects
            while len(numbers) < 3:  # the first ones are lost, before the subscription arrives
                publisher.publish([AllBlocksCleared()])
                while socket.poll(10):
                    topic, number, batch = socket.recv_multipart()
                    assert (topic, len(number)) == (b"kv@pod@model", 8)
                    numbers.append(int.from_bytes(number, "big"))
                    seconds, events, rank = msgspec.msgpack.decode(batch)
                    assert (type(seconds), events, rank) == (float, [{"type": "AllBlocksCleared"}], 0)
        assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]


def test_what_a_subscriber_missed_comes_with_a_replay(
    endpoints: tuple[str, str], subscribe: Callable[[], KVEventSubscriber]
) -> None:
    with closing(KVEventPublisher(*endpoints)) as publisher:
        cache = Cache(publisher)
        cache.change(30)  # before anybody listens
        early, late = subscribe(), subscribe()
        early.replay()
        assert cache.agrees(early)
        early.follow()
        cache.change(5)
        for each in (early, late):
            each.follow()
            assert cache.agrees(each)
            assert each.replays == 1
        early.mirror.blocks.clear()
        early.next = None  # as if it had been started again
        cache.change()
        early.follow()
        assert cache.agrees(early)


def test_a_restart_is_noticed_and_clears_the_view(
    endpoints: tuple[str, str], subscribe: Callable[[], KVEventSubscriber]
) -> None:
    subscriber = subscribe()
    with closing(KVEventPublisher(*endpoints)) as publisher:
        first = Cache(publisher)
        subscriber.replay()
        subscriber.follow()
        first.change(20)
        subscriber.follow()
        assert first.agrees(subscriber)
        assert subscriber.mirror.blocks
    with closing(KVEventPublisher(*endpoints)) as publisher:
        second, before = Cache(publisher), subscriber.next
        while subscriber.next == before:  # until it is connected again
            second.change(1, seed=1)
            subscriber.follow()
        assert second.agrees(subscriber)
        assert subscriber.replays == 2


def test_only_the_newest_batches_are_kept(endpoints: tuple[str, str]) -> None:
    with closing(KVEventPublisher(*endpoints, buffer_steps=3)) as publisher:
        first = publisher._next
        for _ in range(5):
            publisher.publish([AllBlocksCleared()])
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.connect(endpoints[1])
            socket.send((0).to_bytes(8, "big"))
            assert socket.recv_multipart()[1] == (first + 2).to_bytes(8, "big")


def test_a_malformed_request_is_not_answered_and_harms_nobody(
    endpoints: tuple[str, str], subscribe: Callable[[], KVEventSubscriber], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        closing(KVEventPublisher(*endpoints)) as publisher,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        cache, wrong = Cache(publisher), ([b"x"], [b""], [b"", b"short"], [b"", b"12345678", b"more"])
        cache.change(3)
        socket.connect(endpoints[1])
        for frames in wrong:
            socket.send_multipart(frames)
        subscriber = subscribe()
        subscriber.replay()
        assert cache.agrees(subscriber)
        assert not socket.poll(50)
        assert sum("a replay request should be" in record.message for record in caplog.records) == len(wrong)


def test_an_endpoint_that_cannot_be_used_is_refused_in_one_line(endpoints: tuple[str, str]) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.bind("tcp://127.0.0.1:*")
        taken = socket.last_endpoint.decode()
        with pytest.raises(ValueError, match=f"--kv-events-config: cannot listen on {taken}: Address already in use"):
            KVEventPublisher(taken)
        with pytest.raises(ValueError, match="cannot listen on tcp://somewhere:5558: No such device"):
            KVEventPublisher(endpoints[0], "tcp://somewhere:5558")
