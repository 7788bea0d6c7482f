"""Who is next where the work of several clients waits, and how much each may hold of what is bounded."""

from __future__ import annotations

import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock, get_native_id
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Items that wait, by client. The items of one client come in order of arrival.

    Before a client's first item comes at most one item of each other client that waits, however many these have. Before
    its k-th item come at most k. No client has two turns one after the other while another one waits. Every method
    takes constant time, and `next` a step more for each client without a turn.
    """

    def __init__(self) -> None:
        self._clients = OrderedDict[str, OrderedDict[T, None]]()  # the client whose turn it is comes first
        self._newest = ""  # the client that had the last turn

    def __len__(self) -> int:
        """How many clients have items that wait."""
        return len(self._clients)

    def add(self, client: str, item: T) -> None:
        """Adding it again changes nothing."""
        self._clients.setdefault(client, OrderedDict()).setdefault(item)

    def remove(self, client: str, item: T) -> None:
        """Drop an item if it still waits. It costs its client no turn."""
        items = self._clients.get(client)
        if items is not None and item in items:
            del items[item]
            if not items:
                del self._clients[client]

    def next(self, without: Collection[str] = ()) -> T:
        """Take the next item, if clients in `without` have no turn.

        Raises:
            KeyError: no item waits, or only those of these clients.
        """
        clients = (client for client in self._clients if client not in without)
        client = next(clients, None)
        if client is None:
            raise KeyError("nobody has a turn")
        if client == self._newest:  # its item may still be at work
            client = next(clients, client)
        items = self._clients.pop(client)
        item, _ = items.popitem(last=False)
        self._newest = client
        if items:
            self._clients[client] = items
        return item


class Shares:
    """What clients hold of a bounded number of places, connections or bytes, so that some are left for the next client.

    A client may hold `per_free` times what is free (dynamic queue length thresholds, Choudhury and Hahne 1998).
    """

    def __init__(self, per_free: int = 7) -> None:
        self.per_free, self.total = per_free, 0
        self._held = Counter[str]()

    def held_by(self, client: str) -> int:
        """What the client holds."""
        return self._held[client]

    def add(self, client: str, count: int) -> None:
        """The client holds so many more. A negative number frees them."""
        self.total += count
        self._held[client] += count
        if not self._held[client]:
            del self._held[client]

    def fit(self, client: str, count: int, most: int) -> bool:
        """Whether the client may hold `count` more, if there are `most` together."""
        return self.total + count + (self._held[client] + count) // self.per_free <= most

    def most_alone(self, most: int) -> int:
        """The most that a client may hold if nobody else holds any."""
        return most - (most + 1) // (self.per_free + 1)


class Lane:
    """Threads that run the functions of clients, which take turns.

    A client has all threads but one at most: whoever comes next finds a thread that does not finish another's first.
    """

    def __init__(self, threads: int, name: str, *, yields: bool = False) -> None:
        """`yields`: on Linux the threads get cores after everything else. Not for what keeps the interpreter lock."""
        self._threads = ThreadPoolExecutor(threads, name, yield_cores if yields else None)
        self._lock = Lock()
        self._most = max(1, threads - 1)
        self._turns = Turns[Future[Any]]()
        self._functions: dict[Future[Any], tuple[str, Callable[[], Any]]] = {}  # those that wait, and their clients
        self._running = Counter[str]()  # threads by client

    def submit(self, client: str, function: Callable[[], T]) -> Future[T]:
        """A future of the function's result. If it is cancelled in time, the function is dropped."""
        future = Future[T]()
        with self._lock:
            self._turns.add(client, future)
            self._functions[future] = client, function
        future.add_done_callback(partial(self._drop, client))
        self._threads.submit(self._run_next)
        return future

    def _drop(self, client: str, future: Future[Any]) -> None:
        with self._lock:
            self._turns.remove(client, future)
            self._functions.pop(future, None)

    def _run_next(self) -> None:
        """Run a function if one has a turn. At its end another one may have."""
        with self._lock:
            try:
                future = self._turns.next([client for client, count in self._running.items() if count >= self._most])
            except KeyError:
                return
            client, function = self._functions.pop(future)
            self._running[client] += 1
        if future.set_running_or_notify_cancel():
            _run(function, future)
        del function, future  # an error keeps the frames that it came through
        with self._lock:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
        self._threads.submit(self._run_next)


def yield_cores() -> None:
    """From now on this thread gets cores after all other ones, on Linux, which has a priority per thread."""
    if sys.platform == "linux":
        thread = get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + 10, 19))


def _run(function: Callable[[], T], future: Future[T]) -> None:
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
        del future, function  # the error has this frame, which would keep what they hold
    else:
        future.set_result(result)
