"""Events over ZeroMQ: vLLM's frames, gaps that a replay closes, and restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from eagle_server.cache.block_events import AllBlocksCleared, BlockEvents, BlockRemoved, BlockStored
from eagle_server.cache.radix import RadixCache, bigrams
from eagle_server.engine.kv_events import END_OF_REPLAY, KVEventPublisher
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


STORED = {
    "type": "BlockStored",
    "block_hashes": [2**64 - 1, 7],
    "parent_block_hash": None,
    "token_ids": [5, 6, 8, 9],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def test_frames_and_batches_are_those_of_vllm_live_and_in_a_replay(endpoints: tuple[str, str]) -> None:
    with (
        closing(KVEventPublisher(*endpoints, topic="kv@pod@model")) as publisher,
        zmq.Context() as context,
        context.socket(zmq.SUB) as subscriber,
        context.socket(zmq.DEALER) as replays,
    ):
        subscriber.subscribe(b"")
        subscriber.connect(endpoints[0])
        while not subscriber.poll(20):  # until it has subscribed
            publisher.publish([AllBlocksCleared()])
        while subscriber.poll(100):
            subscriber.recv_multipart()
        number = publisher._next.to_bytes(8, "big")
        stored = BlockStored([2**64 - 1, 7], None, [5, 6, 8, 9], 2, None, "GPU", None)
        publisher.publish([stored, replace(stored, extra_keys=[("salt",), None]), BlockRemoved([7], "GPU")])
        publisher.publish([AllBlocksCleared()])
        topic, *rest = live = subscriber.recv_multipart()
        assert (topic, rest[0], len(live)) == (b"kv@pod@model", number, 3)
        seconds, *batch = msgspec.msgpack.decode(rest[1])
        assert seconds == pytest.approx(time.time(), abs=60)
        removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}
        assert batch == [[STORED, {**STORED, "extra_keys": [["salt"], None]}, removed], 0]
        cleared = subscriber.recv_multipart()
        assert (cleared[2][:2], cleared[2][10:]) == (b"\x93\xcb", b"\x91\x81\xa4type\xb0AllBlocksCleared\x00")
        replays.connect(endpoints[1])
        replays.send_multipart([b"", number])
        answers = [replays.recv_multipart() for _ in range(3)]
        assert answers == [[b"", *live], [b"", *cleared], [b"", b"", b"\xff" * 8, b""]]


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


def test_a_client_that_reads_nothing_gets_a_bounded_number_of_answers(
    endpoints: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    requests, steps = 50, 3
    large = BlockRemoved(list(range(2**63, 2**63 + 20_000)), "GPU")  # more than the buffers between the processes hold
    with (
        closing(KVEventPublisher(*endpoints, buffer_steps=steps)) as publisher,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        first = publisher._next
        for _ in range(steps):
            publisher.publish([large])
        replay = [*(number.to_bytes(8, "big") for number in range(first, first + steps)), END_OF_REPLAY]
        socket.rcvhwm = 1
        socket.connect(endpoints[1])
        for _ in range(requests):
            socket.send_multipart((b"", bytes(8)))

        def cut_off() -> int:
            return sum("a replay was cut off" in record.message for record in caplog.records)

        deadline = time.monotonic() + 30
        while cut_off() < requests - 10:
            assert time.monotonic() < deadline, "every request is answered in full"
            time.sleep(0.01)
        answers = list[bytes]()

        def read(count: int) -> None:
            """Until so many requests were answered, in full or in part."""
            while answers.count(END_OF_REPLAY) + cut_off() < count:
                if socket.poll(100):
                    answers.append(socket.recv_multipart()[2])

        read(requests)
        whole = answers.count(END_OF_REPLAY)
        while answers.count(END_OF_REPLAY) == whole:  # that of no batches, asked for last
            socket.send_multipart((b"", (first + steps).to_bytes(8, "big")))
            requests += 1
            read(requests)
        assert 2 * len(replay) <= len(answers) < 12 * len(replay)
        assert answers[: 2 * len(replay)] == 2 * replay, "two whole ones, in order"
        for _ in range(5):
            socket.send_multipart((b"", bytes(8)))
            assert [socket.recv_multipart()[2] for _ in replay] == replay, "who reads gets all, again and again"


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
