"""The step in C by itself: its table of requests, its sets of stop strings, and rows that go other ways."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import shmring
from manager import messages
from manager.decode_step import OutputOptions
from manager.detokenize import DecoderKind, TableDecoder, choose, load_decoder
from manager.errors import UnavailableError, ValidationError
from manager.table_step import TableStep, _StopSets

TINY = Path(__file__).parents[1] / "data/detok/bytelevel_tiny.json"
TABLE = choose(Tokenizer.from_file(str(TINY))).table


def _options(**changes: Any) -> OutputOptions:
    plain: dict[str, Any] = {
        "prompt_tail": np.empty(0, np.int32),
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "no_stop_trim": False,
        "min_new_tokens": 0,
        "stops": (),
    }
    return OutputOptions(**plain | changes)


def _step(slots_max: int = 1 << 16) -> TableStep:
    assert TABLE is not None
    return TableStep(TableDecoder(TABLE, slots_max=slots_max, reason=""))


@pytest.fixture
def frames(ring_name: str) -> Any:
    """Make a batch record of rows (request, text), with code 1 (stop) for rows that end."""
    with shmring.create(ring_name, 1 << 20) as ring, ring.producer() as producer, ring.consumer() as consumer:

        def make(*rows: tuple[int, str], ends: tuple[int, ...] = ()) -> Any:
            ids = [list(text.encode()) for _, text in rows]
            assert messages.BATCH.push(
                producer,
                len(rows),
                np.array([request_id for request_id, _ in rows], np.uint64),
                np.array([len(item) for item in ids], np.uint32),
                np.array([token_id for item in ids for token_id in item], np.int32),
                np.array([int(request_id in ends) for request_id, _ in rows], np.uint8),
                None,
                None,
                None,
            )
            (record,) = consumer.drain(1)
            return record

        yield make


def _texts(outcome: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    for _, _, columns in outcome.replies:
        parts = messages.unpack_bytes(columns[1], columns[2])
        texts |= {i: part.decode() for i, part in zip(columns[0].tolist(), parts, strict=True)}
    return texts


def test_thousands_of_requests_come_and_go(frames: Any) -> None:
    """A request that the table loses hangs, and one that it keeps for ever fills it."""
    rng = random.Random(5)
    step = _step()
    live: dict[int, str] = {}
    for round_number in range(40):
        for _ in range(rng.randrange(300)):
            request_id = rng.choice([rng.randrange(1 << 64), len(live), round_number * 1000 + len(live)])
            step.open(request_id, _options())
            live[request_id] = ""
        for request_id in rng.sample(sorted(live), len(live) // 4):
            step.close(request_id)
            del live[request_id]
        assert len(step) == len(live)
        assert all(request_id in step for request_id in live)
        rows = [(request_id, str(request_id % 97)) for request_id in live]
        ends = tuple(request_id for request_id in live if request_id % 5 == 0)
        outcome = step.take(frames(*rows, ends=ends), None)
        assert _texts(outcome) == dict(rows)
        assert sorted(outcome.ended) == sorted(ends)
        for request_id in ends:
            assert request_id not in step
            del live[request_id]


def test_an_id_that_is_registered_again_starts_anew(frames: Any) -> None:
    """What the first one held back would begin the second one's answer."""
    step = _step()
    step.open(7, _options(stops=("END",)))
    assert _texts(step.take(frames((7, "xE")), None)) == {7: "x"}
    step.open(7, _options())
    assert len(step) == 1
    assert _texts(step.take(frames((7, "Nd")), None)) == {7: "Nd"}
    step.open(7, _options(stops=("a",)))
    assert step.take(frames((7, "a")), None).stopped == [7]
    assert len(step) == 0


def test_requests_with_regexes_share_frames_with_others(frames: Any) -> None:
    """One client's regex must not cost its neighbours their text, or itself its end."""
    step = _step()
    step.open(1, _options(stop_regexes=(r"\d\d",), no_stop_trim=True))
    step.open(2, _options(stops=("!",)))
    step.open(3, _options())
    assert len(step) == 3
    outcome = step.take(frames((1, "a 1"), (2, "b"), (3, "c"), (9, "d")), None)
    assert _texts(outcome) == {1: "a 1", 2: "b", 3: "c"}
    assert (outcome.rows, outcome.tokens, outcome.unknown) == (3, 5, [9])
    outcome = step.take(frames((1, "2x"), (2, "!")), None)
    assert _texts(outcome) == {1: "2", 2: ""}
    assert sorted(outcome.stopped) == sorted(outcome.ended) == [1, 2]
    assert outcome.unknown == []
    assert 1 not in step
    assert len(step) == 1


def test_equal_stop_strings_are_compiled_once() -> None:
    """Every request of a client asks for the same ones."""
    sets = _StopSets()
    assert sets.of(("a", "b")) is sets.of(("a", "b"))
    assert sets.of(("b", "a")) is not sets.of(("a", "b"))


def test_compiled_sets_have_a_bound_and_give_their_room_back() -> None:
    """Long stop strings, other ones in each request, would take all memory there is."""
    sets = _StopSets(bytes_max=1 << 20)
    held: list[Any] = []
    with pytest.raises(UnavailableError):
        held.extend(sets.of((f"{number:04}" * 256,)) for number in range(1000))
    assert 10 < len(held) < 100
    held.clear()
    sets._kept.clear()
    gc.collect()
    assert sets._all_length == 0
    sets.of(("again",))


def test_a_set_in_use_outlives_those_that_are_kept(frames: Any) -> None:
    """C would read stop strings that are no more."""
    step = _step()
    step.open(1, _options(stops=("END",)))
    step._sets._kept.clear()
    gc.collect()
    assert _texts(step.take(frames((1, "abENDc")), None)) == {1: "ab"}


@pytest.mark.parametrize("stops", [("",), ("a", ""), ("\ud800",)])
def test_stop_strings_that_cannot_be_are_refused(stops: tuple[str, ...]) -> None:
    """An empty one would end every answer before its first word."""
    step = _step()
    with pytest.raises(ValidationError):
        step.open(1, _options(stops=stops))
    assert 1 not in step


def test_a_frame_of_nothing_is_answered_by_nothing(frames: Any) -> None:
    """Engines that push an empty step must not cost the reader a frame."""
    assert _step().take(frames(), None).replies == []


@pytest.mark.parametrize("kind", list(DecoderKind))
def test_texts_beside_log_probabilities_come_in_one_call(kind: DecoderKind) -> None:
    """Each id for itself, as decode_one says it, broken and unknown ones included."""
    decoder = load_decoder(Tokenizer.from_file(str(TINY)), kind=kind)
    ids = [*range(decoder.vocab_size), -1, decoder.vocab_size, 2**31 - 1, 65]
    text, lengths = decoder.decode_each(np.array(ids, np.int32))
    assert [part.decode() for part in messages.unpack_bytes(lengths, text)] == [
        decoder.decode_one(token_id) for token_id in ids
    ]
    assert decoder.decode_each(np.empty(0, np.int32))[1].tolist() == []
    with pytest.raises(TypeError):
        decoder.decode_each(np.array([1, 2], np.int64))
