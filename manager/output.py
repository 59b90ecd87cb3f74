"""What a caller of the manager gets: the pieces of one request's output, or of several merged."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manager.errors import ManagerError
from manager.extras import FIELDS, Logprobs
from manager.stream import Delta

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import numpy as np
    from numpy.typing import NDArray

    from manager.finish import FinishReason
    from manager.stream import RequestStream


@dataclass(frozen=True)
class GenerateOutput:
    """One piece of one request's output."""

    index: int
    """The prompt's place in the request."""
    sample: int
    rid: str
    text: str
    """New text since the last piece; all of it if the request is accumulated, or does not stream."""
    output_ids: list[int]
    """New token ids, as `text`."""
    prompt_tokens: int
    completion_tokens: int
    """Generated so far, a trimmed stop token included."""
    finish_reason: FinishReason | None
    """Set on the last piece."""
    error: ManagerError | None = None
    """Set on the last piece of a request of a batch that failed; the others go on."""
    logprobs: Logprobs | None = None
    """Of the new tokens, and once of the prompt; of all so far if accumulated. None: there are none."""
    hidden_states: list[NDArray[np.float32]] | None = None
    """The newest, a flat array for each position; None: none that are new, or none at all if accumulated."""


class _Whole:
    """All of a request's output so far, for a reader who wants it with every piece.

    Added up once a piece that is taken, so what a slow reader leaves costs nothing. The lists of a
    piece are copies: they are the reader's.
    """

    def __init__(self) -> None:
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: dict[str, list[Any]] = {}
        self._hidden_states: list[NDArray[np.float32]] | None = None

    def add(self, delta: Delta) -> Delta:
        """Take in what is new; returns it with all that came before."""
        self._text += delta.text
        self._token_ids += delta.token_ids
        if delta.logprobs is not None:
            for name in FIELDS.values():
                self._logprobs.setdefault(name, []).extend(getattr(delta.logprobs, name))
        self._hidden_states = delta.hidden_states or self._hidden_states
        logprobs = {name: list(entries) for name, entries in self._logprobs.items()}
        return dataclasses.replace(
            delta,
            text=self._text,
            token_ids=list(self._token_ids),
            logprobs=Logprobs(**logprobs) if logprobs else None,
            hidden_states=self._hidden_states,
        )


class _Pieces:
    """One request's output, piece by piece, in the way its reader wants it."""

    def __init__(self, stream: RequestStream) -> None:
        self._stream = stream
        self._whole = _Whole() if stream.request.accumulated else None

    async def take(self) -> GenerateOutput:
        """Wait for the next piece; raises the error that ended the request."""
        delta = await self._stream.take()
        return self._output(delta if self._whole is None else self._whole.add(delta))

    def failed(self, error: ManagerError) -> GenerateOutput:
        """Make the last piece of a request of a batch that failed."""
        delta = Delta("", [], self._stream.completion_count, None)
        return self._output(delta if self._whole is None else self._whole.add(delta), error)

    def _output(self, delta: Delta, error: ManagerError | None = None) -> GenerateOutput:
        request = self._stream.request
        return GenerateOutput(
            index=request.index,
            sample=request.sample,
            rid=request.rid,
            text=delta.text,
            output_ids=delta.token_ids,
            prompt_tokens=self._stream.prompt_count,
            completion_tokens=delta.completion_count,
            finish_reason=delta.finish_reason,
            error=error,
            logprobs=delta.logprobs,
            hidden_states=delta.hidden_states,
        )


async def outputs_of(stream: RequestStream) -> AsyncGenerator[GenerateOutput, None]:
    """Yield the pieces of one request as they come; raises the error that ended it."""
    pieces = _Pieces(stream)
    while True:
        output = await pieces.take()
        yield output
        if output.finish_reason is not None:
            return


async def merged_outputs(streams: list[RequestStream]) -> AsyncGenerator[GenerateOutput, None]:
    """Yield the pieces of several requests as they come, each request's in order; errors are pieces too."""
    # room for one: what a slow reader leaves is merged in its stream, and piles up nowhere else;
    # a wait over all of them for each piece would cost a batch of n requests n * n
    pieces: asyncio.Queue[GenerateOutput | None] = asyncio.Queue(1)

    async def feed(stream: RequestStream) -> None:
        own = _Pieces(stream)
        try:
            output = await own.take()
            while output.finish_reason is None:
                await pieces.put(output)
                output = await own.take()
        except ManagerError as error:
            output = own.failed(error)
        await pieces.put(output)
        await pieces.put(None)

    feeders = [asyncio.create_task(feed(stream)) for stream in streams]
    left = len(feeders)
    try:
        while left:
            output = await pieces.get()
            if output is None:
                left -= 1
            else:
                yield output
    finally:
        for feeder in feeders:
            feeder.cancel()
        await asyncio.gather(*feeders, return_exceptions=True)
