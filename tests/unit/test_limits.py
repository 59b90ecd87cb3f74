"""What a deployment can take, at both ends of every bound."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.errors import ConfigError, ValidationError
from manager.limits import Limits, check_detokenize_ids
from manager.request import GenerateRequest, fan_out
from manager.sampling import SamplingParams

IDS = np.array([1, 2, 3], dtype=np.int32)


def _limits(**changes):
    return Limits(**{"vocab_size": 1000, "context_length": 2**40, **changes})


def _single(**fields):
    [single] = fan_out(GenerateRequest(**({} if "text" in fields else {"input_ids": IDS}) | fields))
    return single


def _sampling(**params):
    return SamplingParams(**params).normalize(vocab_size=1000, has_tokenizer=True)


def _refused(field, call, *arguments):
    with pytest.raises(ValidationError) as error:
        call(*arguments)
    assert error.value.field == field
    json.dumps(str(error.value))
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "fields", "field"),
    [
        ({}, {"input_ids": [1, 2_000_000_000]}, "input_ids"),
        ({}, {"input_ids": [1000]}, "input_ids"),
        ({}, {"input_ids": [-1]}, "input_ids"),
        ({}, {"input_ids": [5, -(2**31), 5]}, "input_ids"),
        ({}, {"token_ids_logprob": [999_999]}, "token_ids_logprob"),
        ({}, {"token_ids_logprob": [1000]}, "token_ids_logprob"),
        ({}, {"token_ids_logprob": [0, -1]}, "token_ids_logprob"),
        ({}, {"top_logprobs_num": 1_000_000_000, "return_logprob": True}, "top_logprobs_num"),
        ({}, {"top_logprobs_num": 1001}, "top_logprobs_num"),
        ({}, {"return_hidden_states": True}, "return_hidden_states"),
        ({"has_tokenizer": False}, {"text": "a"}, "input_ids"),
    ],
)
def test_what_the_deployment_cannot_serve_is_refused(changes, fields, field):
    """Each of these once ended a scheduler, or gave an answer with a part missing."""
    _refused(field, _limits(**changes).validate, _single(**fields))


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, {}),
        ({}, {"text": "a"}),
        ({}, {"input_ids": [0, 999]}),
        ({"vocab_size": 2**31}, {"input_ids": [2**31 - 1]}),
        ({}, {"token_ids_logprob": [0, 999]}),
        ({}, {"top_logprobs_num": 1000}),
        ({}, {"rid": "x" * 128}),
        ({}, {"return_hidden_states": False}),
        ({"hidden_states_enabled": True}, {"return_hidden_states": True}),
        ({"has_tokenizer": False}, {}),
    ],
)
def test_what_is_just_within_the_bounds_is_let_in(changes, fields):
    """The last id of the vocabulary is a token like any other."""
    _limits(**changes).validate(_single(**fields))


def test_the_message_about_hidden_states_names_the_setting():
    """Whoever reads it can do something about it."""
    text = _refused("return_hidden_states", _limits().validate, _single(return_hidden_states=True))
    assert "hidden_states_enabled" in text


def test_ids_of_a_tokenizer_are_checked_like_those_of_a_client():
    """A tokenizer with added tokens can give ids that the model has no row for."""
    limits = _limits(vocab_size=3)
    limits.check_input_ids(np.array([0, 2], dtype=np.int32))
    _refused("input_ids", limits.check_input_ids, IDS)


# context, reserved, auto-truncate, ids, max_new_tokens, min_new_tokens -> ids kept, max_new_tokens after
FITS = [
    (10, 0, False, 3, 7, 0, 3, 7),
    (10, 0, False, 3, 0, 0, 3, 0),
    (10, 0, False, 3, None, 0, 3, None),
    (10, 0, False, 9, 1, 1, 9, 1),
    (10, 0, False, 9, None, 0, 9, None),
    (2**40, 0, False, 3, 100, 0, 3, 100),
    (10, 5, False, 3, 2, 0, 3, 2),
    (10, 6, False, 3, 1, 0, 3, 1),
    (10, 6, False, 3, None, 0, 3, None),
    # Cut, where that is allowed.
    (10, 0, True, 3, 7, 0, 3, 7),
    (10, 0, True, 3, 8, 0, 3, 7),
    (10, 0, True, 3, 100, 0, 3, 7),
    (10, 0, True, 3, 2**31 - 1, 0, 3, 7),
    (10, 0, True, 3, 100, 7, 3, 7),
    (100, 0, True, 3, None, 0, 3, None),
    (10, 0, True, 9, 100, 0, 9, 1),
    (10, 0, True, 10, 100, 0, 10, 0),
    (10, 0, True, 10, None, 0, 10, None),
    (10, 0, True, 11, 100, 0, 10, 0),
    (10, 0, True, 11, None, 0, 10, None),
    (3, 0, True, 3, None, 0, 3, None),
    (10, 5, True, 3, 100, 0, 3, 2),
    # The reserve alone filled the context: after cutting it is not counted, as in SGLang.
    (10, 5, True, 8, 100, 0, 8, 2),
    (10, 5, True, 5, 100, 0, 5, 5),
    (10, 5, True, 12, 100, 0, 10, 0),
    (10, 20, True, 3, 100, 0, 3, 7),
]

TOO_LONG = [
    (10, 0, False, 3, 100, 0, "max_new_tokens"),
    (10, 0, False, 3, 8, 0, "max_new_tokens"),
    (10, 0, False, 9, 2, 0, "max_new_tokens"),
    (10, 0, False, 3, 2**31 - 1, 0, "max_new_tokens"),
    (10, 5, False, 3, 3, 0, "max_new_tokens"),
    (10, 0, False, 10, 1, 0, "input_ids"),
    (10, 0, False, 10, 0, 0, "input_ids"),
    (10, 0, False, 10, None, 0, "input_ids"),
    (10, 0, False, 11, None, 0, "input_ids"),
    (3, 0, False, 3, 1, 0, "input_ids"),
    (10, 7, False, 3, None, 0, "input_ids"),
    # Cut, but then less is left than must be generated.
    (10, 0, True, 3, 100, 8, "min_new_tokens"),
    (10, 0, True, 10, 100, 1, "min_new_tokens"),
]


@pytest.mark.parametrize("case", FITS)
def test_what_fits_the_context_is_kept_and_what_may_be_cut_is_cut(case):
    """Exactly filling the context is allowed; one token more is not."""
    context, reserved, cut, count, limit, least, count_after, limit_after = case
    ids = np.arange(count, dtype=np.int32)
    sampling = _sampling(max_new_tokens=limit, min_new_tokens=least)
    ids_after, sampling_after = _limits(
        context_length=context, reserved_tokens=reserved, allow_auto_truncate=cut
    ).check_total_tokens(ids, sampling)
    assert ids_after.tolist() == list(range(count_after))
    assert sampling_after.params.max_new_tokens == limit_after
    if (count_after, limit_after) == (count, limit):
        assert sampling_after is sampling


@pytest.mark.parametrize("case", TOO_LONG)
def test_what_is_too_long_is_refused(case):
    """An answer silently cut short, with a 200, is worse than no answer."""
    context, reserved, cut, count, limit, least, field = case
    limits = _limits(context_length=context, reserved_tokens=reserved, allow_auto_truncate=cut)
    sampling = _sampling(max_new_tokens=limit, min_new_tokens=least)
    _refused(field, limits.check_total_tokens, np.arange(count, dtype=np.int32), sampling)


def test_the_message_has_the_numbers_of_the_sum():
    """The client can work out what to ask for instead."""
    text = _refused(
        "max_new_tokens", _limits(context_length=10).check_total_tokens, IDS, _sampling(max_new_tokens=100)
    )
    for part in ("context_length=10", "total tokens=103", "input tokens=3", "completion tokens=100"):
        assert part in text


def test_reserved_slots_are_told_as_input():
    """Or the sum in the message would not add up."""
    limits = _limits(context_length=10, reserved_tokens=5)
    text = _refused("max_new_tokens", limits.check_total_tokens, IDS, _sampling(max_new_tokens=3))
    assert "input tokens=8" in text


@given(
    st.integers(1, 40), st.integers(0, 10), st.booleans(), st.integers(1, 60), st.none() | st.integers(0, 60)
)
def test_what_is_let_through_never_needs_more_than_the_context(context, reserved, cut, count, limit):
    """The engine has no room beyond it, and nobody looks again."""
    limits = _limits(context_length=context, reserved_tokens=reserved, allow_auto_truncate=cut)
    ids = np.arange(count, dtype=np.int32)
    try:
        ids_after, sampling = limits.check_total_tokens(ids, _sampling(max_new_tokens=limit))
    except ValidationError:
        assert not cut
        return
    assert len(ids_after) + (sampling.params.max_new_tokens or 0) <= context
    assert (sampling.params.max_new_tokens is None) == (limit is None)
    assert ids_after.tolist() == ids[: len(ids_after)].tolist()
    # Looking twice changes nothing.
    if len(ids_after) + reserved < context:
        again, sampling_again = limits.check_total_tokens(ids_after, sampling)
        assert again.tolist() == ids_after.tolist()
        assert sampling_again == sampling


@pytest.mark.parametrize("ids", [[-1], [1, -1], [2**31], [5, 2**40]])
def test_ids_to_detokenize_need_to_fit_int32(ids):
    """They travel in an int32 column."""
    text = _refused("token_ids", check_detokenize_ids, np.array(ids, dtype=np.int64))
    assert "out of range" in text


@pytest.mark.parametrize("ids", [[], [0], [7, 8, 9], [2**31 - 1]])
def test_ids_to_detokenize_need_no_vocabulary(ids):
    """What a decoder does not know it leaves out."""
    check_detokenize_ids(np.array(ids, dtype=np.int64))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("vocab_size", 0),
        ("vocab_size", True),
        ("vocab_size", 5.0),
        ("vocab_size", None),
        ("context_length", 0),
        ("context_length", -1),
        ("reserved_tokens", -1),
    ],
)
def test_limits_that_cannot_work_are_refused_at_the_start(setting, value):
    """Not with the first request, at night."""
    with pytest.raises(ConfigError) as error:
        _limits(**{setting: value})
    assert error.value.setting == setting


def test_texts_of_log_probabilities_need_a_tokenizer() -> None:
    """Where there is none they would be missing, without a word why."""
    asked = {"input_ids": [1], "return_logprob": True}
    limits = Limits(vocab_size=10, context_length=10, has_tokenizer=False)
    for request in (asked, asked | {"return_logprob": False, "return_text_in_logprobs": True}):
        limits.validate(_single(**request))
    text = _refused(
        "return_text_in_logprobs", limits.validate, _single(**asked, return_text_in_logprobs=True)
    )
    assert "tokenizer" in text
