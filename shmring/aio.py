"""Waiting for rings in asyncio: one thread per event loop, whatever the number of rings.

The thread sleeps on all awaited rings at once and hands results to the loop. While an end is
awaited the loop leaves it alone, so each end is still used by one thread at a time. Taking a record
or giving one happens in the loop and in one piece: a wait that is cancelled has taken nothing.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import TYPE_CHECKING, cast

from shmring.errors import RingClosedError, ShmringError
from shmring.segment import check_timeout
from shmring.waiter import CHECK_INTERVAL_S, WAIT_MAX, Bell, WaitPolicy, WaitSet

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from typing import TypeAlias

    from shmring.consumer import Consumer
    from shmring.producer import Producer

    End: TypeAlias = Consumer | Producer


class AsyncWaiter:
    """Awaits ends of rings for the event loop that it was made in. Close it when done."""

    def __init__(self, policy: WaitPolicy = WaitPolicy.THRIFTY) -> None:
        # weak: a loop that is forgotten takes its waiter along, see waiter_of_loop
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._policy = policy
        self._bell = Bell()
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._awaited: dict[End, asyncio.Future[bool]] = {}
        self._needs: dict[Producer, int] = {}
        """Of the producers among them: the payload length that each wants room for."""
        self._busy: frozenset[End] = frozenset()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="shmring-waiter", daemon=True)
        self._thread.start()

    async def wait_until_readable(self, consumer: Consumer, timeout_s: float | None = None) -> bool:
        """Wait until `consumer` has something to drain or its end to see. False: `timeout_s` has passed.

        Cancelling it loses nothing. An end can be awaited once at a time.
        """
        timeout_s = check_timeout(timeout_s)
        return consumer.is_readable() or await self._wait_for(consumer, timeout_s)

    async def wait_until_writable(
        self, producer: Producer, length: int, timeout_s: float | None = None
    ) -> bool:
        """Wait until a payload of `length` bytes has room, as above. False: `timeout_s` has passed."""
        timeout_s = check_timeout(timeout_s)
        if producer.wait_until_writable(length, 0):
            return True
        producer._check_wait(length)
        with self._lock:
            self._needs[producer] = length
        try:
            return await self._wait_for(producer, timeout_s)
        finally:
            with self._lock:
                self._needs.pop(producer, None)

    async def _wait_for(self, end: End, timeout_s: float | None) -> bool:
        with self._lock:
            if self._is_closing:
                raise RuntimeError("the waiter is closed")
            if end in self._awaited:
                raise RuntimeError(f"the end is awaited already: name={end.name}")
            if len(self._awaited) >= WAIT_MAX:
                raise ValueError(f"too many rings are awaited: max={WAIT_MAX}")
            future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._awaited[end] = future
            self._has_work.notify()
        self._bell.ring()
        try:
            return await asyncio.wait_for(future, timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            return False
        finally:
            self._forget(end)

    def _forget(self, end: End) -> None:
        """Take it back from the thread: until the thread has let go of it, nobody else may use it."""
        with self._has_work:
            if self._awaited.pop(end, None) is None and end not in self._busy:
                return
            self._bell.ring()
            while end in self._busy:
                self._has_work.wait()

    def close(self) -> None:
        """Stop the thread. Waits that are going on are cancelled. Twice is once."""
        self._stop()
        self._thread.join()

    def _stop(self) -> None:
        with self._lock:
            self._is_closing = True
            for future in self._awaited.values():
                future.cancel()
            self._awaited.clear()
            self._has_work.notify_all()
        self._bell.ring()

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
                self._tell(future, RuntimeError("the waiting thread has ended"))

    def _serve(self) -> None:
        while True:
            with self._has_work:
                self._busy = frozenset()
                self._has_work.notify_all()
                while not self._awaited and not self._is_closing:
                    self._has_work.wait()
                if self._is_closing:
                    return
                ends = list(self._awaited)
                needs = dict(self._needs)
                self._busy = frozenset(ends)
                self._bell.answer()
            self._wait_once(ends, needs)
            # the loop may let go of these now; this thread must not be what keeps them
            del ends, needs

    def _wait_once(self, ends: list[End], needs: dict[Producer, int]) -> None:
        ready: list[tuple[End, ShmringError | None]] = []
        usable: list[End] = []
        for end in ends:
            if end.is_open:
                usable.append(end)
            else:
                closed = RingClosedError(f"this end was closed while it was awaited: name={end.name}")
                ready.append((end, closed))
        if not ready:
            ready = self._sleep_on(usable, needs)
        with self._lock:
            found = [(self._awaited.pop(end, None), problem) for end, problem in ready]
        for future, problem in found:
            if future is not None:
                self._tell(future, problem)

    def _sleep_on(self, ends: list[End], needs: dict[Producer, int]) -> list[tuple[End, ShmringError | None]]:
        """Sleep until one of them is up, or the bell rings. What is wrong with one is told of that one."""
        producers = [(producer, length) for producer, length in needs.items() if producer in ends]
        consumers = [cast("Consumer", end) for end in ends if end not in needs]
        spin_ns = self._policy.value
        with WaitSet(consumers, producers, self._bell) as waitset:
            try:
                while not waitset.wait_slice(CHECK_INTERVAL_S, spin_ns):
                    if waitset.has_lost_peer():
                        break
                    spin_ns = 0
            except ShmringError:
                pass  # whose it is shows now
            return waitset.states()

    def _tell(self, future: asyncio.Future[bool], error: Exception | None) -> None:
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, future, error)


def _resolve(future: asyncio.Future[bool], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(True)
    else:
        future.set_exception(error)


_waiters: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncWaiter] = weakref.WeakKeyDictionary()


async def waiter_of_loop() -> AsyncWaiter:
    """Give the running loop's own waiter, made on first use.

    It is closed when the loop shuts its asynchronous generators down, as `asyncio.run` does before it
    closes a loop, or when the loop is forgotten.
    """
    loop = asyncio.get_running_loop()
    waiter = _waiters.get(loop)
    if waiter is None or waiter._is_closing:
        waiter = AsyncWaiter()
        _waiters[loop] = waiter
        weakref.finalize(loop, waiter._stop)
        keeper = _keep(waiter)
        await keeper.__anext__()
        # with the loop and not with us: a generator knows its loop, and would keep it for ever
        loop.__dict__["_shmring_keeper"] = keeper
    return waiter


async def _keep(waiter: AsyncWaiter) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        waiter.close()
