"""An event loop that goes on only when told to, with a clock and threads of its own making.

Whoever holds it decides when one round of callbacks runs, when a job of the thread pool is done and in
which order, when a ring is noticed and what time it is. So everything that a manager does in one
process can be repeated from a seed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from shmring import Consumer


class SteppedLoop(asyncio.SelectorEventLoop):
    """The loop. Nothing in it waits for anything outside."""

    now = 0.0
    """Seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]] = []
        """What threads are at."""
        self.problems: list[str] = []
        """What nobody has caught."""
        self.set_exception_handler(lambda _loop, context: self.problems.append(str(context)))

    def time(self) -> float:
        return self.now

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future: asyncio.Future[Any] = self.create_future()
        self.jobs.append((future, func, args))
        return future

    def do_job(self, index: int) -> None:
        """Let a thread finish what it was given."""
        future, func, args = self.jobs.pop(index)
        if future.cancelled():
            return
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001 - it is handed on
            future.set_exception(error)
        else:
            future.set_result(result)

    def turn(self) -> None:
        """Run what is ready, once."""
        self.call_soon(self.stop)
        self.run_forever()

    def run_alone(self, work: Coroutine[Any, Any, Any], *, turns_max: int = 10_000) -> Any:
        """Run to the end, with nobody else at work; time passes and threads are quick."""
        task = self.create_task(work)
        for _ in range(turns_max):
            self.turn()
            if task.done():
                return task.result()
            while self.jobs:
                self.do_job(0)
            self.now += 0.01
        raise AssertionError(f"it never ends: work={work}")


class SteppedWaiter:
    """Stands in for shmring.AsyncWaiter: notices rings when it is told to look."""

    made: list[SteppedWaiter]

    def __init__(self) -> None:
        self._awaited: dict[Consumer, asyncio.Future[bool]] = {}
        self.made.append(self)

    async def wait_until_readable(self, consumer: Consumer, timeout_s: float | None = None) -> bool:
        assert timeout_s is None
        if consumer.is_readable():
            return True
        future = asyncio.get_running_loop().create_future()
        self._awaited[consumer] = future
        try:
            return await future
        finally:
            del self._awaited[consumer]

    def look(self) -> None:
        """Wake those whose ring has something."""
        for consumer, future in self._awaited.items():
            if not future.done() and consumer.is_readable():
                future.set_result(True)

    def close(self) -> None:
        for future in self._awaited.values():
            future.cancel()
