"""Sampling parameters, from a client's object to the columns an engine reads.

The tables in tests/data/sampling say of hundreds of inputs whether they are let in, what becomes of
them, and which field is to blame. They were written from the declared bounds, not by running the code.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parameter_tables import meant

from manager.errors import CodecError, ValidationError
from manager.sampling import (
    SAMPLES_MAX,
    SAMPLING_DTYPE,
    TOP_K_ALL,
    SamplingParams,
    decode_extras,
    merge_preferred,
    reference_table,
)
from manager.sampling.kinds import REGEX_LENGTH_MAX
from manager.sampling.params import PARAMETERS

TABLES = Path(__file__).parent.parent / "data" / "sampling"
VOCABULARY = 1000


def _rows():
    for path in sorted(TABLES.glob("*.json")):
        table = json.loads(path.read_text())
        for number, row in enumerate(table["rows"], start=1):
            yield pytest.param(row, table["vocab_size"], id=f"{path.stem}-{number}")


def _normalize(params, vocab_size=VOCABULARY, *, has_tokenizer=True):
    return SamplingParams.from_mapping(params).normalize(vocab_size=vocab_size, has_tokenizer=has_tokenizer)


@pytest.mark.parametrize(("row", "vocab_size"), list(_rows()))
def test_every_row_of_the_tables(row, vocab_size):
    """A value let through by mistake ends the engine; one refused by mistake breaks a client."""
    params = meant(row["params"])
    if row["expect"] == "reject":
        with pytest.raises(ValidationError) as error:
            _normalize(params, vocab_size)
        assert error.value.field == row["field"]
        assert error.value.status == 400
        # The text goes into a JSON answer, whatever the client sent.
        assert row["field"] in str(error.value) or repr(row["field"]) in str(error.value)
        assert len(json.dumps(str(error.value), allow_nan=False)) < 2000
        str(error.value).encode()
        return
    normalized = _normalize(params, vocab_size)
    for field, expected in row.get("normalized", {}).items():
        value = getattr(normalized.params, field)
        value = list(value) if isinstance(value, tuple) else value
        assert (value, type(value)) == (expected, type(expected))
    assert normalized.params.normalize(vocab_size=vocab_size, has_tokenizer=True) == normalized
    row_back = np.array([normalized.to_row()], dtype=SAMPLING_DTYPE)[0]
    assert row_back.item() == normalized.to_row()
    decode_extras(normalized.extras())


BOUNDS = {
    "max_new_tokens": "[0, 2^31 - 1]",
    "temperature": "at least 0, finite as float32",
    "top_p": "(0, 1]",
    "top_k": "-1 or [1, 2^31 - 1]",
    "min_p": "[0, 1]",
    "frequency_penalty": "[-2, 2]",
    "presence_penalty": "[-2, 2]",
    "repetition_penalty": "(0, 2]",
    "min_new_tokens": "[0, 2^31 - 1]",
    "n": "[1, 128]",
    "stream_interval": "[1, 2^31 - 1]",
    "sampling_seed": "[-2^63, 2^63 - 1]",
}
INTEGERS = {"max_new_tokens", "top_k", "min_new_tokens", "n", "stream_interval", "sampling_seed"}


def _out_of_bounds_or_of_another_type():
    """Rows of one number, refused: whether it is of the right type."""
    for case in _rows():
        row, _ = case.values
        [(field, value)] = row["params"].items() if len(row["params"]) == 1 else [(None, None)]
        if row["expect"] == "reject" and field in BOUNDS:
            value = meant(value)
            if field == "min_new_tokens" and value == 129:
                continue  # within its bounds, and above the default of max_new_tokens
            is_number = type(value) is int or (type(value) is float and field not in INTEGERS)
            yield pytest.param(field, value, is_number, id=case.id)


@pytest.mark.parametrize(("field", "value", "is_number"), list(_out_of_bounds_or_of_another_type()))
def test_a_refusal_names_the_bound_or_the_type(field, value, is_number):
    """A client that is told "out of range" tries one number after the other."""
    with pytest.raises(ValidationError) as error:
        _normalize({field: value}, 278)
    wanted = f"allowed={BOUNDS[field]}" if is_number else "integer" if field in INTEGERS else "number"
    assert wanted in str(error.value)


def test_the_tables_are_as_large_as_they_claim():
    """A table that is not found tests nothing."""
    rows = [row.values[0] for row in _rows()]
    assert len(rows) >= 600
    assert {row["expect"] for row in rows} == {"accept", "reject"}
    assert {field for row in rows for field in row["params"]} >= set(PARAMETERS)


def test_max_new_tokens_tells_absent_from_null():
    """It is the one field where a client says "no limit" with null."""
    assert _normalize({}).params.max_new_tokens == 128
    assert _normalize({"max_new_tokens": None}).params.max_new_tokens is None


def test_keyword_constructor_checks_like_the_mapping():
    """Python callers are clients too."""
    assert SamplingParams(temperature=0.5, stop=["a"]) == SamplingParams.from_mapping(
        {"temperature": 0.5, "stop": ["a"]}
    )
    with pytest.raises(ValidationError) as error:
        SamplingParams(top_p=0.0)
    assert error.value.field == "top_p"


@pytest.mark.parametrize("mapping", [None, [], "x", 5, [("temperature", 1)]])
def test_parameters_that_are_no_object_are_refused(mapping):
    """Or the client would be told about a bug of ours instead of its own."""
    with pytest.raises(ValidationError) as error:
        SamplingParams.from_mapping(mapping)
    assert error.value.field == "sampling_params"


@pytest.mark.parametrize("key", [5, None, ("a",), True])
def test_names_that_are_no_strings_are_refused(key):
    """msgpack bodies can carry such keys."""
    with pytest.raises(ValidationError):
        SamplingParams.from_mapping({key: 1})


def test_the_callers_objects_are_not_kept():
    """A caller that reuses its dictionary must not change a request on its way."""
    stop, custom = ["a"], {"b": [1]}
    params = SamplingParams(stop=stop, custom_params=custom)
    stop.append("c")
    custom["b"].append(2)
    assert params == SamplingParams(stop=["a"], custom_params={"b": [1]})


@pytest.mark.parametrize(
    ("stop", "longest"),
    [(["Question:", "\n\n"], 9), ("\U00013000", 4), (["é", "ab"], 2), ([], 0), (None, 0)],
)
def test_the_window_for_stop_strings_counts_bytes(stop, longest):
    """One character can be several tokens: a window of characters would miss the stop."""
    normalized = _normalize({"stop": stop})
    assert normalized.stop_str_max_len == longest
    assert normalized.stop_strs == tuple([stop] if isinstance(stop, str) else stop or ())


def test_the_window_for_stop_regexes_is_that_of_the_longest():
    """As above, for regexes."""
    normalized = _normalize({"stop_regex": [r"\d{3}", "and|or", r"a{2,7}"]})
    assert normalized.stop_regex_max_len == 7
    assert normalized.stop_regex_strs == (r"\d{3}", "and|or", "a{2,7}")


def test_normalizing_again_keeps_the_stops():
    """They were once wiped the second time, and generations ran to the limit."""
    once = _normalize({"stop": ["END", "STOP"], "stop_regex": r"\d{3}"})
    twice = once.params.normalize(vocab_size=VOCABULARY, has_tokenizer=True)
    assert twice == once
    assert (twice.stop_strs, twice.stop_str_max_len, twice.stop_regex_max_len) == (("END", "STOP"), 4, 3)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop": ["."]}, "stop"),
        ({"stop_regex": r"\d+"}, "stop_regex"),
        ({"min_new_tokens": 1}, "min_new_tokens"),
    ],
)
def test_what_needs_a_tokenizer_is_refused_without_one(params, field):
    """It would silently never match."""
    with pytest.raises(ValidationError) as error:
        _normalize(params, has_tokenizer=False)
    assert error.value.field == field
    _normalize(params)


def test_stop_token_ids_need_no_tokenizer():
    """They are how a client without a tokenizer ends a generation."""
    assert _normalize({"stop_token_ids": [5]}, has_tokenizer=False).stop_token_ids == (5,)


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_token_ids_are_bound_by_the_vocabulary_of_the_deployment(field):
    """An id beyond it writes into another request's row on the device."""
    params = {"stop_token_ids": [1000]} if field == "stop_token_ids" else {"logit_bias": {"1000": 1.0}}
    with pytest.raises(ValidationError) as error:
        _normalize(params, 1000)
    assert error.value.field == field
    _normalize(params, 1001)


@pytest.mark.parametrize(
    ("preferred", "request_params", "expected"),
    [
        (
            {"temperature": 0.25, "top_p": 0.75, "max_new_tokens": 4096},
            {"temperature": 1.0, "top_p": None},
            {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 4096},
        ),
        ({"temperature": 0.25, "max_new_tokens": 4096}, None, {"temperature": 0.25, "max_new_tokens": 4096}),
        ({"temperature": 0.25}, {}, {"temperature": 0.25}),
        ({"max_new_tokens": 16}, {"max_new_tokens": None}, {"max_new_tokens": None}),
        ({}, {"top_k": 5}, {"top_k": 5}),
    ],
)
def test_what_the_client_says_overrules_what_the_operator_prefers(preferred, request_params, expected):
    """Also where it says the default, or null: it said so."""
    params = SamplingParams.from_mapping(merge_preferred(preferred, request_params))
    assert {field: getattr(params, field) for field in expected} == expected


def test_the_row_is_laid_out_as_engines_know_it():
    """An engine built against an older layout reads temperatures as penalties."""
    assert SAMPLING_DTYPE.itemsize == 96
    assert {name: (str(field[0]), field[1]) for name, field in SAMPLING_DTYPE.fields.items()} == {
        "temperature": ("float64", 0),
        "top_p": ("float64", 8),
        "min_p": ("float64", 16),
        "frequency_penalty": ("float64", 24),
        "presence_penalty": ("float64", 32),
        "repetition_penalty": ("float64", 40),
        "max_new_tokens": ("int64", 48),
        "min_new_tokens": ("int64", 56),
        "sampling_seed": ("int64", 64),
        "top_k": ("int32", 72),
        "stream_interval": ("int32", 76),
        "stop_str_max_len": ("int32", 80),
        "stop_regex_max_len": ("int32", 84),
        "ignore_eos": ("bool", 88),
        "skip_special_tokens": ("bool", 89),
        "spaces_between_special_tokens": ("bool", 90),
        "no_stop_trim": ("bool", 91),
        "has_seed": ("bool", 92),
    }


def test_a_row_says_what_is_unset():
    """0 is a seed, and 0 new tokens are a limit: neither may stand for "not given"."""
    unset = np.array([_normalize({"max_new_tokens": None}).to_row()], dtype=SAMPLING_DTYPE)[0]
    assert (unset["max_new_tokens"], unset["has_seed"], unset["stream_interval"]) == (-1, False, 0)
    zero = np.array([_normalize({"max_new_tokens": 0, "sampling_seed": 0}).to_row()], dtype=SAMPLING_DTYPE)[0]
    assert (zero["max_new_tokens"], zero["has_seed"], zero["sampling_seed"]) == (0, True, 0)


def test_plain_parameters_have_no_extras():
    """The plain request pays nothing for what it does not use."""
    assert (
        _normalize({"temperature": 0.7, "max_new_tokens": 5, "n": 3, "stop_token_ids": [1]}).extras() == b""
    )
    assert decode_extras(b"") == {}


def test_extras_come_back_as_they_went():
    """A schema or bias that changes on the way constrains the output to something else."""
    normalized = _normalize(
        {
            "json_schema": '{"type":"object"}',
            "logit_bias": {"5": -1.5, "17": 100},
            "custom_params": {"a": [1, None, {"b": 2.5}]},
            "stop": ["END", "é"],
            "stop_regex": r"\d{3}",
        }
    )
    assert decode_extras(normalized.extras()) == {
        "json_schema": '{"type":"object"}',
        "logit_bias": {5: -1.5, 17: 100.0},
        "custom_params": {"a": [1, None, {"b": 2.5}]},
        "stop_strs": ("END", "é"),
        "stop_regex_strs": (r"\d{3}",),
    }


@pytest.mark.parametrize(
    "damaged",
    [
        b"\x00",
        b"\xc1",
        b"\x81",
        b"\x90",
        b"\xff" * 20,
        b"\x81\xa5regex\xa2\xff\xfe",
        b"\x91" * 100_000,
        b"\x81\xadcustom_params" + b"\x81\xa1a" * 100_000 + b"\x01",
        msgspec.msgpack.encode({"regex": 5}),
        msgspec.msgpack.encode({"regex": "("}),
        msgspec.msgpack.encode({"zzz": 1}),
        msgspec.msgpack.encode({"temperature": 1.0}),
        msgspec.msgpack.encode({"logit_bias": {"5": 1.0}}),
        msgspec.msgpack.encode({"logit_bias": {-5: 1.0}}),
        msgspec.msgpack.encode({"logit_bias": {5: float("nan")}}),
        msgspec.msgpack.encode({"stop_strs": [""]}),
        msgspec.msgpack.encode({"stop_strs": ["x"] * 33}),
        msgspec.msgpack.encode({"custom_params": {"a": msgspec.msgpack.Ext(5, b"x")}}),
        msgspec.msgpack.encode({"custom_params": {"a": b"bytes"}}),
    ],
    ids=range(19),
)
def test_damaged_extras_are_an_error_of_the_codec(damaged):
    """The bytes come from another process: nothing else may ever be raised."""
    with pytest.raises(CodecError):
        decode_extras(damaged)


@given(st.binary(max_size=64))
def test_no_bytes_raise_anything_but_a_codec_error(data):
    """As above, for bytes nobody thought of."""
    try:
        decode_extras(data)
    except CodecError:
        return


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
VALID = st.fixed_dictionaries(
    {},
    optional={
        "max_new_tokens": st.none() | st.integers(100, 2**31 - 1),
        "min_new_tokens": st.integers(0, 100),
        "temperature": st.floats(0, 1e38),
        "top_p": st.floats(1e-30, 1),
        "top_k": st.just(-1) | st.integers(1, 2**31 - 1),
        "min_p": st.floats(0, 1),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(1e-30, 2),
        "n": st.integers(1, SAMPLES_MAX),
        "stop": st.text(min_size=1, max_size=9) | st.lists(st.text(min_size=1, max_size=9), max_size=5),
        "stop_token_ids": st.lists(st.integers(0, VOCABULARY - 1), max_size=9),
        "stop_regex": st.sampled_from([r"\d{3}", "and|or", r"[.!?]\s*$"]),
        "ignore_eos": st.none() | st.booleans(),
        "no_stop_trim": st.booleans(),
        "sampling_seed": st.none() | st.integers(-(2**63), 2**63 - 1),
        "stream_interval": st.none() | st.integers(1, 100),
        "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1).map(str), FINITE, max_size=5),
        "ebnf": st.text(max_size=20),
        "custom_params": st.dictionaries(
            st.text(max_size=5), st.none() | st.booleans() | FINITE | st.text(max_size=5)
        ),
    },
)


@given(VALID)
def test_normalizing_is_idempotent(params):
    """A request that is looked at twice, after a retry, must mean the same."""
    once = _normalize(params)
    assert once.params.normalize(vocab_size=VOCABULARY, has_tokenizer=True) == once


@given(VALID)
def test_everything_a_client_asked_for_reaches_the_engine(params):
    """A row and its extras say the same as the object they were made of."""
    normalized = _normalize(params)
    row = np.array([normalized.to_row()], dtype=SAMPLING_DTYPE)[0]
    for field in set(SAMPLING_DTYPE.names) & set(PARAMETERS):
        asked = getattr(normalized.params, field)
        if asked is not None:
            assert row[field].item() == asked
    assert row["has_seed"] == (normalized.params.sampling_seed is not None)
    extras = decode_extras(normalized.extras())
    for field in ("logit_bias", "ebnf", "custom_params"):
        assert extras.get(field) == getattr(normalized.params, field)
    assert extras.get("stop_strs", ()) == normalized.stop_strs
    assert extras.get("stop_regex_strs", ()) == normalized.stop_regex_strs


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(PARAMETERS)) | st.text(max_size=5), ANYTHING, max_size=4))
def test_no_object_raises_anything_but_a_validation_error(params):
    """An odd value is the client's mistake (400), never a fault of ours (500)."""
    refusal = None
    try:
        row = _normalize(params).to_row()
    except ValidationError as error:
        refusal = error
    if refusal is None:
        np.array([row], dtype=SAMPLING_DTYPE)
    else:
        assert refusal.field is not None
        json.dumps(str(refusal), allow_nan=False)


def test_greedy_and_all_are_spelled_out():
    """An engine divides by the temperature and slices by top_k: it must not meet 0 or -1."""
    greedy = _normalize({"temperature": 0, "top_k": 50}).params
    assert (greedy.temperature, greedy.top_k) == (1.0, 1)
    assert _normalize({"top_k": -1}).params.top_k == TOP_K_ALL


def test_the_limit_can_be_changed_and_nothing_else():
    """A request cut to the context keeps what else was asked for."""
    normalized = _normalize({"max_new_tokens": 100, "stop": "END", "temperature": 0.5})
    cut = normalized.with_max_new_tokens(7)
    assert cut.params == dataclasses.replace(normalized.params, max_new_tokens=7)
    assert cut.stop_strs == normalized.stop_strs


def test_parameters_can_be_pickled_and_copied():
    """Engines send the request objects on to their own ranks."""
    normalized = _normalize({"logit_bias": {"5": 1.5}, "custom_params": {"a": [1]}, "stop": "END"})
    assert pickle.loads(pickle.dumps(normalized)) == normalized
    assert copy.deepcopy(normalized) == normalized


def test_the_reference_table_has_a_line_for_every_parameter():
    """The documentation is made of it."""
    lines = reference_table().splitlines()
    assert [line.split("`")[1] for line in lines[2:]] == list(PARAMETERS)
    assert all(line.count("|") == 7 for line in lines)
    assert "| `top_p` | number | 1.0 | (0, 1] | column `<f8` |" in reference_table()


def test_a_pattern_for_the_output_has_a_length():
    """One client's pattern of megabytes would hold up the event loop for all others."""
    longest = "a" * REGEX_LENGTH_MAX
    assert SamplingParams.from_mapping({"regex": longest}).regex == longest
    with pytest.raises(ValidationError, match=f"regex is too long: characters={REGEX_LENGTH_MAX + 1}, max="):
        SamplingParams.from_mapping({"regex": longest + "a"})
