"""From what an engine gives to what a caller gets, through real rings, a port and a shard."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from output_path import TOKENIZER, OutputPath

from manager import BatchExtras, FinishCode, LogprobColumn, messages
from manager.detokenize import DecoderKind
from manager.extras_frame import encode

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def paths(ring_name: str) -> Iterator[Any]:
    with contextlib.ExitStack() as undo:

        def make(**settings: Any) -> OutputPath:
            path = OutputPath(ring_name, **settings)
            undo.callback(path.close)
            return path

        yield make


def near(entries: list[Any]) -> list[Any]:
    """Rounded to what float32 keeps."""
    return [
        entry if entry is None or entry[0] is None else (round(entry[0], 5), *entry[1:]) for entry in entries
    ]


def test_every_family_lands_in_its_own_field(paths: Any) -> None:
    """Two families that change places show a client the wrong numbers, and nobody notices."""
    path = paths()
    path.register(1)
    extras = BatchExtras(
        output=LogprobColumn([[-1.1, -1.2]], [[11, 12]]),
        input=LogprobColumn([[-2.1]], [[21]]),
        output_top=LogprobColumn([[[-3.1, -3.2]]], [[[31, 32]]]),
        input_top=LogprobColumn([[[-4.1]]], [[[41]]]),
        output_token_ids=LogprobColumn([[[-5.1, -5.2]]], [[[51, 52]]]),
        input_token_ids=LogprobColumn([[[-6.1]]], [[[61]]]),
        hidden_states=[[[7.1, 7.2, 7.3]]],
    )
    path.push([1], [[100]], extras)
    path.work()
    (got,) = path.extras[1]
    assert near(got.logprobs.output) == [(-1.1, 11, None), (-1.2, 12, None)]
    assert near(got.logprobs.input) == [(-2.1, 21, None)]
    assert [near(p) for p in got.logprobs.output_top] == [[(-3.1, 31, None), (-3.2, 32, None)]]
    assert [near(p) for p in got.logprobs.input_top] == [[(-4.1, 41, None)]]
    assert [near(p) for p in got.logprobs.output_token_ids] == [[(-5.1, 51, None), (-5.2, 52, None)]]
    assert [near(p) for p in got.logprobs.input_token_ids] == [[(-6.1, 61, None)]]
    assert [row.tolist() for row in got.hidden_states] == [pytest.approx([7.1, 7.2, 7.3])]
    assert path.order == ["extras 1", "text 1"]


ROWS = {97: (-0.1, [(-0.1, 97), (-0.2, 98)]), 98: None, 99: (-0.3, [(-0.3, 99), (-0.4, 97)])}


@pytest.mark.parametrize("order", list(itertools.permutations([97, 98, 99])))
@pytest.mark.parametrize("gone", [None, 97, 98, 99])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_request_without_shifts_nothing_onto_its_neighbours(
    order: tuple[int, ...], gone: int | None, shards: int, paths: Any
) -> None:
    """Wherever it stands in the batch, and whoever has been aborted meanwhile."""
    path = paths(shards=shards)
    path.register(*(token for token in order if token != gone))
    rows = [ROWS[token] for token in order]
    extras = BatchExtras(
        output=LogprobColumn(
            [row and [row[0]] for row in rows],
            [row and [token] for row, token in zip(rows, order, strict=True)],
        ),
        output_top=LogprobColumn(
            [row and [[value for value, _ in row[1]]] for row in rows],
            [row and [[token for _, token in row[1]]] for row in rows],
        ),
    )
    path.push(list(order), [[token] for token in order], extras)
    path.work()
    for token in order:
        if token == gone:
            assert token not in path.extras
            continue
        assert path.texts[token] == chr(token)
        row = ROWS[token]
        if row is None:
            assert token not in path.extras
            continue
        assert near(path.logprobs(token).output) == [(row[0], token, None)]
        assert near(path.logprobs(token).output_top[0]) == [(*entry, None) for entry in row[1]]


def test_a_family_of_nobody_is_as_good_as_none(paths: Any) -> None:
    """Nothing of it travels, and a step in which nobody has any is a plain step."""
    ids = np.array([1, 2], np.uint64)
    only = LogprobColumn([[-0.5], None], [[5], None])
    for empty in (LogprobColumn([None, None], [None, None]), LogprobColumn([[], []], [None, []])):
        columns = encode(
            ids, BatchExtras(output=only, input=empty, output_top=empty, hidden_states=[None, []])
        )
        bare = encode(ids, BatchExtras(output=only))
        assert columns is not None
        assert bare is not None
        for one, other in zip(columns, bare, strict=True):
            assert (one is None) == (other is None)
            assert one is None or np.array_equal(one, other)
        assert encode(ids, BatchExtras(output=empty)) is None
    path = paths()
    path.register(1, 2)
    path.push([1, 2], [[65], [66]], BatchExtras(input=LogprobColumn([None, None], [None, None])))
    path.work()
    assert path.order == ["text 1", "text 2"]


def test_the_first_token_of_a_prompt_has_no_log_probability_and_keeps_its_id(paths: Any) -> None:
    """None once ended the step of all of them."""
    path = paths()
    path.register(1)
    path.push(
        [1],
        [[65]],
        BatchExtras(
            input=LogprobColumn([[None, -2.0]], [[10, 20]]),
            input_top=LogprobColumn([[None, [-1.0], []]], [[None, [30], None]]),
            output=LogprobColumn([[math.nan]], [[7]]),
        ),
    )
    path.work()
    got = path.logprobs(1)
    assert got.input == [(None, 10, None), (-2.0, 20, None)]
    assert got.input_top == [None, [(-1.0, 30, None)], None]
    assert got.output == [(None, 7, None)]


def test_arrays_are_taken_as_lists_are(paths: Any) -> None:
    """An engine has them at hand, of whatever width."""
    path = paths()
    path.register(1)
    path.push(
        [1],
        [[65]],
        BatchExtras(
            output=LogprobColumn([np.array([-1.0, -2.0])], [np.array([1, 2])]),
            output_top=LogprobColumn([np.array([[-1.0, -2.0], [-3.0, -4.0]])], [np.array([[1, 2], [3, 4]])]),
            hidden_states=[np.arange(12, dtype=np.float16).reshape(2, 2, 3)],
        ),
    )
    path.work()
    got = path.logprobs(1)
    assert got.output == [(-1.0, 1, None), (-2.0, 2, None)]
    assert got.output_top == [[(-1.0, 1, None), (-2.0, 2, None)], [(-3.0, 3, None), (-4.0, 4, None)]]
    assert [row.tolist() for row in path.extras[1][0].hidden_states] == [
        list(map(float, range(6))),
        list(map(float, range(6, 12))),
    ]


BAD: dict[str, tuple[BatchExtras, str]] = {
    "more values": (
        BatchExtras(output=LogprobColumn([[1.0, 2.0], None], [[1], None])),
        "request_id=1.*ids=1",
    ),
    "more ids": (
        BatchExtras(input=LogprobColumn([None, [1.0]], [None, [1, 2]])),
        "family=input, request_id=2",
    ),
    "ids alone": (BatchExtras(output=LogprobColumn([None, None], [None, [1]])), "request_id=2"),
    "positions": (
        BatchExtras(output_top=LogprobColumn([None, [[1.0], None]], [None, [[1]]])),
        "family=output_top, request_id=2.*entries=2, ids=1",
    ),
    "an empty position with ids": (
        BatchExtras(input_token_ids=LogprobColumn([[None], None], [[[4]], None])),
        "family=input_token_ids, request_id=1.*values=0, ids=1",
    ),
    "a late None": (BatchExtras(input=LogprobColumn([[-1.0, None], None], [[1, 2], None])), "value is None"),
    "None of the output": (BatchExtras(output=LogprobColumn([[None], None], [[1], None])), "value is None"),
    "ids that are none": (BatchExtras(output=LogprobColumn([[1.0], None], [[2**31], None])), "request_id=1"),
    "one request short": (
        BatchExtras(output=LogprobColumn([[1.0]], [[1]])),
        "family=output, values=1, ids=1",
    ),
    "one request over": (BatchExtras(hidden_states=[None] * 3), "family=hidden_states, entries=3"),
    "rows of nothing": (BatchExtras(hidden_states=[[["x"]], None]), "family=hidden_states, request_id=1"),
}


@pytest.mark.parametrize("wrong", BAD)
def test_extras_that_do_not_add_up_are_refused_with_nothing_sent(wrong: str, paths: Any) -> None:
    """The engine's author is told which request and family; no client is given a shifted column."""
    path = paths()
    path.register(1, 2)
    extras, text = BAD[wrong]
    with pytest.raises(ValueError, match=text):
        path.push([1, 2], [[65], [66]], extras)
    path.work()
    assert path.order == []
    path.push([1, 2], [[65], [66]], None)
    path.work()
    assert path.texts == {1: "A", 2: "B"}


@pytest.mark.parametrize("kind", [DecoderKind.TABLE, DecoderKind.LIBRARY])
def test_texts_are_those_of_single_ids_for_requests_that_want_them(kind: DecoderKind, paths: Any) -> None:
    """With their spaces, whatever stands around them; an id of no vocabulary has an empty one."""
    path = paths(kind=kind)
    path.register(1, texts=True)
    path.register(2)
    path.register(3, texts=True)
    path.push(
        [1, 2, 3],
        [[65], [66], [67]],
        BatchExtras(
            output=LogprobColumn([[-1.0], [-2.0], [-3.0]], [[65], [66], [272]]),
            output_top=LogprobColumn(
                [[[-1.0, -2.0], None], None, [[-5.0]]], [[[32, 97], None], None, [[-4]]]
            ),
        ),
    )
    path.work()
    one, two, three = (path.logprobs(i) for i in (1, 2, 3))
    assert one.output == [(-1.0, 65, "A")]
    assert one.output_top == [[(-1.0, 32, " "), (-2.0, 97, "a")], None]
    assert two.output == [(-2.0, 66, None)]
    assert three.output == [(-3.0, 272, TOKENIZER.id_to_token(272))]
    assert three.output_top == [[(-5.0, -4, "")]]


def _frame(path: Any, ids: list[int], **families: Any) -> None:
    """Push an extras frame as a scheduler that speaks to the ring itself could."""
    columns = {"request_ids": np.array(ids, np.uint64), **families}
    schema = messages.EXTRAS
    assert schema.push(path.port._egress[0], len(ids), *(columns.get(name) for name in schema.names))


def test_a_frame_with_a_part_of_a_family_fails_every_request_it_names(paths: Any) -> None:
    """All or nothing: the requests end at once and do not wait for what will not come."""
    path = paths()
    path.register(1, 2, 3)
    _frame(
        path,
        [1, 2],
        out_lp_counts=np.array([1, 0], np.uint32),
        out_lp_values=np.array([-1.0], np.float32),
    )
    path.push([1, 2, 3], [[65], [66], [67]], None)
    path.work()
    assert sorted(path.failed) == [1, 2]
    assert "family=output" in str(path.failed[1])
    assert sorted(path.aborts) == [1, 2]
    assert path.texts == {3: "C"}
    assert path.extras == {}


@pytest.mark.parametrize("column", ["out_top_counts", "out_top_lengths"])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_frame_whose_lengths_do_not_add_up_fails_every_request_it_names(
    column: str, by: int, paths: Any
) -> None:
    """One too many or too few would give each request behind it the next one's numbers."""
    path = paths()
    path.register(1, 2)
    path.push(
        [1, 2],
        [[65], [66]],
        BatchExtras(output_top=LogprobColumn([[[-1.0, -2.0]], [[-3.0]]], [[[1, 2]], [[3]]])),
    )
    ring = path.shards[0]._egress
    record = ring.drain(1)[0]
    payload = bytearray(memoryview(record))
    ring.release()
    frame = messages.EXTRAS.read(payload)
    place = np.frombuffer(payload, np.uint8).tobytes().index(frame[column].tobytes())
    payload[place] += by
    path.port._egress[0].push(bytes(payload), type=messages.EgressType.EXTRAS)
    path.work()
    assert sorted(path.failed) == [1, 2]
    assert path.extras == {}


def test_what_is_longer_than_a_ring_comes_in_pieces_and_whole(paths: Any) -> None:
    """A long prompt with its most likely ids, on a ring of a few KiB."""
    path = paths(ring_bytes=1 << 13)
    path.register(1, 2, texts=True)
    count = 700
    values = [None, *(-float(i) for i in range(1, count))]
    ids = [i % 128 for i in range(count)]
    top = [None, *([-1.0 * i, -2.0 * i] for i in range(1, count))]
    top_ids = [None, *([i % 90, i % 80] for i in range(1, count))]

    extras = BatchExtras(
        input=LogprobColumn([values, [-4.0]], [ids, [65]]),
        input_top=LogprobColumn([top, None], [top_ids, None]),
        output=LogprobColumn([[-1.0], [-2.0]], [[65], [66]]),
    )
    pushing = threading.Thread(
        target=lambda: path.port.push_batch([1, 2], [1, 1], [65, 66], extras=extras, timeout_s=20),
        daemon=True,
    )
    pushing.start()
    while len(path.texts) < 2:
        path.work()
    pushing.join(20)
    pieces = [piece.logprobs for piece in path.extras[1]]
    assert len(pieces) > 1
    joined = [entry for piece in pieces for entry in piece.input]
    assert [(value, token) for value, token, _ in joined] == list(zip(values, ids, strict=True))
    assert [text for _, token, text in joined] == [TOKENIZER.decode([token]) for token in ids]
    positions = [entry for piece in pieces for entry in piece.input_top]
    assert [entry and [token for _, token, _ in entry] for entry in positions] == top_ids
    assert [entry for piece in pieces for entry in piece.output] == [(-1.0, 65, "A")]
    assert path.order.index("text 1") > max(i for i, e in enumerate(path.order) if e == "extras 1")
    assert path.failed == {}


def test_a_step_that_finds_no_room_leaves_nothing_of_its_extras_behind(paths: Any) -> None:
    """Pushed again it would bring each log probability twice."""
    path = paths(ring_bytes=1 << 12)
    path.register(1)
    count = 230  # one such step fits the ring, two do not
    extras = BatchExtras(output=LogprobColumn([[-1.0] * count], [[65] * count]))
    path.push([1], [[65]], extras)
    with pytest.raises(TimeoutError):
        path.push([1], [[66]], extras)
    path.work()
    path.push([1], [[66]], extras)
    path.work()
    assert path.texts == {1: "AB"}
    assert [len(piece.logprobs.output) for piece in path.extras[1]] == [count, count]


def test_one_position_that_never_fits_is_refused_by_the_port(paths: Any) -> None:
    """Before anything is sent: the engine can still end this one request with an error."""
    path = paths(ring_bytes=1 << 12)
    path.register(1)
    wide = BatchExtras(hidden_states=[[np.zeros(2000)]])
    with pytest.raises(ValueError, match="never fit"):
        path.push([1], [[65]], wide)
    path.work()
    assert path.order == []


def test_one_position_that_never_fits_the_reply_ring_ends_its_request_alone(paths: Any) -> None:
    """An answer without what was asked for would pass for a whole one; and nobody may wait for it."""
    path = paths(reply_bytes=1 << 12)
    path.register(1, 2)
    path.push([1, 2], [[65], [66]], BatchExtras(hidden_states=[[np.zeros(2000)], [[1.0]]]))
    path.push([1, 2], [[65], [66]], None)
    path.work()
    assert list(path.failed) == [1]
    assert "larger than the reply ring" in str(path.failed[1])
    assert path.aborts == [1]
    assert path.texts == {2: "BB"}
    assert [row.tolist() for row in path.extras[2][0].hidden_states] == [[1.0]]


def test_the_end_of_a_request_comes_with_its_extras(paths: Any) -> None:
    """The last token has a log probability like the others; what comes behind the end is dropped."""
    path = paths()
    path.register(1)
    extras = BatchExtras(output=LogprobColumn([[-1.0]], [[65]]))
    path.push([1], [[65]], extras, finish_codes=[FinishCode.LENGTH], finish_values=[1])
    path.push([1], [[66]], extras)
    path.work()
    assert path.order == ["extras 1", "text 1"]
    assert path.shards[0]._texts_wanted == set()
