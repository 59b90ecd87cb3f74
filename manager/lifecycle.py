"""The states of a request, and the only ways from one to the next.

One table says it all. QUEUED has exactly one way in, PRE_SEND_VALIDATED, so the checks of
length and vocabulary cannot be skipped on any path to the scheduler. A request that ended
stays ended: a late error or disconnect is no news, and everything else is a fault of ours.
"""

from __future__ import annotations

import enum
from typing import Final

from manager.errors import InternalError


class State(enum.Enum):
    """Where a request is."""

    RECEIVED = "received"
    VALIDATING = "validating"
    NORMALIZING = "normalizing"
    TOKENIZING = "tokenizing"
    PRE_SEND_VALIDATING = "pre-send validating"
    QUEUED = "queued"
    STREAMING = "streaming"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing follows any more."""
        return self in TERMINAL


class Event(enum.Enum):
    """What can happen to a request."""

    VALIDATED = "validated"
    NEEDS_NORMALIZE = "needs normalize"
    NEEDS_TOKENIZE = "needs tokenize"
    ALREADY_TOKENIZED = "already tokenized"
    TOKENIZED = "tokenized"
    PRE_SEND_VALIDATED = "pre-send validated"
    SCHEDULER_PICKED = "scheduler picked"
    CHUNK = "chunk"
    LAST_CHUNK = "last chunk"
    FINAL_FRAME_SENT = "final frame sent"
    ERROR = "error"
    DISCONNECT = "disconnect"


TERMINAL: Final = frozenset({State.COMPLETED, State.FAILED, State.ABORTED})

# ERROR and DISCONNECT are legal everywhere and stand in `advance`, not here.
TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.RECEIVED, Event.VALIDATED): State.VALIDATING,
    # Only text and ids to generate from have sampling parameters to normalize;
    # control requests and ids to detokenize go straight on.
    (State.VALIDATING, Event.NEEDS_NORMALIZE): State.NORMALIZING,
    (State.VALIDATING, Event.ALREADY_TOKENIZED): State.PRE_SEND_VALIDATING,
    (State.NORMALIZING, Event.NEEDS_TOKENIZE): State.TOKENIZING,
    (State.NORMALIZING, Event.ALREADY_TOKENIZED): State.PRE_SEND_VALIDATING,
    (State.TOKENIZING, Event.TOKENIZED): State.PRE_SEND_VALIDATING,
    (State.PRE_SEND_VALIDATING, Event.PRE_SEND_VALIDATED): State.QUEUED,
    (State.QUEUED, Event.SCHEDULER_PICKED): State.STREAMING,
    (State.STREAMING, Event.CHUNK): State.STREAMING,
    (State.STREAMING, Event.LAST_CHUNK): State.FINALIZING,
    (State.FINALIZING, Event.FINAL_FRAME_SENT): State.COMPLETED,
}


class IllegalTransitionError(InternalError):
    """An event came in a state where it cannot happen. The request's state is unchanged."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"event is impossible in this state: state={state.value}, event={event.value}")
        self.state = state
        self.event = event


def advance(state: State, event: Event) -> State:
    """The state after `event`. Raises IllegalTransitionError where the table has no way."""
    if event is Event.ERROR or event is Event.DISCONNECT:
        if state in TERMINAL:
            return state
        return State.FAILED if event is Event.ERROR else State.ABORTED
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransitionError(state, event) from None
