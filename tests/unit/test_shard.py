"""One detok shard between real rings; the test plays the manager and the scheduler."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

import shmring
from manager import messages
from manager.detokenize import DecoderKind, load_decoder
from manager.errors import DetokenizeError
from manager.finish import FinishReason, encode
from manager.inbox import Inbox
from manager.shard import DetokShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from manager.detokenize import BatchDecoder
    from manager.errors import ManagerError

#: Every byte is an id of its own; 271 to 273 are special.
TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[1] / "data/detok/bytelevel_tiny.json"))
EOS = 272


@dataclass
class Answers:
    """What the manager was told, request by request."""

    texts: dict[int, str] = field(default_factory=dict)
    pieces: dict[int, list[str]] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, Any] = field(default_factory=dict)
    aborts: list[int] = field(default_factory=list)
    results: list[tuple[int, bytes]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    def on_text(
        self, request_id: int, text: str, token_ids: list[int], count: int, reason: FinishReason | None
    ) -> None:
        if request_id in self.ends:
            return  # as the manager does: what ended has no ear any more
        self.texts[request_id] = self.texts.get(request_id, "") + text
        self.pieces.setdefault(request_id, []).append(text)
        self.ids.setdefault(request_id, []).extend(token_ids)
        self.counts[request_id] = self.counts.get(request_id, 0) + count
        if reason is not None:
            self.ends[request_id] = reason.to_mapping()
        self.order.append(f"text {request_id}")

    def on_fail(self, request_id: int, error: ManagerError) -> None:
        self.ends.setdefault(request_id, error)
        self.order.append(f"fail {request_id}")

    def on_abort_asked(self, request_id: int) -> None:
        self.aborts.append(request_id)
        self.order.append(f"abort {request_id}")

    def on_result(self, control_id: int, payload: bytes) -> None:
        self.results.append((control_id, payload))
        self.order.append(f"result {control_id}")


class Bench:
    """A shard, and both of its neighbours."""

    def __init__(
        self, name: str, *, reply_bytes: int, egress_bytes: int, decoder: BatchDecoder | None
    ) -> None:
        self._rings = contextlib.ExitStack()
        egress, register, reply = (
            self._rings.enter_context(shmring.create(f"{name}.{ring}", capacity))
            for ring, capacity in (("e", egress_bytes), ("g", 1 << 16), ("r", reply_bytes))
        )
        self.scheduler = self._rings.enter_context(egress.producer(takeover=True))
        self.manager = self._rings.enter_context(register.producer(takeover=True))
        self._reply = self._rings.enter_context(reply.consumer(takeover=True, poison=True))
        self._names = (egress, register, reply)
        self.answers = Answers()
        self.inbox = Inbox(self._reply, self.answers)
        self.decoder = decoder
        self.attach()

    def attach(self) -> None:
        """Put a new shard into the place, as a restarted worker does."""
        egress, register, reply = self._names
        self._ends = (
            egress.consumer(takeover=True, poison=True),
            register.consumer(poison=True),
            reply.producer(takeover=True),
        )
        self.shard = DetokShard(
            egress=self._ends[0], register=self._ends[1], reply=self._ends[2], decoder=self.decoder
        )

    def die(self) -> None:
        """Drop the shard and its ends without closing them, as SIGKILL does."""
        for end in self._ends:
            end._attachment.mapping.handle.close()
        del self.shard, self._ends

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            for end in self._ends:
                end.close()
        self._rings.close()

    def register(
        self,
        *request_ids: int,
        stop: tuple[str, ...] = (),
        no_stop_trim: bool = False,
        min_new_tokens: int = 0,
        skip_special_tokens: bool = True,
        logprob_texts: bool = False,
        prompt: tuple[int, ...] = (),
    ) -> None:
        count = len(request_ids)
        stops = [msgspec.msgpack.encode(stop) if stop else b""] * count
        assert messages.REGISTER.push(
            self.manager,
            count,
            np.array(request_ids, np.uint64),
            np.array(
                [(min_new_tokens, skip_special_tokens, True, no_stop_trim, logprob_texts)] * count,
                messages.OUTPUT_DTYPE,
            ),
            np.full(count, len(prompt), np.uint32),
            np.array(prompt * count, np.int32),
            *messages.pack_bytes(stops),
        )

    def deregister(self, *request_ids: int) -> None:
        assert messages.DEREGISTER.push(self.manager, len(request_ids), np.array(request_ids, np.uint64))

    def push(self, *rows: tuple[int, Any, FinishReason | None], flags: int = 0) -> None:
        """One step of the scheduler: (request, ids or text, finish) each."""
        tokens = [list(ids.encode()) if isinstance(ids, str) else list(ids) for _, ids, _ in rows]
        ends = [encode(reason) for _, _, reason in rows]
        details: tuple[Any, Any] = (None, None)
        if any(end[2] for end in ends):
            details = messages.pack_bytes([end[2] for end in ends])
        assert messages.BATCH.push(
            self.scheduler,
            len(rows),
            np.array([request_id for request_id, _, _ in rows], np.uint64),
            np.array([len(ids) for ids in tokens], np.uint32),
            np.array([token for ids in tokens for token in ids], np.int32),
            np.array([end[0] for end in ends], np.uint8),
            np.array([end[1] for end in ends], np.int64),
            *details,
            flags=flags,
        )

    def error(self, request_id: int, message: bytes) -> None:
        assert messages.ERROR.push(
            self.scheduler, 1, np.array([request_id], np.uint64), *messages.pack_bytes([message])
        )

    def work(self) -> Answers:
        """Let the shard and the manager work until there is nothing to do."""
        while True:
            done = self.shard.do_work(8)
            done += self.inbox.do_work(8)
            if not done and not self.shard.unsent_length:
                return self.answers


@pytest.fixture
def benches(ring_name: str) -> Iterator[Any]:
    made: list[Bench] = []

    def make(*, reply_bytes: int = 1 << 16, egress_bytes: int = 1 << 16, decoder: Any = ...) -> Bench:
        bench = Bench(
            f"{ring_name}.{len(made)}",
            reply_bytes=reply_bytes,
            egress_bytes=egress_bytes,
            decoder=load_decoder(TOKENIZER) if decoder is ... else decoder,
        )
        made.append(bench)
        return bench

    yield make
    for bench in made:
        bench.close()


@pytest.fixture
def bench(benches: Any) -> Bench:
    return benches()


LENGTH = FinishReason.length


def test_text_of_many_requests_in_one_step(bench: Bench) -> None:
    """Rows of a batch belong to their requests, whatever their order and size."""
    bench.register(1, 2, 3)
    bench.push((1, "one", None), (2, "", None), (3, "drei", None))
    bench.push((3, "!", LENGTH(5)), (1, "", LENGTH(3)), (2, "zwei", LENGTH(4)))
    answers = bench.work()
    assert answers.texts == {1: "one", 2: "zwei", 3: "drei!"}
    assert answers.ids == {1: list(b"one"), 2: list(b"zwei"), 3: list(b"drei!")}
    assert answers.counts == {1: 3, 2: 4, 3: 5}
    assert answers.ends == {i: {"type": "length", "length": n} for i, n in ((1, 3), (2, 4), (3, 5))}
    assert answers.aborts == []
    assert bench.shard.open_count == 0


def test_halves_of_characters_of_two_requests_do_not_mix(bench: Bench) -> None:
    """Decoder state belongs to a request: mixed up, both texts are rubbish."""
    rows = [(1, [228]), (2, [240]), (1, [184]), (2, [159]), (1, [150, 97]), (2, [152, 128])]
    one_by_one = [[row] for row in rows]
    together = [[(request_id + 2, ids) for request_id, ids in rows]]
    for batches in (one_by_one, together):
        ids = {request_id for batch in batches for request_id, _ in batch}
        bench.register(*ids)
        for batch in batches:
            bench.push(*((request_id, tokens, None) for request_id, tokens in batch))
        bench.push(*((request_id, [], LENGTH(1)) for request_id in ids))
    answers = bench.work()
    assert answers.texts == {1: "世a", 2: "😀", 3: "世a", 4: "😀"}


def test_what_is_held_comes_out_at_the_end(bench: Bench) -> None:
    """The last character of an answer cut by its limit must not vanish."""
    bench.register(1)
    bench.register(2, stop=("END",))
    bench.push((1, [97, 228, 184], LENGTH(3)), (2, "x EN", LENGTH(4)))
    answers = bench.work()
    assert answers.texts == {1: "a\N{REPLACEMENT CHARACTER}", 2: "x EN"}


def test_a_registration_that_comes_late_is_seen_before_its_chunk(bench: Bench) -> None:
    """Both rings are filled before the shard looks: the chunk is no stranger's."""
    for request_id in range(1, 40):
        bench.register(request_id)
        bench.push((request_id, "a", LENGTH(1)))
    answers = bench.work()
    assert len(answers.texts) == 39
    assert answers.aborts == []


def test_unknown_requests_are_asked_to_stop_once_and_cost_one_line(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Output for nobody: hundreds of thousands of log lines, and an engine that works for nobody."""
    bench.register(1)
    with caplog.at_level(logging.WARNING):
        for _ in range(150):
            bench.push(*[(99, "x", None)] * 100)
            bench.work()
        bench.push((99, "y", LENGTH(1)), (1, "live", LENGTH(4)))
        answers = bench.work()
    assert answers.texts == {1: "live"}
    assert answers.aborts == [99]
    assert bench.shard.counters.unknown_rows == 15001
    assert len(caplog.records) == 1


def test_ids_outside_of_the_vocabulary_are_no_text_and_one_line(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that pads with -1 would spoil its clients' text, or nobody would ever know of it."""
    bench.register(1)
    with caplog.at_level(logging.WARNING):
        bench.push((1, [-1, 2**31 - 1], None))
        bench.push((1, "fine", LENGTH(6)))
        answers = bench.work()
    assert answers.texts == {1: "fine"}
    assert [record.getMessage() for record in caplog.records] == [
        "output held ids outside of the vocabulary: count=2"
    ]


def test_late_chunks_of_an_ended_request_are_no_news(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Every abort crosses some chunks on the way: that is ordinary and not worth a word."""
    bench.register(1, 2)
    bench.push((1, "a", LENGTH(1)))
    bench.deregister(2)
    bench.push((1, "late", None), (2, "late", LENGTH(1)))
    answers = bench.work()
    assert answers.texts == {1: "a"}
    assert answers.aborts == []
    assert bench.shard.counters.unknown_rows == 2
    assert not caplog.records


def test_a_double_deregistration_is_no_news(bench: Bench) -> None:
    """Aborts and their echoes cross: the second must find nothing to do."""
    bench.register(1)
    bench.push((1, "a", None))
    bench.work()
    bench.deregister(1, 1)
    bench.deregister(1, 77)
    bench.work()
    assert bench.shard.open_count == 0


@pytest.mark.parametrize("no_stop_trim", [False, True])
def test_a_matched_stop_token_is_trimmed_but_counted(bench: Bench, no_stop_trim: bool) -> None:
    """An end-of-text token is paid for, and is no part of the answer."""
    bench.register(1, no_stop_trim=no_stop_trim)
    bench.register(2, no_stop_trim=no_stop_trim)
    bench.push((1, [97, 98, 99], FinishReason.stop(99)), (2, [100, 101], None))
    answers = bench.work()
    assert answers.ids == {1: [97, 98, 99] if no_stop_trim else [97, 98], 2: [100, 101]}
    assert answers.texts == {1: "abc" if no_stop_trim else "ab", 2: "de"}
    assert answers.counts == {1: 3, 2: 2}
    assert answers.ends[1] == {"type": "stop", "matched": 99}


def test_stop_tokens_that_are_not_trimmed(bench: Bench) -> None:
    """Id 0 never trims, lists never trim, and a matched id that is not the last one is no reason to."""
    bench.register(1, 2, 3, 4)
    bench.push(
        (1, [97, 98, 0], FinishReason.stop(0)),
        (2, [97, 98, 99], FinishReason.stop([99])),
        (3, [97, 98, 99], FinishReason.stop(98)),
        (4, [], FinishReason.stop(99)),
    )
    answers = bench.work()
    assert answers.ids == {1: [97, 98, 0], 2: [97, 98, 99], 3: [97, 98, 99], 4: []}


def test_a_special_stop_token_is_shown_only_if_both_are_asked_for(bench: Bench) -> None:
    """skip_special_tokens and no_stop_trim are two choices, and both are the client's."""
    for request_id, (skip, keep) in enumerate(((s, k) for s in (True, False) for k in (True, False)), 1):
        bench.register(request_id, skip_special_tokens=skip, no_stop_trim=keep)
        bench.push((request_id, [97, EOS], FinishReason.stop(EOS)))
    answers = bench.work()
    assert answers.texts == {1: "a", 2: "a", 3: "a<|eos|>", 4: "a"}


STOPS = {
    "split_with_empty_delta": (("END",), ["答 ", "E", "", "N", "Dignored"], "END", "答 ", "答 END"),
    "release_failed_prefix": (("END",), ["hi E", "X ", "EN", "Drest"], "END", "hi EX ", "hi EX END"),
    "unicode_stop": (("終わり",), ["先 ", "終", "わ", "り後"], "終わり", "先 ", "先 終わり"),
    "length_flushes_prefix": (("END",), ["x E", "N", ""], None, "x EN", "x EN"),
    "special_token_text": (("<|end|>",), ["\n<|", "end", "|>tail"], "<|end|>", "\n", "\n<|end|>"),
}


@pytest.mark.parametrize("is_found_here", [True, False])
@pytest.mark.parametrize("no_stop_trim", [False, True])
@pytest.mark.parametrize("case", STOPS)
def test_stop_strings_over_several_chunks(
    bench: Bench, case: str, no_stop_trim: bool, is_found_here: bool
) -> None:
    """A stop string cut by chunks must neither leak its beginning nor take innocent text with it."""
    stops, chunks, matched, trimmed, kept = STOPS[case]
    expected = kept if no_stop_trim else trimmed
    bench.register(1, stop=stops, no_stop_trim=no_stop_trim)
    for position, chunk in enumerate(chunks):
        reason = None
        if position == len(chunks) - 1 and not (is_found_here and matched):
            reason = LENGTH(2) if matched is None else FinishReason.stop(matched)
        bench.push((1, chunk, reason))
        answers = bench.work()
        assert expected.startswith(answers.texts[1])
    assert answers.texts[1] == expected
    if matched is None:
        assert answers.ends[1] == {"type": "length", "length": 2}
        assert answers.aborts == []
    else:
        assert answers.ends[1] == {"type": "stop", "matched": matched}
        # who found it here must tell the scheduler; who was told by it need not
        assert answers.aborts == ([1] if is_found_here else [])
    assert bench.shard.open_count == 0


def test_ids_are_never_behind_the_text_and_complete_at_the_end(bench: Bench) -> None:
    """Who splits an answer by its ids must find in them whatever was shown until then."""
    bench.register(1, stop=("zz",))
    for chunk in ("<t>ab", "z", "y", "z"):
        bench.push((1, chunk, None))
        answers = bench.work()
        assert TOKENIZER.decode(answers.ids[1]).startswith(answers.texts[1])
    assert answers.texts[1] == "<t>abzy"
    bench.push((1, "", LENGTH(8)))
    answers = bench.work()
    assert TOKENIZER.decode(answers.ids[1]) == answers.texts[1] == "<t>abzyz"


def test_an_abort_of_the_scheduler_flushes_what_was_held(bench: Bench) -> None:
    """What the client paid for until then is the client's."""
    bench.register(1, stop=("END",))
    bench.push((1, "x E", None))
    bench.push((1, "N", FinishReason.abort("cancelled", status_code=400)))
    answers = bench.work()
    assert answers.texts[1] == "x EN"
    assert answers.ends[1]["status_code"] == 400


def test_the_stop_that_is_found_asks_for_one_abort(bench: Bench) -> None:
    """The scheduler goes on until it is told; told twice it might end a stranger, one day."""
    bench.register(1, stop=("b", "x"))
    bench.push((1, "ab", None), (1, "x", None), (1, "bxb", None))
    bench.push((1, "bx", None))
    bench.push((1, "", LENGTH(9)))
    answers = bench.work()
    assert answers.texts[1] == "a"
    assert answers.aborts == [1]
    assert answers.ends[1] == {"type": "stop", "matched": "b"}


def test_the_text_is_before_the_stop_that_comes_with_the_limit(bench: Bench) -> None:
    """Where the limit and a stop string fall together, the stop string must still not show."""
    bench.register(1, stop=("END",))
    bench.push((1, "abENDcd", LENGTH(7)))
    answers = bench.work()
    assert answers.texts[1] == "ab"
    assert answers.ends[1] == {"type": "stop", "matched": "END"}
    assert answers.aborts == []


def test_stop_strings_wait_for_min_new_tokens(bench: Bench) -> None:
    """A client that asked for at least n tokens gets them, stop string or not."""
    bench.register(1, stop=("b",), min_new_tokens=4)
    for character in "abab":
        bench.push((1, character, None))
    answers = bench.work()
    assert answers.texts[1] == "aba"
    assert answers.ends[1] == {"type": "stop", "matched": "b"}


def test_output_goes_on_where_the_prompt_ended_unless_it_is_fresh(benches: Any) -> None:
    """A character that the prompt began is completed by the output; a fresh text has no such past."""
    for flags, text in ((0, "世a"), (int(messages.BatchFlag.FRESH_TEXT), "\N{REPLACEMENT CHARACTER}a")):
        bench = benches()
        bench.register(1, prompt=(228, 184))
        bench.push((1, [150, 97], LENGTH(2)), flags=flags)
        assert bench.work().texts[1] == text


def test_ids_that_no_tokenizer_has_add_nothing(bench: Bench) -> None:
    """An engine's placeholder ids must not end anybody's request."""
    bench.register(1, 2)
    bench.push((1, [97, -1, 2**31 - 1, 278, 98], LENGTH(5)), (2, "x", LENGTH(1)))
    answers = bench.work()
    assert answers.texts == {1: "ab", 2: "x"}
    assert bench.shard.counters.unknown_ids == 3


def test_an_error_ends_its_request_alone(bench: Bench) -> None:
    """A bad field of one client is that client's 400, and nobody else's."""
    bench.register(1, 2)
    bench.push((1, "a", None), (2, "b", None))
    bench.error(1, "bad field: ☠".encode())
    bench.error(77, b"nobody")
    bench.push((1, "late", None), (2, "c", LENGTH(2)))
    answers = bench.work()
    assert answers.texts == {1: "a", 2: "bc"}
    assert answers.ends[1].status == 400
    assert str(answers.ends[1]) == "bad field: ☠"
    assert answers.aborts == []
    assert 77 not in answers.ends


def test_an_error_that_is_no_utf8_still_ends_its_request(bench: Bench) -> None:
    """A request must not hang because its error message is damaged."""
    bench.register(1)
    bench.error(1, b"bad \xff")
    assert str(bench.work().ends[1]) == "bad \N{REPLACEMENT CHARACTER}"


def test_results_of_control_requests_pass_through(bench: Bench) -> None:
    """An answer is bytes, and comes as it was given."""
    assert messages.RESULT.push(
        bench.scheduler, 2, np.array([5, 6], np.uint64), *messages.pack_bytes([b"\x00\xff", b""])
    )
    assert bench.work().results == [(5, b"\x00\xff"), (6, b"")]


def frame_of(bench: Bench, *rows: tuple[int, Any, FinishReason | None]) -> bytearray:
    """The bytes of a batch frame, to be spoilt."""
    ring = shmring.create(f"{bench.scheduler.name}.copy", 1 << 16)
    with ring, ring.producer() as producer, ring.consumer() as consumer:
        there, bench.scheduler = bench.scheduler, producer
        bench.push(*rows)
        bench.scheduler = there
        record = consumer.try_pop()
    assert record is not None
    return bytearray(record)


def spoil(frame: bytearray, how: str) -> bytes:
    """Damage a frame in a way that leaves its ids readable."""
    directory = 16
    if how == "counts larger than the ids":
        offset = int.from_bytes(frame[directory + 8 : directory + 12], "little")
        frame[offset : offset + 4] = (10).to_bytes(4, "little")
    elif how == "another schema":
        frame[8:16] = b"\xee" * 8
    elif how == "unknown finish code":
        offset = int.from_bytes(frame[directory + 24 : directory + 28], "little")
        frame[offset] = 77
    elif how == "column past the end":
        frame[directory + 20 : directory + 24] = (1 << 20).to_bytes(4, "little")
    elif how == "cut short":
        del frame[-8:]
    return bytes(frame)


@pytest.mark.parametrize(
    "how",
    [
        "counts larger than the ids",
        "another schema",
        "unknown finish code",
        "column past the end",
        "cut short",
    ],
)
def test_a_damaged_frame_is_rejected_whole_and_fails_every_request_that_it_names(
    bench: Bench, how: str
) -> None:
    """Half a frame delivered is wrong text; a frame dropped in silence is requests that hang."""
    bench.register(1, 2, 3)
    bench.push((1, "a", None), (2, "b", None), (3, "c", None))
    frame = frame_of(bench, (1, "x", LENGTH(2)), (2, "y", None), (99, "z", None))
    assert bench.scheduler.try_push(spoil(frame, how), messages.EgressType.BATCH)
    bench.push((3, "d", LENGTH(2)), (2, "late", None))
    answers = bench.work()
    assert answers.texts == {1: "a", 2: "b", 3: "cd"}
    for request_id in (1, 2):
        assert answers.ends[request_id].status == 500
        assert "malformed scheduler output frame" in str(answers.ends[request_id])
    assert sorted(answers.aborts) == [1, 2]
    # first the abort, then the end: the other way round the scheduler might be told too late
    assert answers.order.index("abort 1") < answers.order.index("fail 1")
    assert bench.shard.counters.rejected_frames == 1
    assert bench.shard.open_count == 0


def test_records_that_name_nobody_are_skipped(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The loop lives; the line in the log is the one that is worth waking somebody up for."""
    bench.register(1)
    for record, kind in (
        (b"", 2),
        (b"\x01", 2),
        (bytes(64), 2),
        (b"\xff" * 100, 2),
        (b"junk", 1),
        (b"junk", 3),
    ):
        assert bench.scheduler.try_push(record, kind)
    for kind in (0, 4, 0xEE):
        assert bench.scheduler.try_push(b"what is this", kind)
    bench.push()
    bench.push((1, "a", LENGTH(1)))
    with caplog.at_level(logging.WARNING):
        answers = bench.work()
    assert answers.texts == {1: "a"}
    assert set(answers.ends) == {1}
    assert bench.shard.counters.rejected_frames == 9
    assert len(caplog.records) == 9


@pytest.mark.parametrize("damage", ["type", "schema", "stops", "regexes", "empty"])
def test_a_damaged_registration_does_not_end_the_shard(bench: Bench, damage: str) -> None:
    """A worker that dies of a record meets it again after its restart, and dies again."""
    bench.register(1)
    if damage == "type":
        assert bench.manager.try_push(b"what is this", 0xEE)
    elif damage == "empty":
        assert bench.manager.try_push(b"", messages.RegisterType.REGISTER)
    elif damage == "schema":
        assert bench.manager.try_push(bytes(frame_of(bench, (2, "", None))), messages.RegisterType.REGISTER)
    else:
        assert messages.REGISTER.push(
            bench.manager,
            1,
            np.array([2], np.uint64),
            np.zeros(1, messages.OUTPUT_DTYPE),
            np.zeros(1, np.uint32),
            np.empty(0, np.int32),
            *messages.pack_bytes([b"\xc1" if damage == "stops" else messages.pack_stops([], ["("])]),
        )
    bench.register(3)
    bench.push((1, "a", LENGTH(1)), (3, "b", LENGTH(1)))
    answers = bench.work()
    assert answers.texts == {1: "a", 3: "b"}
    if damage in ("schema", "stops", "regexes"):
        assert answers.ends[2].status == 500
        assert answers.aborts == [2]
    assert bench.shard.open_count == 0


def test_a_registration_of_nobody_does_not_end_the_shard(bench: Bench) -> None:
    """It once raised what nobody catches, and a worker that dies of a record meets it again."""
    bench.register()
    bench.register(1)
    bench.push((1, "a", LENGTH(1)))
    assert bench.work().texts == {1: "a"}
    assert bench.shard.counters.rejected_frames == 0


class FailingDecoder:
    """A decoder that fails on one id."""

    def __init__(self, decoder: BatchDecoder, bad_id: int) -> None:
        self._decoder = decoder
        self._bad_id = bad_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def decode(self, slots: Any, counts: Any, token_ids: Any) -> Any:
        if self._bad_id in token_ids:
            raise DetokenizeError("the tokenizers library failed")
        return self._decoder.decode(slots, counts, token_ids)


def test_a_decoder_that_fails_fails_the_batch_and_not_the_shard(benches: Any) -> None:
    """The worker thread that dies of one bad step: all hang, and health says ok."""
    bench = benches(decoder=FailingDecoder(load_decoder(TOKENIZER), 200))
    bench.register(1, 2, 3)
    bench.push((1, [97, 200], None), (2, "b", None))
    bench.push((3, "c", LENGTH(1)))
    answers = bench.work()
    assert answers.texts == {3: "c"}
    assert answers.ends[1].status == answers.ends[2].status == 500
    assert sorted(answers.aborts) == [1, 2]
    assert bench.shard.open_count == 0


def test_more_texts_than_the_decoder_has_room_for_fail_those(benches: Any) -> None:
    """One request too many must not take those with it that had their place."""
    bench = benches(decoder=load_decoder(TOKENIZER, slots_max=2))
    bench.register(1, 2, 3)
    bench.push((1, "a", None), (2, "b", None))
    bench.push((3, "c", None), (1, "d", LENGTH(2)), (2, "e", None))
    bench.push((2, "f", LENGTH(3)))
    answers = bench.work()
    assert answers.texts == {1: "ad", 2: "bef"}
    assert answers.ends[3].status == 503
    assert answers.aborts == [3]


def test_slots_of_the_decoder_are_given_back(benches: Any) -> None:
    """A slot lost a request is a worker that refuses everything after a day."""
    bench = benches(decoder=load_decoder(TOKENIZER, slots_max=2))
    for request_id in range(1, 60, 3):
        bench.register(request_id, request_id + 1, request_id + 2)
        bench.push((request_id, "a", None), (request_id + 1, "b", LENGTH(1)))
        bench.deregister(request_id)
        bench.work()
        bench.push((request_id + 2, "a", None))
        bench.error(request_id + 2, b"no")
        bench.work()
    assert bench.shard.open_count == 0
    assert len(bench.answers.ends) == 40


def test_without_a_decoder_ids_pass_through(benches: Any) -> None:
    """A deployment without a tokenizer hands ids to clients that have their own."""
    bench = benches(decoder=None)
    bench.register(1, 2)
    bench.push((1, [5, 6, 7], FinishReason.stop(7)), (2, [-1, 2**31 - 1], LENGTH(2)))
    answers = bench.work()
    assert answers.texts == {1: "", 2: ""}
    assert answers.ids == {1: [5, 6], 2: [-1, 2**31 - 1]}


def test_a_full_reply_ring_stops_the_shard_and_loses_nothing(benches: Any) -> None:
    """A slow manager must be felt by the scheduler, not by the text."""
    bench = benches(reply_bytes=4096, egress_bytes=1 << 17)
    bench.register(1, 2)
    for step in range(200):
        bench.push((1, f"{step:03}", None), (2, f"<{step:03}>", None))
    bench.push((1, "", LENGTH(600)), (2, "", LENGTH(1000)))
    taken = 0
    while True:
        done = bench.shard.do_work(1000)
        if not done:
            break
        taken += done
    assert bench.shard.unsent_length > 0
    assert taken < 100, "the shard went on without room for its replies"
    answers = bench.work()
    assert answers.texts[1] == "".join(f"{step:03}" for step in range(200))
    assert answers.texts[2] == "".join(f"<{step:03}>" for step in range(200))
    assert answers.counts == {1: 600, 2: 1000}
    assert set(answers.ends) == {1, 2}


def test_ids_that_wait_for_room_are_not_overwritten_by_the_scheduler(benches: Any) -> None:
    """A reply that waits must not point into a ring that goes on: it would carry another step's ids."""
    bench = benches(reply_bytes=4096, egress_bytes=4096)
    bench.register(1, 2)
    ids = [97 + i % 26 for i in range(400)]
    bench.push((1, ids, None))
    bench.shard.do_work(1)
    bench.push((2, ids, None))
    bench.shard.do_work(1)  # its reply does not fit, and the ring's bytes are free again
    assert bench.shard.unsent_length > 0
    bench.push((2, [35] * 500, None))
    answers = bench.work()
    assert answers.ids[1] == ids
    assert answers.ids[2] == ids + [35] * 500
    assert answers.texts[2] == bytes(answers.ids[2]).decode()


def test_a_reply_larger_than_the_ring_goes_in_parts(benches: Any) -> None:
    """A step of many requests is as good as one of few, whatever the sizes of the rings."""
    bench = benches(reply_bytes=4096)
    ids = range(1, 301)
    bench.register(*ids)
    bench.push(*((i, f"text {i}", LENGTH(i) if i % 3 else None) for i in ids))
    bench.push(*((i, "", FinishReason.from_mapping({"type": "odd", "n": i})) for i in ids if i % 3 == 0))
    answers = bench.work()
    assert answers.texts == {i: f"text {i}" for i in ids}
    assert answers.ends == {
        i: {"type": "length", "length": i} if i % 3 else {"type": "odd", "n": i} for i in ids
    }


def test_one_text_larger_than_the_ring_goes_in_parts(benches: Any) -> None:
    """One long step of one request must not end the worker, and everybody's requests with it."""
    bench = benches(reply_bytes=4096, egress_bytes=1 << 18)
    text = "世界 and so on, 😀 " * 400
    bench.register(1, 2)
    bench.register(3, stop=("NEVER",))
    bench.push((1, text, None), (2, "small", LENGTH(5)), (3, text, LENGTH(9)))
    bench.push((1, "end", LENGTH(3)))
    answers = bench.work()
    assert answers.texts == {1: text + "end", 2: "small", 3: text}
    assert bytes(answers.ids[1]).decode() == text + "end"
    assert answers.counts[1] == len((text + "end").encode())
    assert answers.ends[3] == {"type": "length", "length": 9}


def test_an_answer_that_can_never_fit_ends_its_request_alone(benches: Any) -> None:
    """What cannot be cut is one request's error, not the end of the worker."""
    bench = benches(reply_bytes=4096)
    bench.register(1, 2)
    huge = FinishReason.abort("x" * 9000, status_code=500)
    bench.push((1, "a", huge), (2, "b", LENGTH(1)))
    bench.register(3)
    bench.error(3, b"y" * 9000)
    answers = bench.work()
    assert answers.texts[2] == "b"
    assert answers.ends[1].status == 500
    assert answers.ends[3].status == 400
    assert str(answers.ends[3]).startswith("yyyy")
    assert bench.shard.open_count == 0


def test_what_a_dead_shard_had_not_released_comes_again_to_its_successor(bench: Bench) -> None:
    """Nobody knows the requests any more, so the scheduler is told to stop them, and new ones work."""
    bench.register(1)
    bench.push((1, "a", None))
    bench.work()
    bench.push((1, "b", None))
    bench.register(2)
    bench.die()
    bench.attach()
    bench.register(3)
    bench.push((2, "two", LENGTH(3)), (3, "three", None), (1, "c", None))
    bench.push((3, "!", LENGTH(6)))
    answers = bench.work()
    assert answers.texts == {1: "a", 2: "two", 3: "three!"}
    assert answers.aborts == [1]
    assert bench.shard.open_count == 0


def test_a_shard_that_dies_between_reply_and_release_does_not_reply_twice(bench: Bench) -> None:
    """The successor gets the record again; its words were said, so they are not said again."""
    bench.register(1)
    bench.push((1, "a", None))
    bench.work()
    bench.push((1, "b", None))
    released = bench._ends[0]
    record = released.drain(1)
    bench.shard._take(record[0])
    bench.shard._send_unsent()
    del record, released
    bench.die()
    bench.attach()
    answers = bench.work()
    assert answers.texts == {1: "ab"}
    assert answers.aborts == [1]


def test_the_end_of_the_manager_is_the_end_of_the_shard(bench: Bench) -> None:
    """A worker that outlives its manager holds memory and names that nobody will ever want."""
    bench.register(1)
    bench.manager.close()
    with pytest.raises(shmring.EndOfRing):
        bench.work()


def test_work_is_bounded_by_its_limit(bench: Bench) -> None:
    """A stage that works without end cannot look at anything else meanwhile."""
    bench.register(1)
    bench.shard.do_work(1)
    for _ in range(10):
        bench.push((1, "a", None))
    assert bench.shard.do_work(3) == 3
    assert bench.shard.do_work(100) == 7
    assert bench.shard.do_work(100) == 0


def decode(bench: Bench, *rows: tuple[int, list[int]]) -> None:
    """Ask for whole texts, as the manager does."""
    assert messages.DECODE.push(
        bench.manager,
        len(rows),
        np.array([request_id for request_id, _ in rows], np.uint64),
        np.array([len(ids) for _, ids in rows], np.uint32),
        np.array([token for _, ids in rows for token in ids], np.int32),
        np.ones(len(rows), np.uint8),
        None,
        None,
        None,
    )


@pytest.mark.parametrize("library", [False, True])
def test_ids_are_decoded_once_and_their_registration_is_consumed(benches: Any, library: bool) -> None:
    """Whoever asks for a text gets the whole of it, with the last character cut short shown as such."""
    kind = DecoderKind.LIBRARY if library else None
    bench = benches(decoder=load_decoder(TOKENIZER, kind=kind))
    bench.register(1)
    bench.register(2, skip_special_tokens=False)
    decode(bench, (1, [104, 105, EOS, 228, 184]))
    decode(bench, (2, [104, EOS]))
    answers = bench.work()
    shown = TOKENIZER.decode([104, EOS], skip_special_tokens=False)
    assert answers.texts == {1: "hi\N{REPLACEMENT CHARACTER}", 2: shown}
    assert answers.ends == {1: {"type": "stop"}, 2: {"type": "stop"}}
    assert answers.aborts == []
    assert bench.shard.open_count == 0
    assert (bench.shard.counters.decodes, bench.shard.counters.unknown_decodes) == (2, 0)
    assert bench.shard.counters.batches == 0


def test_ids_that_nobody_registered_are_dropped_and_counted(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for the answer, and the scheduler, which knows nothing of it, is told nothing."""
    bench.register(1)
    decode(bench, (1, [97]), (2, [98]))
    decode(bench, (1, [99]))  # consumed by the first
    with caplog.at_level(logging.WARNING):
        answers = bench.work()
    assert answers.texts == {1: "a"}
    assert answers.aborts == []
    assert bench.shard.counters.unknown_decodes == 2
    assert len(caplog.records) == 2


def test_ids_for_a_shard_without_a_tokenizer_are_a_bad_request(benches: Any) -> None:
    """An empty text would look like an answer."""
    bench = benches(decoder=None)
    bench.register(1)
    decode(bench, (1, [97]))
    decode(bench, (2, [97]))
    answers = bench.work()
    assert answers.texts == {}
    assert list(answers.ends) == [1]
    assert answers.ends[1].status == 400
    assert "tokenizer" in str(answers.ends[1])
    assert answers.aborts == []
    assert bench.shard.open_count == 0
    assert bench.shard.counters.unknown_decodes == 1


def test_ids_that_the_library_cannot_decode_are_a_bad_request(benches: Any) -> None:
    """It fails for whoever sent them, the registration is gone, and the shard goes on."""
    decoder = load_decoder(TOKENIZER, kind=DecoderKind.LIBRARY)
    real = decoder.decode

    def fail(slots: Any, counts: Any, token_ids: Any) -> Any:
        if 7 in token_ids:
            raise DetokenizeError("seven is too much")
        return real(slots, counts, token_ids)

    decoder.decode = fail  # type: ignore[method-assign]
    bench = benches(decoder=decoder)
    bench.register(1, 2)
    decode(bench, (1, [97, 7]))
    decode(bench, (2, [97]))
    answers = bench.work()
    assert answers.ends[1].status == 400
    assert "seven is too much" in str(answers.ends[1])
    assert answers.texts == {2: "a"}
    assert answers.aborts == []
    assert bench.shard.open_count == 0


def test_ids_for_which_no_slot_is_free_are_refused(benches: Any) -> None:
    """Refused is answered: later there may be room."""
    bench = benches(decoder=load_decoder(TOKENIZER, slots_max=1))
    bench.register(1, 2)
    bench.push((1, "a", None))
    bench.work()
    decode(bench, (2, [97]))
    answers = bench.work()
    assert answers.ends[2].status == 503
    assert "slots_max=1" in str(answers.ends[2])
    assert answers.aborts == []
    assert bench.shard.open_count == 1


def test_a_text_that_is_larger_than_the_reply_ring_comes_in_pieces(benches: Any) -> None:
    """A long text asked for must not be lost, nor stop the shard."""
    bench = benches(reply_bytes=4096)
    bench.register(1)
    text = "abcdefghij" * 900
    decode(bench, (1, list(text.encode())))
    answers = bench.work()
    assert answers.texts == {1: text}
    assert len(answers.pieces[1]) > 1


def test_many_texts_asked_for_at_once_wait_for_the_reader(benches: Any) -> None:
    """A manager that does not read must not fill the worker's memory with answers."""
    bench = benches(reply_bytes=4096)
    count = 300
    bench.register(*range(1, count + 1))
    for request_id in range(1, count + 1):
        decode(bench, (request_id, [97]))
    for _ in range(5):
        bench.shard.do_work(8)
    assert bench.shard.counters.decodes < count
    assert bench.work().texts == dict.fromkeys(range(1, count + 1), "a")


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("no_stop_trim", [False, True])
def test_ids_of_the_step_in_which_a_stop_string_ends_are_all_reported(
    benches: Any, library: bool, told: bool, no_stop_trim: bool
) -> None:
    """They were generated, they are counted, and each has its log probability; only text is cut."""
    kind = DecoderKind.LIBRARY if library else None
    bench = benches(decoder=load_decoder(TOKENIZER, kind=kind))
    bench.register(1, stop=() if told else ("END",), no_stop_trim=no_stop_trim)
    bench.push((1, "one ", None))
    bench.push((1, "xENDyz", FinishReason.stop("END") if told else None))
    bench.push((1, "later", None))
    answers = bench.work()
    assert answers.texts == {1: "one xEND" if no_stop_trim else "one x"}
    assert answers.ids == {1: list(b"one xENDyz")}
    assert answers.counts == {1: len("one xENDyz")}
    assert answers.ends == {1: {"type": "stop", "matched": "END"}}
    assert answers.aborts == ([] if told else [1])
