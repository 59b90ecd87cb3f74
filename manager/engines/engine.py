"""What an engine is to the loop: it holds the running requests and moves them all one step on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from manager.extras import NOTHING_ASKED, ExtrasAsked

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from manager.extras import BatchExtras


@dataclass(frozen=True)
class Admitted:
    """One request that is to be started. The arrays are its own; an engine may keep them."""

    request_id: int
    prompt_ids: NDArray[np.int32]  # (prompt_count,)
    sampling: np.void  # one row of manager.sampling.SAMPLING_DTYPE
    stop_token_ids: NDArray[np.int32]  # (stop_token_count,)
    extras: Mapping[str, Any]  # rare fields by name, only those that were set
    asked: ExtrasAsked = NOTHING_ASKED  # beside tokens


@dataclass(frozen=True)
class StepOutput:
    """What one step of n requests brought; the columns of a batch."""

    request_ids: NDArray[np.uint64]  # (n,)
    token_counts: NDArray[np.uint32]  # (n,)
    token_ids: NDArray[np.int32]  # (sum of token_counts,)
    finish_codes: NDArray[np.uint8]  # (n,) of manager.finish.FinishCode; NONE goes on
    finish_values: NDArray[np.int64]  # (n,) the stop token's id, or the number of new tokens
    extras: BatchExtras | None = None


class Engine(Protocol):
    """A running batch. Nothing here waits, and a step is bounded by the number of running requests."""

    @property
    def running_count(self) -> int:
        """Requests admitted and neither finished nor dropped."""
        ...

    def admit(self, request: Admitted) -> None:
        """Start a request with the next step. Raises `ValidationError` for one it cannot serve."""
        ...

    def drop(self, request_ids: NDArray[np.uint64]) -> None:
        """Forget these requests, without a word of output; unknown ones are passed over."""
        ...

    def step(self) -> StepOutput:
        """Move every running request one step on. Those that finish by it are forgotten.

        To be called with at least one request running.
        """
        ...


def new_token_limit(prompt_count: int, max_new_tokens: int, context_length: int) -> int:
    """How many tokens a request may get: `max_new_tokens` (-1: no limit) and the context, never below 0."""
    room = max(context_length - prompt_count, 0)
    return room if max_new_tokens < 0 else min(max_new_tokens, room)
