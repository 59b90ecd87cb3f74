"""Waiting for rings in asyncio: one thread per event loop, whatever the number of rings.

The thread sleeps on all awaited rings at once and hands results to the loop. While a
consumer is awaited the loop leaves it alone, so each end is still used by one thread at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

from shmring.errors import ShmringError
from shmring.segment import check_timeout
from shmring.waiter import WAIT_MAX, Bell, WaitPolicy, wait_any

if TYPE_CHECKING:
    from shmring.consumer import Consumer


class AsyncWaiter:
    """Awaits consumers for the event loop that it was made in. Close it when done."""

    def __init__(self, policy: WaitPolicy = WaitPolicy.THRIFTY) -> None:
        self._loop = asyncio.get_running_loop()
        self._policy = policy
        self._bell = Bell()
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._awaited: dict[Consumer, asyncio.Future[bool]] = {}
        self._busy: frozenset[Consumer] = frozenset()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="shmring-waiter", daemon=True)
        self._thread.start()

    async def wait_until_readable(self, consumer: Consumer, timeout_s: float | None = None) -> bool:
        """Wait until `consumer` has something to drain or its end to see. False: `timeout_s` has passed.

        Cancelling it loses nothing. A consumer can be awaited once at a time.
        """
        check_timeout(timeout_s)
        if consumer.is_readable():
            return True
        with self._lock:
            if self._is_closing:
                raise RuntimeError("the waiter is closed")
            if consumer in self._awaited:
                raise RuntimeError(f"the consumer is awaited already: name={consumer.name}")
            if len(self._awaited) >= WAIT_MAX:
                raise ValueError(f"too many rings are awaited: max={WAIT_MAX}")
            future: asyncio.Future[bool] = self._loop.create_future()
            self._awaited[consumer] = future
            self._has_work.notify()
        self._bell.ring()
        try:
            return await asyncio.wait_for(future, timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            return False
        finally:
            self._forget(consumer)

    def _forget(self, consumer: Consumer) -> None:
        """Take it back from the thread: until the thread has let go of it, nobody else may use it."""
        with self._has_work:
            if self._awaited.pop(consumer, None) is None and consumer not in self._busy:
                return
            self._bell.ring()
            while consumer in self._busy:
                self._has_work.wait()

    def close(self) -> None:
        """Stop the thread. Waits that are going on are cancelled. Twice is once."""
        with self._lock:
            self._is_closing = True
            for future in self._awaited.values():
                future.cancel()
            self._awaited.clear()
            self._has_work.notify_all()
        self._bell.ring()
        self._thread.join()

    def _run(self) -> None:
        """Serve until closed; whatever ends this thread, nobody is left waiting for it."""
        try:
            self._serve()
        finally:
            with self._has_work:
                self._is_closing = True
                self._busy = frozenset()
                stranded = list(self._awaited.values())
                self._awaited.clear()
                self._has_work.notify_all()
            for future in stranded:
                if not self._loop.is_closed():
                    error = RuntimeError("the waiting thread has ended")
                    self._loop.call_soon_threadsafe(_resolve, future, error)

    def _serve(self) -> None:
        while True:
            with self._has_work:
                self._busy = frozenset()
                self._has_work.notify_all()
                while not self._awaited and not self._is_closing:
                    self._has_work.wait()
                if self._is_closing:
                    return
                consumers = list(self._awaited)
                self._busy = frozenset(consumers)
                self._bell.answer()
            self._wait_once(consumers)

    def _wait_once(self, consumers: list[Consumer]) -> None:
        ready: list[tuple[Consumer, ShmringError | None]] = []
        with contextlib.suppress(ShmringError):  # whose error it is shows below
            wait_any(consumers, bell=self._bell, policy=self._policy)
        for consumer in consumers:
            try:
                if consumer.is_readable() or consumer._is_peer_lost():
                    ready.append((consumer, None))
            except ShmringError as error:
                ready.append((consumer, error))
        with self._lock:
            found = [(self._awaited.pop(consumer, None), problem) for consumer, problem in ready]
        for future, problem in found:
            if future is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_resolve, future, problem)


def _resolve(future: asyncio.Future[bool], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(True)
    else:
        future.set_exception(error)
