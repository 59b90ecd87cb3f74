"""The states of a request: the whole table, and everything that is not in it."""

from __future__ import annotations

import pytest

from manager.errors import InternalError
from manager.lifecycle import TERMINAL, TRANSITIONS, Event, IllegalTransitionError, State, advance

LEGAL = [
    (State.RECEIVED, Event.VALIDATED, State.VALIDATING),
    (State.VALIDATING, Event.NEEDS_NORMALIZE, State.NORMALIZING),
    (State.VALIDATING, Event.ALREADY_TOKENIZED, State.PRE_SEND_VALIDATING),
    (State.NORMALIZING, Event.NEEDS_TOKENIZE, State.TOKENIZING),
    (State.NORMALIZING, Event.ALREADY_TOKENIZED, State.PRE_SEND_VALIDATING),
    (State.TOKENIZING, Event.TOKENIZED, State.PRE_SEND_VALIDATING),
    (State.PRE_SEND_VALIDATING, Event.PRE_SEND_VALIDATED, State.QUEUED),
    (State.QUEUED, Event.SCHEDULER_PICKED, State.STREAMING),
    (State.STREAMING, Event.CHUNK, State.STREAMING),
    (State.STREAMING, Event.LAST_CHUNK, State.FINALIZING),
    (State.FINALIZING, Event.FINAL_FRAME_SENT, State.COMPLETED),
]
ENDINGS = {Event.ERROR: State.FAILED, Event.DISCONNECT: State.ABORTED}
ILLEGAL = [
    (state, event)
    for state in State
    for event in Event
    if event not in ENDINGS and (state, event) not in {(state, event) for state, event, _ in LEGAL}
]

PATHS = {
    "text": [
        Event.VALIDATED,
        Event.NEEDS_NORMALIZE,
        Event.NEEDS_TOKENIZE,
        Event.TOKENIZED,
        Event.PRE_SEND_VALIDATED,
        Event.SCHEDULER_PICKED,
        Event.CHUNK,
        Event.CHUNK,
        Event.LAST_CHUNK,
        Event.FINAL_FRAME_SENT,
    ],
    "ids": [
        Event.VALIDATED,
        Event.NEEDS_NORMALIZE,
        Event.ALREADY_TOKENIZED,
        Event.PRE_SEND_VALIDATED,
        Event.SCHEDULER_PICKED,
        Event.LAST_CHUNK,
        Event.FINAL_FRAME_SENT,
    ],
    "control or detokenize": [
        Event.VALIDATED,
        Event.ALREADY_TOKENIZED,
        Event.PRE_SEND_VALIDATED,
        Event.SCHEDULER_PICKED,
        Event.LAST_CHUNK,
        Event.FINAL_FRAME_SENT,
    ],
}


@pytest.mark.parametrize(("state", "event", "after"), LEGAL)
def test_every_legal_step_leads_where_the_table_says(state, event, after):
    """A wrong step skips a check, or leaves a client waiting for ever."""
    assert advance(state, event) is after


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_every_other_step_is_refused_and_says_what_it_was(state, event):
    """A fault of ours must show itself, not become a request in a wrong state."""
    with pytest.raises(IllegalTransitionError) as error:
        advance(state, event)
    assert (error.value.state, error.value.event) == (state, event)
    assert isinstance(error.value, InternalError)
    assert state.value in str(error.value)
    assert event.value in str(error.value)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", ENDINGS)
def test_a_request_can_fail_or_be_left_at_any_time_but_ends_once(state, event):
    """A late error must not undo a completion; a disconnect in any state must free the request."""
    after = advance(state, event)
    assert after is (state if state in TERMINAL else ENDINGS[event])
    assert after.is_terminal
    assert advance(after, Event.ERROR) is after
    assert advance(after, Event.DISCONNECT) is after


def test_queued_has_one_way_in():
    """The checks of length and vocabulary stand there: a second way would go around them."""
    assert [step for step, after in TRANSITIONS.items() if after is State.QUEUED] == [
        (State.PRE_SEND_VALIDATING, Event.PRE_SEND_VALIDATED)
    ]


@pytest.mark.parametrize("events", PATHS.values(), ids=PATHS)
def test_every_kind_of_request_has_a_way_from_start_to_end(events):
    """A kind without one could never be answered."""
    state = State.RECEIVED
    visited = []
    for event in events:
        state = advance(state, event)
        visited.append(state)
    assert state is State.COMPLETED
    assert visited.count(State.QUEUED) == 1


def test_every_state_can_be_reached_and_left():
    """A state nobody enters is a bug in waiting; one nobody leaves is a leak."""
    reached = {State.RECEIVED, State.FAILED, State.ABORTED} | set(TRANSITIONS.values())
    assert reached == set(State)
    assert {state for state, _ in TRANSITIONS} == set(State) - TERMINAL
