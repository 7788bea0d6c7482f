"""Who is next where the work of several clients waits: the clients take turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Items that wait, by client. The items of one client come in order of arrival.

    Before a client's first item comes at most one item of each other client that waits, however many these have. Before
    its k-th item come at most k. No client has two turns one after the other while another one waits. Every method
    takes constant time.
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

    def next(self) -> T:
        """Take the next item. At least one must wait."""
        client, items = self._clients.popitem(last=False)
        if client == self._newest and self._clients:  # its item may still be at work
            second = self._clients.popitem(last=False)
            self._clients[client] = items
            self._clients.move_to_end(client, last=False)
            client, items = second
        item, _ = items.popitem(last=False)
        self._newest = client
        if items:
            self._clients[client] = items
        return item


class Lane:
    """Threads that run the functions of clients, which take turns."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads, self._lock = ThreadPoolExecutor(threads, name), Lock()
        self._turns = Turns[Future[Any]]()
        self._functions: dict[Future[Any], Callable[[], Any]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a function waits for a thread."""
        return bool(self._turns)

    def submit(self, client: str, function: Callable[[], T]) -> Future[T]:
        """A future of the function's result. If it is cancelled in time, the function is dropped."""
        future = Future[T]()
        with self._lock:
            self._turns.add(client, future)
            self._functions[future] = function
        future.add_done_callback(partial(self._drop, client))
        self._threads.submit(self._run_next)
        return future

    def _drop(self, client: str, future: Future[Any]) -> None:
        with self._lock:
            self._turns.remove(client, future)
            self._functions.pop(future, None)

    def _run_next(self) -> None:
        with self._lock:
            if not self._turns:  # one was cancelled
                return
            future = self._turns.next()
            function = self._functions.pop(future)
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
            del future, function  # the error has this frame, which would keep what they hold
        else:
            future.set_result(result)
