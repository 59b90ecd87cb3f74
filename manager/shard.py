"""One detok shard: ids in, text out, for the requests that belong to it. A stage without a clock.

Causality: a worker must never meet a chunk of a request that it has not been told of. The
manager writes a registration before the request enters the ingress ring; so whatever is in the
egress ring at some moment was registered before that moment. `do_work` therefore takes the
egress tail first, then drains the register ring completely, and only then works up to that tail.

What could not be replied because the reply ring is full is kept, and nothing further is done
until it went out: so a full reply ring slows the scheduler down and loses nothing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

import shmring
from manager import extras_frame, frame_cut, messages
from manager.decode_step import OutputOptions, PlainStep
from manager.detokenize import TableDecoder
from manager.errors import CodecError, DetokenizeError, ManagerError, UnavailableError
from manager.table_step import TableStep

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from manager.decode_step import DecodeStep, Outcome, Reply
    from manager.detokenize import BatchDecoder
    from shmring import ColumnData, Consumer, Frame, Producer, Record, Schema

log = logging.getLogger(__name__)

#: Ended requests that are remembered, so that their late chunks are no news. 8 bytes an id and more.
ENDED_MAX: Final = 65536
_REGISTRATIONS_AT_ONCE: Final = 256
_STATUS_BAD_REQUEST: Final = 400
_STATUS_INTERNAL: Final = 500


@dataclass
class ShardCounters:
    """What a shard did. They only grow."""

    batches: int = 0
    rows: int = 0
    tokens: int = 0
    registered: int = 0
    unknown_rows: int = 0
    rejected_frames: int = 0
    decodes: int = 0
    """Texts decoded once, for whoever asked for no more than that."""
    unknown_decodes: int = 0
    """Of ids that nobody had registered; dropped."""
    unknown_ids: int = 0
    """Ids outside the vocabulary, of the requests that ended."""


class _EndedIds:
    """The last ids that ended here, oldest forgotten first."""

    def __init__(self, ids_max: int) -> None:
        self._ids: OrderedDict[int, None] = OrderedDict()
        self._ids_max = ids_max

    def add(self, request_id: int) -> None:
        self._ids[request_id] = None
        if len(self._ids) > self._ids_max:
            self._ids.popitem(last=False)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._ids


class DetokShard:
    """The stage. It owns the decoder states of its requests and three ring ends."""

    def __init__(
        self,
        *,
        egress: Consumer,
        register: Consumer,
        reply: Producer,
        decoder: BatchDecoder | None,
    ) -> None:
        """`decoder` None: no tokenizer, ids pass through without text."""
        self._egress = egress
        self._register = register
        self._reply = reply
        self._decoder = decoder
        self._requests: DecodeStep
        if decoder is None or isinstance(decoder, TableDecoder):
            self._requests = TableStep(decoder)
        else:
            self._requests = PlainStep(decoder)
        self._ended = _EndedIds(ENDED_MAX)
        self._texts_wanted: set[int] = set()  # of the open requests, those with texts beside logprobs
        self._unsent: deque[Reply] = deque()
        self.counters = ShardCounters()

    @property
    def open_count(self) -> int:
        """Requests that are registered and not ended."""
        return len(self._requests)

    @property
    def unsent_length(self) -> int:
        """Payload bytes that the next unsent reply needs room for; 0: nothing waits."""
        if not self._unsent:
            return 0
        schema, _, columns = self._unsent[0]
        return schema.payload_length(*columns)

    def do_work(self, limit: int) -> int:
        """Take at most `limit` egress records; returns how many records of both rings were taken.

        Raises EndOfRing when the manager has closed the register ring, PeerLostError when it died.
        """
        if not self._send_unsent():
            return 0
        horizon = self._egress.snapshot_tail()
        done = self._take_registrations()
        for _ in range(limit):
            if self._egress.position >= horizon or self._unsent:
                break
            for record in self._egress.drain(1):
                self._take(record)
            self._send_unsent()
            # after the reply: if we die in between, the record comes again to our successor
            self._egress.release()
            done += 1
        return done

    def _take_registrations(self) -> int:
        done = 0
        while True:
            records = self._register.drain(_REGISTRATIONS_AT_ONCE)
            if not records:
                return done
            for record in records:
                self._apply_or_reject(record)
            self._register.release()
            done += len(records)
            if not self._send_unsent():
                return done  # decodes are answered: the manager shall read before it asks for more

    def _apply_or_reject(self, record: Record) -> None:
        """A registration that cannot be read ends the requests it names; the worker lives."""
        try:
            self._apply(record)
        except (shmring.CorruptFrameError, shmring.ColumnError, ManagerError, msgspec.MsgspecError) as error:
            self.counters.rejected_frames += 1
            named = messages.recover_request_ids(record)
            log.error("registration was rejected: requests=%d, why=%s", len(named), error)  # noqa: TRY400 -- no fault of ours
            status, text = _STATUS_INTERNAL, f"internal error: malformed registration: {error}"
            if isinstance(error, UnavailableError):
                status, text = UnavailableError.status, str(error)
            self._ask_aborts(named)
            self._push_failures(named, status, [text] * len(named))

    def _apply(self, record: Record) -> None:
        if record.type == messages.RegisterType.REGISTER:
            self._open(messages.REGISTER.read(record))
        elif record.type == messages.RegisterType.DEREGISTER:
            for request_id in messages.DEREGISTER.read(record)["request_ids"].tolist():
                self._end(request_id)
        elif record.type == messages.RegisterType.DECODE:
            self._decode_once(record)
        else:
            raise CodecError(f"register record has an unknown type: type={record.type}")

    def _open(self, frame: Frame) -> None:
        tails = np.split(frame["prompt_tails"].copy(), np.cumsum(frame["prompt_tail_counts"])[:-1])
        del tails[frame.rows :]  # of no rows numpy makes one part
        stops = messages.unpack_bytes(frame["stops_lengths"], frame["stops"])
        rows = zip(frame["request_ids"].tolist(), frame["output"].tolist(), tails, stops, strict=True)
        for request_id, output, tail, packed_stops in rows:
            min_new_tokens, skip, spaces, no_stop_trim, logprob_texts = output
            stop_strs, stop_regexes = messages.unpack_stops(packed_stops)
            options = OutputOptions(
                prompt_tail=tail,
                skip_special_tokens=skip,
                spaces_between_special_tokens=spaces,
                no_stop_trim=no_stop_trim,
                min_new_tokens=min_new_tokens,
                stops=stop_strs,
                stop_regexes=stop_regexes,
            )
            self._requests.open(request_id, options)
            if logprob_texts:
                self._texts_wanted.add(request_id)
            else:
                self._texts_wanted.discard(request_id)
            self.counters.registered += 1

    def _decode_once(self, record: Record) -> None:
        """Answer with the whole text, or with what is wrong with its ids: the registration is consumed.

        The scheduler knows nothing of it and is told nothing.
        """
        if self._decoder is None:
            named = messages.DECODE.read(record)["request_ids"].tolist()
            text = "token_ids cannot be decoded: this server has no tokenizer"
            unknown = sum(request_id not in self._requests for request_id in named)
            self._fail(named, _STATUS_BAD_REQUEST, [text] * len(named))
        else:
            try:
                outcome = self._requests.take(record, None if self._unsent else self._reply)
            except (shmring.CorruptFrameError, shmring.ColumnError, CodecError, DetokenizeError) as error:
                named = messages.recover_request_ids(record)
                self._fail(named, _STATUS_BAD_REQUEST, [f"token_ids cannot be decoded: {error}"] * len(named))
                return
            self._settle(outcome)
            self._fail(outcome.refused, UnavailableError.status, [outcome.problem] * len(outcome.refused))
            self.counters.decodes += outcome.rows
            unknown = len(outcome.unknown) + outcome.late_rows
        if unknown:
            self.counters.unknown_decodes += unknown
            log.warning("ids of unknown requests were not decoded: count=%d", unknown)

    def _end(self, request_id: int) -> None:
        self._requests.close(request_id)
        self._texts_wanted.discard(request_id)
        self._count_unknown_ids()
        self._ended.add(request_id)

    def _take(self, record: Record) -> None:
        """Handle one egress record. A bad one is rejected whole; this never raises for what it says."""
        try:
            if record.type == messages.EgressType.BATCH:
                self._take_batch(record)
            elif record.type == messages.EgressType.EXTRAS:
                self._take_extras(record)
            elif record.type == messages.EgressType.ERROR:
                frame = messages.ERROR.read(record)
                texts = messages.unpack_bytes(frame["messages_lengths"], frame["messages"])
                self._fail(
                    frame["request_ids"].tolist(),
                    _STATUS_BAD_REQUEST,
                    [text.decode("utf-8", "replace") for text in texts],
                )
            elif record.type == messages.EgressType.RESULT:
                frame = messages.RESULT.read(record)
                columns = (
                    frame["control_ids"].copy(),
                    frame["payloads_lengths"].copy(),
                    frame["payloads"].copy(),
                )
                self._unsent.append((messages.REPLY_RESULT, frame.rows, columns))
            else:
                self.counters.rejected_frames += 1
                log.warning("egress record has an unknown type: type=%d", record.type)
        except (shmring.CorruptFrameError, shmring.ColumnError, CodecError, DetokenizeError) as error:
            self._reject(record, error)

    def _reject(self, record: Record, error: Exception) -> None:
        self.counters.rejected_frames += 1
        named = messages.recover_request_ids(record)
        if not named:
            log.error("egress frame was rejected and names no request, so they will hang: why=%s", error)
            return
        log.warning("egress frame was rejected: requests=%d, why=%s", len(named), error)
        known = [request_id for request_id in named if request_id in self._requests]
        text = f"internal error: malformed scheduler output frame: {error}"
        self._ask_aborts(known)
        self._fail(known, _STATUS_INTERNAL, [text] * len(known))

    def _fail(self, request_ids: Iterable[int], status: int, texts: Iterable[str]) -> None:
        """End those of the requests that are open; the others have ended already."""
        rows = [(i, t) for i, t in zip(request_ids, texts, strict=True) if i in self._requests]
        self._push_failures([i for i, _ in rows], status, [t for _, t in rows])

    def _push_failures(self, request_ids: list[int], status: int, texts: list[str]) -> None:
        if not request_ids:
            return
        for request_id in request_ids:
            self._end(request_id)
        lengths, text = messages.pack_bytes([t.encode("utf-8", "replace") for t in texts])
        statuses = np.full(len(request_ids), status, np.uint16)
        columns = (np.array(request_ids, np.uint64), statuses, lengths, text)
        self._unsent.append((messages.FAIL, len(request_ids), columns))

    def _ask_aborts(self, request_ids: list[int]) -> None:
        if request_ids:
            self._unsent.append((messages.ABORT_ASKED, len(request_ids), (np.array(request_ids, np.uint64),)))

    def _take_batch(self, record: Record) -> None:
        # what waits goes first: then nothing is written past it
        outcome = self._requests.take(record, None if self._unsent else self._reply)
        counters = self.counters
        counters.batches += 1
        counters.rows += outcome.rows
        counters.tokens += outcome.tokens
        counters.unknown_rows += len(outcome.unknown) + outcome.late_rows
        self._settle(outcome)
        if outcome.unknown:
            self._ask_strangers_to_stop(outcome.unknown)
        if outcome.refused:
            refused = list(dict.fromkeys(outcome.refused))
            log.error("requests were refused: count=%d, why=%s", len(refused), outcome.problem)
            self._ask_aborts(refused)
            self._fail(refused, UnavailableError.status, [outcome.problem] * len(refused))
        self._ask_aborts(outcome.stopped)

    def _settle(self, outcome: Outcome) -> None:
        """Keep what is still to be sent, and let go of the requests that have ended."""
        self._unsent += outcome.replies
        for request_id in outcome.ended:
            self._ended.add(request_id)
        if outcome.ended:
            self._count_unknown_ids()
            self._texts_wanted.difference_update(outcome.ended)

    def _count_unknown_ids(self) -> None:
        """Ids outside of the vocabulary are no text and no error, but somebody should look at the engine."""
        more = self._requests.unknown_ids - self.counters.unknown_ids
        self.counters.unknown_ids += more
        if more:
            log.warning("output held ids outside of the vocabulary: count=%d", more)

    def _ask_strangers_to_stop(self, unknown: list[int]) -> None:
        """Chunks of requests that ended are late and no news; of others, the scheduler is told to stop."""
        strangers = {request_id for request_id in unknown if request_id not in self._ended}
        if strangers:
            log.warning(
                "output of unknown requests was dropped: count=%d, first=%d", len(strangers), min(strangers)
            )
            for request_id in strangers:
                self._ended.add(request_id)
            self._ask_aborts(sorted(strangers))

    def _take_extras(self, record: Record) -> None:
        """What belongs to the rows of the batch behind it; the manager keeps it until their text comes."""
        frame = messages.EXTRAS.read(record)
        decode_each = None if self._decoder is None else self._decoder.decode_each
        rows, columns = extras_frame.answered(
            frame, self._requests.__contains__, self._texts_wanted, decode_each
        )
        if rows:
            self._unsent.append((messages.REPLY_EXTRAS, rows, columns))

    def _cut(self, schema: Schema, rows: int, columns: tuple[ColumnData, ...]) -> list[Reply]:
        """A frame that can never fit the ring, in two."""
        if rows > 1:
            return [(schema, *half) for half in frame_cut.halves(schema, rows, columns)]
        if schema is not messages.REPLY_EXTRAS:
            return _cut_row(schema, columns)
        cut = frame_cut.halves_of_row(schema, columns)
        if cut:
            return [(schema, 1, half) for half in cut]
        named: dict[str, Any] = dict(zip(schema.names, columns, strict=True))
        self._end(int(named["request_ids"][0]))
        problem = b"log probabilities or hidden states of one token are larger than the reply ring"
        return [
            (messages.ABORT_ASKED, 1, (named["request_ids"],)),
            _failure(named["request_ids"], _STATUS_INTERNAL, problem),
        ]

    def _send_unsent(self) -> bool:
        """Push what waits, in order. False: the ring is full with some left."""
        while self._unsent:
            schema, rows, columns = self._unsent[0]
            if schema.payload_length(*columns) > self._reply.payload_length_max:
                self._unsent.popleft()
                self._unsent.extendleft(reversed(self._cut(schema, rows, columns)))
                continue
            if not schema.push(self._reply, rows, *columns):
                return False
            self._unsent.popleft()
        return True


def _cut_row(schema: Schema, columns: tuple[ColumnData, ...]) -> list[Reply]:
    """Say the one row of a frame that can never fit the ring in two, or what of it can be said.

    Text goes on in the next frame, with the end in the last; an error's message is shortened; an
    end that cannot be told becomes an error, so that nobody waits for it.
    """
    named: dict[str, Any] = dict(zip(schema.names, columns, strict=True))
    if schema is messages.TEXT:
        text, token_ids = named["texts"], named["token_ids"]
        text_cut, ids_cut = _character_start(text, len(text) // 2), len(token_ids) // 2
        if not text_cut and not ids_cut:
            if not len(text) and not len(token_ids):
                problem = b"internal error: the end of the request is too large to be told"
                return [_failure(named["request_ids"], _STATUS_INTERNAL, problem)]
            # nothing but the end is large: first the rest of the text, then the end for itself
            text_cut, ids_cut = len(text), len(token_ids)
        return [
            _text_reply(named, text[:text_cut], token_ids[:ids_cut], is_last=False),
            _text_reply(named, text[text_cut:], token_ids[ids_cut:], is_last=True),
        ]
    if schema is messages.FAIL:
        message = named["messages"]
        shortened = message[: _character_start(message, len(message) // 2)]
        return [_failure(named["request_ids"], int(named["statuses"][0]), shortened.tobytes())]
    log.error("reply is larger than the reply ring and was dropped: frame=%s", schema.name)
    return []


def _text_reply(
    named: dict[str, Any], text: NDArray[np.uint8], token_ids: NDArray[np.int32], *, is_last: bool
) -> Reply:
    """A part of one row: tokens are counted in the first, the end is told in the last."""
    columns = named | {
        "texts": text,
        "texts_lengths": np.array([len(text)], np.uint32),
        "token_ids": token_ids,
        "token_counts": np.array([len(token_ids)], np.uint32),
    }
    if is_last:
        columns["completion_counts"] = np.zeros(1, np.uint32)
    else:
        columns["finish_codes"] = np.zeros(1, np.uint8)
        columns |= dict.fromkeys(("finish_values", "finish_details_lengths", "finish_details"))
    return messages.TEXT, 1, tuple(columns[name] for name in messages.TEXT.names)


def _failure(request_ids: NDArray[np.uint64], status: int, message: bytes) -> Reply:
    return messages.FAIL, 1, (request_ids, np.array([status], np.uint16), *messages.pack_bytes([message]))


def _character_start(text: NDArray[np.uint8], index: int) -> int:
    """The index, at most `index`, at which a character of UTF-8 begins."""
    while index > 0 and int(text[index]) & 0xC0 == 0x80:
        index -= 1
    return index
