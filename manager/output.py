"""What a caller of the manager gets: the pieces of one request's output, or of several merged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manager.errors import ManagerError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import numpy as np
    from numpy.typing import NDArray

    from manager.extras import Logprobs
    from manager.finish import FinishReason
    from manager.stream import Delta, RequestStream


@dataclass(frozen=True)
class GenerateOutput:
    """One piece of one request's output."""

    index: int
    """The prompt's place in the request."""
    sample: int
    rid: str
    text: str
    """New text since the last piece; all of it if the request does not stream."""
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
    """Of the new tokens, and once of the prompt; None: there are none."""
    hidden_states: list[NDArray[np.float32]] | None = None
    """The newest, a flat array for each position; None: none that are new."""


def _output(stream: RequestStream, delta: Delta) -> GenerateOutput:
    """The next piece of a request."""
    return GenerateOutput(
        index=stream.request.index,
        sample=stream.request.sample,
        rid=stream.request.rid,
        text=delta.text,
        output_ids=delta.token_ids,
        prompt_tokens=stream.prompt_count,
        completion_tokens=delta.completion_count,
        finish_reason=delta.finish_reason,
        logprobs=delta.logprobs,
        hidden_states=delta.hidden_states,
    )


def _error_output(stream: RequestStream, error: ManagerError) -> GenerateOutput:
    """The last piece of a request of a batch that failed."""
    return GenerateOutput(
        index=stream.request.index,
        sample=stream.request.sample,
        rid=stream.request.rid,
        text="",
        output_ids=[],
        prompt_tokens=stream.prompt_count,
        completion_tokens=stream.completion_count,
        finish_reason=None,
        error=error,
    )


async def outputs_of(stream: RequestStream) -> AsyncGenerator[GenerateOutput, None]:
    """Yield the pieces of one request as they come; raises the error that ended it."""
    while True:
        delta = await stream.take()
        yield _output(stream, delta)
        if delta.finish_reason is not None:
            return


async def merged_outputs(streams: list[RequestStream]) -> AsyncGenerator[GenerateOutput, None]:
    """Yield the pieces of several requests as they come, each request's in order; errors are pieces too."""
    # room for one: what a slow reader leaves is merged in its stream, and piles up nowhere else;
    # a wait over all of them for each piece would cost a batch of n requests n * n
    pieces: asyncio.Queue[GenerateOutput | None] = asyncio.Queue(1)

    async def feed(stream: RequestStream) -> None:
        try:
            async for output in outputs_of(stream):
                await pieces.put(output)
        except ManagerError as error:
            await pieces.put(_error_output(stream, error))
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
