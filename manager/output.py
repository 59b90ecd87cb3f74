"""What a caller of the manager gets: one piece of one request's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manager.errors import ManagerError
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


def output_of(stream: RequestStream, delta: Delta) -> GenerateOutput:
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
    )


def error_output(stream: RequestStream, error: ManagerError) -> GenerateOutput:
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
