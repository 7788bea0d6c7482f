"""Publishes the events of the prefix cache over ZeroMQ, in vLLM's message format. Routers by prefix subscribe to them.

A message has three frames: the topic, a sequence number of 8 bytes (big-endian), and a batch in msgpack: the time in
seconds, the events of one step of the engine, and the data-parallel rank, which is 0.

Sequence numbers are consecutive in a process. The first one is the time in microseconds, so they also grow from process
to process: a subscriber that compares them notices a restart as a gap, and the first batch after it clears its view.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from eagle_server.cache.block_events import BlockEvent

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_REQUEST_FRAMES = 3  # a replay's request: identity, empty, the first sequence number
_RANK = 0


class KVEventPublisher:
    """Sends batches to all subscribers, and repeats the newest `buffer_steps` batches on request.

    The PUB socket binds an address, or `*`, and connects to a host name, as one of many workers with one subscriber. It
    drops batches for a subscriber that is `hwm` batches behind. `replay_endpoint`: a ROUTER socket, served by a thread.
    A request is a sequence number of 8 bytes; the answers are the batches from there on and one with END_OF_REPLAY.
    If a client does not read enough, its next answers are cut off, and it misses END_OF_REPLAY.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
    ) -> None:
        """
        Raises:
            ValueError: an endpoint cannot be used.
        """
        self._topic, self._encode = topic.encode(), msgspec.msgpack.Encoder().encode
        self._next = time.time_ns() // 1000
        self._newest = deque[tuple[bytes, bytes]](maxlen=buffer_steps if replay_endpoint else 0)
        self._lock = threading.Lock()  # guards the newest batches
        self._context = zmq.Context()
        self._publications = self._context.socket(zmq.PUB)
        self._publications.set_hwm(hwm)
        try:
            _attach(self._publications, endpoint, connects=_is_name(endpoint))
            if replay_endpoint is not None:
                replays = self._context.socket(zmq.ROUTER)
                # Two whole replays: ZeroMQ reports what a client has read only once that is half of the limit.
                replays.sndhwm = 2 * (buffer_steps + 1)
                replays.router_mandatory = True  # raise an error instead of dropping batches in the middle of a replay
                _attach(replays, replay_endpoint)
                threading.Thread(target=self._serve, args=(replays,), name="kv-event-replay", daemon=True).start()
        except ValueError:
            self.close()
            raise

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Send the events of one step. It never blocks."""
        number = self._next.to_bytes(8, "big")
        self._next += 1
        batch = self._encode((time.time(), events, _RANK))
        with self._lock:
            self._newest.append((number, batch))
        self._publications.send_multipart((self._topic, number, batch))

    def close(self) -> None:
        """Close the sockets and end the thread."""
        self._publications.close(linger=0)
        self._context.term()

    def _serve(self, replays: zmq.Socket[bytes]) -> None:
        try:
            while True:
                self._replay(replays, replays.recv_multipart())
        except zmq.ContextTerminated:
            replays.close(linger=0)

    def _replay(self, replays: zmq.Socket[bytes], request: Sequence[bytes]) -> None:
        if len(request) != _REQUEST_FRAMES or len(request[-1]) != len(END_OF_REPLAY):
            logger.warning("KV events: a replay request should be an empty frame and a number of 8 bytes")
            return
        client, _, first = request
        with self._lock:
            newest = list(self._newest)
        messages = [(self._topic, number, batch) for number, batch in newest if number >= first]
        replays.getsockopt(zmq.EVENTS)  # ZeroMQ learns now what the client has read; otherwise it does so only at times
        try:
            for message in (*messages, (b"", END_OF_REPLAY, b"")):
                replays.send_multipart((client, b"", *message), zmq.NOBLOCK)
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError:
            logger.warning("KV events: a replay was cut off: its client has left, or does not read the answers")


def _attach(socket: zmq.Socket[bytes], endpoint: str, *, connects: bool = False) -> None:
    """Bind a socket, or connect it; or close it.

    Raises:
        ValueError: the endpoint cannot be used.
    """
    socket.linger, socket.ipv6 = 0, "[" in endpoint
    try:
        (socket.connect if connects else socket.bind)(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        verb = "connect to" if connects else "listen on"
        raise ValueError(f"--kv-events-config: cannot {verb} {endpoint}: {zmq.strerror(error.errno or 0)}") from None
    logger.info("KV events: %s %s", "connecting to" if connects else "listening on", endpoint)


def _is_name(endpoint: str) -> bool:
    """Whether it names a host, and is no address or wildcard of this machine."""
    if not endpoint.startswith("tcp://"):
        return False
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "*"
    return False
