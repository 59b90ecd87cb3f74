"""Finish reasons: echoed key for key, read safely, and carried in a byte where possible."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.errors import CodecError
from manager.finish import FinishCode, FinishKind, FinishReason, decode, encode

# dictionary, kind, matched, abort status, kind name, wire code
ROWS = [
    ({"type": "stop", "matched": 9}, FinishKind.STOP, 9, None, "stop", FinishCode.STOP_TOKEN),
    ({"type": "stop", "matched": 0}, FinishKind.STOP, 0, None, "stop", FinishCode.STOP_TOKEN),
    ({"type": "stop", "matched": -1}, FinishKind.STOP, -1, None, "stop", FinishCode.STOP_TOKEN),
    ({"type": "stop", "matched": "</s>"}, FinishKind.STOP, "</s>", None, "stop", FinishCode.DETAILS),
    ({"type": "stop", "matched": ""}, FinishKind.STOP, "", None, "stop", FinishCode.DETAILS),
    ({"type": "stop", "matched": [9, 10]}, FinishKind.STOP, [9, 10], None, "stop", FinishCode.DETAILS),
    ({"type": "stop", "matched": []}, FinishKind.STOP, [], None, "stop", FinishCode.DETAILS),
    ({"type": "stop", "matched": 2**63}, FinishKind.STOP, 2**63, None, "stop", FinishCode.DETAILS),
    ({"type": "stop", "matched": None}, FinishKind.STOP, None, None, "stop", FinishCode.DETAILS),
    ({"type": "stop", "matched": 5, "extra": 1}, FinishKind.STOP, 5, None, "stop", FinishCode.DETAILS),
    ({"type": "stop", "extra": 5}, FinishKind.STOP, None, None, "stop", FinishCode.DETAILS),
    ({"type": "stop"}, FinishKind.STOP, None, None, "stop", FinishCode.STOP),
    ({"type": "length", "length": 8}, FinishKind.LENGTH, None, None, "length", FinishCode.LENGTH),
    ({"type": "length", "length": None}, FinishKind.LENGTH, None, None, "length", FinishCode.DETAILS),
    ({"type": "length"}, FinishKind.LENGTH, None, None, "length", FinishCode.DETAILS),
    ({"type": "abort"}, FinishKind.ABORT, None, None, "abort", FinishCode.ABORT),
    ({"type": "abort", "message": "Aborted"}, FinishKind.ABORT, None, None, "abort", FinishCode.DETAILS),
    (
        {"type": "abort", "message": None, "status_code": None, "err_type": None},
        FinishKind.ABORT,
        None,
        None,
        "abort",
        FinishCode.DETAILS,
    ),
    (
        {"type": "abort", "message": "over the limit", "status_code": 400, "err_type": "BadRequestError"},
        FinishKind.ABORT,
        None,
        (400, "over the limit"),
        "abort",
        FinishCode.DETAILS,
    ),
    (
        {"type": "abort", "status_code": 503},
        FinishKind.ABORT,
        None,
        (503, "request aborted"),
        "abort",
        FinishCode.DETAILS,
    ),
    (
        {"type": "abort", "message": "", "status_code": 0},
        FinishKind.ABORT,
        None,
        (0, "request aborted"),
        "abort",
        FinishCode.DETAILS,
    ),
    # A known type with a field of a wrong type is nothing that is known.
    ({"type": "stop", "matched": True}, FinishKind.UNKNOWN, None, None, "stop", FinishCode.DETAILS),
    ({"type": "stop", "matched": 5.0}, FinishKind.UNKNOWN, None, None, "stop", FinishCode.DETAILS),
    ({"type": "stop", "matched": ["a"]}, FinishKind.UNKNOWN, None, None, "stop", FinishCode.DETAILS),
    ({"type": "stop", "matched": {"a": 1}}, FinishKind.UNKNOWN, None, None, "stop", FinishCode.DETAILS),
    ({"type": "length", "length": "8"}, FinishKind.UNKNOWN, None, None, "length", FinishCode.DETAILS),
    ({"type": "length", "length": True}, FinishKind.UNKNOWN, None, None, "length", FinishCode.DETAILS),
    ({"type": "abort", "status_code": "400"}, FinishKind.UNKNOWN, None, None, "abort", FinishCode.DETAILS),
    (
        {"type": "abort", "message": 5, "status_code": 400},
        FinishKind.UNKNOWN,
        None,
        None,
        "abort",
        FinishCode.DETAILS,
    ),
    (
        {"type": "tool_calls", "name": "search"},
        FinishKind.UNKNOWN,
        None,
        None,
        "tool_calls",
        FinishCode.DETAILS,
    ),
    ({"type": "tool_calls", "matched": 5}, FinishKind.UNKNOWN, None, None, "tool_calls", FinishCode.DETAILS),
    ({"type": None}, FinishKind.UNKNOWN, None, None, "unknown", FinishCode.DETAILS),
    ({"type": ["stop"]}, FinishKind.UNKNOWN, None, None, "unknown", FinishCode.DETAILS),
    ({"reason": "x"}, FinishKind.UNKNOWN, None, None, "unknown", FinishCode.DETAILS),
    ({}, FinishKind.UNKNOWN, None, None, "unknown", FinishCode.DETAILS),
]


@pytest.mark.parametrize(("raw", "kind", "matched", "status", "name", "code"), ROWS, ids=range(len(ROWS)))
def test_every_shape_is_read_and_carried_as_the_table_says(raw, kind, matched, status, name, code):
    """A lost field is a stop string left in the text, or an error that looks like an answer."""
    reason = FinishReason.from_mapping(raw)
    assert reason.kind is kind
    assert (reason.matched(), type(reason.matched())) == (matched, type(matched))
    assert reason.abort_status() == status
    assert reason.kind_name() == name
    assert _same(reason.to_mapping(), raw)
    assert encode(reason)[0] is code
    assert _same(_carried(reason).to_mapping(), raw)


def _carried(reason):
    code, value, details = encode(reason)
    return decode(int(code), value, details)


def _same(one, other):
    """Equal, and with the same types: to Python True is 1."""
    return one == other and repr(one) == repr(other)


def test_not_finished_is_carried_as_nothing():
    """The plain decode step must cost nothing for it."""
    assert encode(None) == (FinishCode.NONE, 0, b"")
    assert decode(0, 0, b"") is None


@pytest.mark.parametrize(
    ("reason", "raw"),
    [
        (FinishReason.stop(), {"type": "stop"}),
        (FinishReason.stop(0), {"type": "stop", "matched": 0}),
        (FinishReason.stop("END"), {"type": "stop", "matched": "END"}),
        (FinishReason.stop([1, 2]), {"type": "stop", "matched": [1, 2]}),
        (FinishReason.length(7), {"type": "length", "length": 7}),
        (FinishReason.abort(), {"type": "abort"}),
        (
            FinishReason.abort("no", status_code=400),
            {"type": "abort", "message": "no", "status_code": 400, "err_type": None},
        ),
    ],
)
def test_reasons_made_here_have_the_shape_clients_know(reason, raw):
    """They parse these dictionaries."""
    assert reason == FinishReason.from_mapping(raw)


def test_the_callers_dictionary_is_not_kept():
    """A scheduler in the same process may reuse it."""
    raw = {"type": "length", "length": 7}
    reason = FinishReason.from_mapping(raw)
    raw["length"] = 8
    reason.to_mapping()["length"] = 9
    assert reason.to_mapping() == {"type": "length", "length": 7}


def test_numpy_integers_are_taken_for_what_they_are():
    """Columns are full of them; a stop token of that type was once nobody's stop."""
    reason = FinishReason.stop(np.int32(9))
    assert encode(reason) == (FinishCode.STOP_TOKEN, 9, b"")
    assert decode(np.uint8(2), np.int64(9), b"") == reason
    assert type(decode(np.uint8(3), np.int64(7), b"").to_mapping()["length"]) is int


DETAILS = msgspec.msgpack.encode({"type": "stop"})


@pytest.mark.parametrize(
    ("code", "value", "details"),
    [
        (0, 1, b""),
        (0, 0, DETAILS),
        (1, 1, b""),
        (1, 0, b"x"),
        (2, 5, b"x"),
        (3, 5, DETAILS),
        (4, -1, b""),
        (4, 0, b"x"),
        (5, 0, b""),
        (-1, 0, b""),
        (254, 0, b""),
        (256, 0, DETAILS),
        (255, 1, DETAILS),
        (255, 0, b""),
        (255, 0, b"\xc1"),
        (255, 0, b"\x90"),
        (255, 0, b"\x05"),
        (255, 0, DETAILS + b"\x00"),
        (255, 0, DETAILS[:-1]),
        (255, 0, b"\x81\x01\x02"),
        (255, 0, b"\x81\xa1a\xd4\x05x"),
        (255, 0, b"\x81\xa1\xff\x02"),
        (255, 0, b"\x81\xa1a" * 100_000),
    ],
    ids=range(23),
)
def test_what_cannot_have_been_written_is_an_error_of_the_codec(code, value, details):
    """A damaged row ends its own request, and nothing else."""
    with pytest.raises(CodecError):
        decode(code, value, details)


@pytest.mark.parametrize("value", [2**64, object(), "\ud800"])
def test_what_msgpack_cannot_carry_is_an_error_of_the_codec(value):
    """An odd value of one request must not end the step of all."""
    with pytest.raises(CodecError):
        encode(FinishReason.from_mapping({"type": "x", "value": value}))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["type", "matched", "length", "message", "status_code", "err_type"])
TYPES = st.sampled_from(["stop", "length", "abort", "tool_calls"])


@given(st.dictionaries(KEYS | st.text(max_size=5), JSON, max_size=5), TYPES)
def test_every_dictionary_comes_back_as_it_went(raw, kind):
    """It is echoed to the client, whatever a future scheduler says in it."""
    for dictionary in (raw, {**raw, "type": kind}):
        reason = FinishReason.from_mapping(dictionary)
        assert _same(_carried(reason).to_mapping(), dictionary)
        reason.matched(), reason.abort_status(), reason.kind_name()


@given(st.integers(-3, 300), st.integers(-(2**63), 2**63 - 1), st.binary(max_size=30))
def test_no_row_raises_anything_but_a_codec_error(code, value, details):
    """It comes from another process. What decodes must encode to the same meaning."""
    try:
        reason = decode(code, value, details)
    except CodecError:
        return
    assert decode(*encode(reason)) == reason
