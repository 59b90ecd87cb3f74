"""What is kept of a request's extras until its reader takes them."""

from __future__ import annotations

import numpy as np

from manager.extras import Extras, ExtrasAsked, Logprobs, PendingExtras
from manager.request import GenerateRequest, fan_out


def _piece(*hidden: list[float], **families: list) -> Extras:
    return Extras(Logprobs(**families), [np.array(row, np.float32) for row in hidden])


def _one(value: float, token_id: int) -> tuple[float, int, None]:
    return value, token_id, None


def test_nothing_is_handed_over_before_its_tokens_are_there():
    """A log probability without its token belongs to nothing that the reader has."""
    pending = PendingExtras()
    pending.stage(_piece(output=[_one(-1.0, 7)]))
    assert pending.take() == (None, None)
    pending.merge()
    logprobs, hidden = pending.take()
    assert logprobs == Logprobs(output=[_one(-1.0, 7)])
    assert hidden is None
    assert pending.take() == (None, None)


def test_output_families_pile_up_for_a_slow_reader_and_input_families_come_once():
    """A repeated prompt would be billed and shown twice."""
    pending = PendingExtras()
    for step in range(3):
        token = _one(-float(step), step)
        pending.stage(
            _piece(
                output=[token],
                input=[_one(-9.0 - step, 90)],
                output_top=[[token], None],
                input_top=[None],
                output_token_ids=[None],
                input_token_ids=[[token]],
            )
        )
        pending.merge()
    logprobs, _ = pending.take()
    assert logprobs is not None
    tokens = [_one(-float(step), step) for step in range(3)]
    assert logprobs.output == tokens
    assert logprobs.output_top == [[tokens[0]], None, [tokens[1]], None, [tokens[2]], None]
    assert logprobs.output_token_ids == [None] * 3
    assert logprobs.input == [_one(-9.0, 90)]
    assert logprobs.input_top == [None]
    assert logprobs.input_token_ids == [[tokens[0]]]
    pending.stage(_piece(output=[tokens[0]], input=[_one(-1.0, 1)]))
    pending.merge()
    assert pending.take()[0] == Logprobs(output=[tokens[0]])


def test_pieces_of_one_step_are_one():
    """What was too long for a ring came in several, of the prompt too."""
    pending = PendingExtras()
    pending.stage(_piece([1.0], input=[_one(-1.0, 1)]))
    pending.stage(_piece([2.0], input=[_one(-2.0, 2)], output=[_one(-3.0, 3)]))
    pending.merge()
    logprobs, hidden = pending.take()
    assert logprobs == Logprobs(input=[_one(-1.0, 1), _one(-2.0, 2)], output=[_one(-3.0, 3)])
    assert [row.tolist() for row in hidden or []] == [[1.0], [2.0]]


def test_the_last_hidden_states_count_and_a_step_without_any_takes_none_away():
    """Of a merged answer they are those of its end."""
    pending = PendingExtras()
    for hidden in ([[1.0]], [[2.0], [3.0]], []):
        pending.stage(_piece(*hidden))
        pending.merge()
    logprobs, states = pending.take()
    assert logprobs is None
    assert [row.tolist() for row in states or []] == [[2.0], [3.0]]


def test_without_return_logprob_the_other_options_ask_for_nothing():
    """A client's defaults must not cost a scheduler the whole distribution."""
    options = {"logprob_start_len": 0, "top_logprobs_num": 5, "token_ids_logprob": [1, 2]}
    (plain,) = fan_out(GenerateRequest(text="x", **options))
    assert plain.extras_asked == ExtrasAsked()
    (asks,) = fan_out(GenerateRequest(text="x", return_logprob=True, return_text_in_logprobs=True, **options))
    assert asks.extras_asked == ExtrasAsked(
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=5,
        token_ids_logprob=(1, 2),
        logprob_texts=True,
    )
    row = asks.extras_asked.to_row()
    assert ExtrasAsked.of_row(row, [1, 2]) == ExtrasAsked(
        return_logprob=True, logprob_start_len=0, top_logprobs_num=5, token_ids_logprob=(1, 2)
    )
