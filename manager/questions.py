"""What is asked of a part and answered once: a question to the scheduler, ids for a worker to decode.

Whoever asks waits here, and gets the answer, an error, or the end of the part that was asked. An
answer that nobody waits for any more is no news.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from manager.errors import QueueFullError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from manager.errors import ManagerError

T = TypeVar("T")


@dataclass
class _Question(Generic[T]):
    part: str
    answer: asyncio.Future[list[T]]
    pieces: list[T] = field(default_factory=list)


class Questions(Generic[T]):
    """The questions of one kind that wait for their answers, at most `count_max` of them."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._waiting: dict[int, _Question[T]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, question_id: int) -> bool:
        return question_id in self._waiting

    async def ask(
        self, question_id: int, part: str, send: Callable[[], None], timeout_s: float | None
    ) -> list[T]:
        """Send a question to a part and wait for the pieces of its answer.

        Raises what `send` raises, what `fail` was given, QueueFullError if too many wait already,
        and UnavailableError after `timeout_s`.
        """
        if len(self._waiting) >= self._count_max:
            raise QueueFullError(
                f"too many questions wait: count={len(self._waiting)}, max={self._count_max}"
            )
        question = _Question[T](part, asyncio.get_running_loop().create_future())
        self._waiting[question_id] = question
        try:
            send()
            return await asyncio.wait_for(question.answer, timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            raise UnavailableError(f"{part} did not answer: timeout_s={timeout_s}") from None
        finally:
            del self._waiting[question_id]

    def answer(self, question_id: int, piece: T, *, is_last: bool = True) -> None:
        """Take a piece of an answer."""
        question = self._waiting.get(question_id)
        if question is None or question.answer.done():
            return
        question.pieces.append(piece)
        if is_last:
            question.answer.set_result(question.pieces)

    def fail(self, question_id: int, error: ManagerError) -> None:
        """End a question without an answer."""
        question = self._waiting.get(question_id)
        if question is not None and not question.answer.done():
            question.answer.set_exception(error)

    def put_to(self, part: str | None) -> list[int]:
        """Return the ids of the questions that were put to this part; None: to any."""
        return [i for i, question in self._waiting.items() if part in (None, question.part)]
