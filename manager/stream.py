"""The output of one request on its way to its reader. It owns the request's state.

Bounded by construction: what a slow reader has not taken is merged into one pending delta, so
a request holds at most the text that it may generate at all, and nobody waits for a reader.
Exactly one terminal event: the first of finish, error and abort counts, later ones are no news.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from manager.extras import PendingExtras
from manager.lifecycle import Event, State, advance

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from manager.errors import ManagerError
    from manager.extras import Extras, Logprobs
    from manager.finish import FinishReason
    from manager.outbox import Dispatch
    from manager.request import SingleRequest
    from manager.sampling import NormalizedSampling


@dataclass(frozen=True)
class Delta:
    """What has come since the last one was taken."""

    text: str
    token_ids: list[int]
    completion_count: int
    """Tokens generated so far, those that were trimmed included."""
    finish_reason: FinishReason | None
    logprobs: Logprobs | None = None
    hidden_states: list[NDArray[np.float32]] | None = None


@dataclass(eq=False)
class RequestStream:
    """One request in flight."""

    request_id: int
    shard: int
    request: SingleRequest
    prompt_count: int = 0
    sampling: NormalizedSampling | None = None
    """Once checked."""
    dispatch: Dispatch | None = None
    """What is to be sent, until it was."""
    state: State = State.RECEIVED
    completion_count: int = 0
    _extras: PendingExtras | None = None
    """Made with the first; most requests have none."""
    _texts: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _finish_reason: FinishReason | None = None
    _error: ManagerError | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def move(self, event: Event) -> None:
        """Go to the next state of the life cycle."""
        self.state = advance(self.state, event)

    @property
    def is_ended(self) -> bool:
        """Nothing more will come, though the reader may not have taken all of it."""
        return self._finish_reason is not None or self._error is not None

    def stage(self, extras: Extras) -> None:
        """Keep what belongs to the chunk that comes next."""
        if self._extras is None:
            self._extras = PendingExtras()
        self._extras.stage(extras)

    def add(
        self, text: str, token_ids: list[int], completion_count: int, reason: FinishReason | None
    ) -> None:
        """Take a chunk from the worker."""
        if self.is_ended:
            return
        if self.state is State.QUEUED:
            self.move(Event.SCHEDULER_PICKED)
        self.move(Event.CHUNK if reason is None else Event.LAST_CHUNK)
        self._texts.append(text)
        self._token_ids += token_ids
        if self._extras is not None:
            self._extras.merge()
        self.completion_count += completion_count
        self._finish_reason = reason
        if reason is not None or self.request.stream:
            self._changed.set()

    def fail(self, error: ManagerError) -> bool:
        """End with an error; what came before it is still handed over. False: it had ended already."""
        if self.is_ended:
            return False
        self.move(Event.ERROR)
        self._error = error
        self._changed.set()
        return True

    async def take(self) -> Delta:
        """Wait for the next delta. Raises the error that ended the request, after its last delta."""
        while not self._changed.is_set():
            await self._changed.wait()
        self._changed.clear()
        if self._error is not None and not self._texts:
            raise self._error
        delta = Delta(
            "".join(self._texts),
            self._token_ids,
            self.completion_count,
            self._finish_reason,
            *(() if self._extras is None else self._extras.take()),
        )
        self._texts, self._token_ids = [], []
        if self._error is not None:
            self._changed.set()
        if self._finish_reason is not None:
            self.move(Event.FINAL_FRAME_SENT)
        return delta
