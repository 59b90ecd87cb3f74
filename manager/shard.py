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
from manager import finish, messages
from manager.errors import CodecError, DetokenizeError, ManagerError, UnavailableError
from manager.finish import FinishCode, FinishReason
from manager.stop import StopMatcher, trim_at_stop

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from manager.detokenize import BatchDecoder
    from shmring import Consumer, Frame, Producer, Record, Schema
    from shmring.columns import ColumnData

    #: A frame that is to be sent: its schema, its rows, its columns.
    _Reply = tuple[Schema, int, tuple[ColumnData, ...]]

log = logging.getLogger(__name__)

#: Ended requests that are remembered, so that their late chunks are no news. 8 bytes an id and more.
ENDED_MAX: Final = 65536
_REGISTRATIONS_AT_ONCE: Final = 256
_STOPS = msgspec.msgpack.Decoder(list[str])
_STATUS_BAD_REQUEST: Final = 400
_STATUS_INTERNAL: Final = 500


@dataclass(slots=True)
class _Output:
    """What a shard knows of one request."""

    prompt_tail: NDArray[np.int32]
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    min_new_tokens: int
    matcher: StopMatcher | None
    slot: int = -1
    """Of the decoder; -1 until the first chunk says whether output continues the prompt."""
    completion_count: int = 0

    @property
    def is_plain(self) -> bool:
        """Nothing but decoding to be done while it is not finished."""
        return self.matcher is None


@dataclass
class ShardCounters:
    """What a shard did. They only grow."""

    batches: int = 0
    rows: int = 0
    tokens: int = 0
    registered: int = 0
    unknown_rows: int = 0
    rejected_frames: int = 0
    unknown_ids: int = 0


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
        self._outputs: dict[int, _Output] = {}
        self._ended = _EndedIds(ENDED_MAX)
        self._unsent: deque[_Reply] = deque()
        self.counters = ShardCounters()

    @property
    def open_count(self) -> int:
        """Requests that are registered and not ended."""
        return len(self._outputs)

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

    def _apply_or_reject(self, record: Record) -> None:
        """A registration that cannot be read ends the requests it names; the worker lives."""
        try:
            self._apply(record)
        except (shmring.CorruptFrameError, shmring.ColumnError, ManagerError, msgspec.MsgspecError) as error:
            self.counters.rejected_frames += 1
            named = messages.recover_request_ids(record)
            log.error("registration was rejected: requests=%d, why=%s", len(named), error)  # noqa: TRY400
            text = f"internal error: malformed registration: {error}"
            self._ask_aborts(named)
            self._push_failures(named, _STATUS_INTERNAL, [text] * len(named))

    def _apply(self, record: Record) -> None:
        if record.type == messages.RegisterType.REGISTER:
            self._open(messages.REGISTER.read(record))
        elif record.type == messages.RegisterType.DEREGISTER:
            for request_id in messages.DEREGISTER.read(record)["request_ids"].tolist():
                self._end(request_id)
        else:
            raise CodecError(f"register record has an unknown type: type={record.type}")

    def _open(self, frame: Frame) -> None:
        tails = np.split(frame["prompt_tails"].copy(), np.cumsum(frame["prompt_tail_counts"])[:-1])
        stops = messages.unpack_bytes(frame["stops_lengths"], frame["stops"])
        rows = zip(frame["request_ids"].tolist(), frame["output"].tolist(), tails, stops, strict=True)
        for request_id, (min_new_tokens, skip, spaces, no_stop_trim), tail, packed_stops in rows:
            stop_strs = _STOPS.decode(packed_stops) if packed_stops else []
            self._outputs[request_id] = _Output(
                prompt_tail=tail,
                skip_special_tokens=skip,
                spaces_between_special_tokens=spaces,
                no_stop_trim=no_stop_trim,
                min_new_tokens=min_new_tokens,
                matcher=StopMatcher(stop_strs, keep=no_stop_trim) if stop_strs else None,
            )
            self.counters.registered += 1

    def _end(self, request_id: int) -> None:
        output = self._outputs.pop(request_id, None)
        if output is not None and output.slot >= 0 and self._decoder is not None:
            self.counters.unknown_ids += self._decoder.unknown_ids(output.slot)
            self._decoder.close(output.slot)
        self._ended.add(request_id)

    def _take(self, record: Record) -> None:
        """Handle one egress record. A bad one is rejected whole; this never raises for what it says."""
        try:
            if record.type == messages.EgressType.BATCH:
                self._take_batch(
                    messages.BATCH.read(record), is_fresh=bool(record.flags & messages.BatchFlag.FRESH_TEXT)
                )
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
        known = [request_id for request_id in named if request_id in self._outputs]
        text = f"internal error: malformed scheduler output frame: {error}"
        self._ask_aborts(known)
        self._fail(known, _STATUS_INTERNAL, [text] * len(known))

    def _fail(self, request_ids: Iterable[int], status: int, texts: Iterable[str]) -> None:
        """End those of the requests that are open; the others have ended already."""
        rows = [(i, t) for i, t in zip(request_ids, texts, strict=True) if i in self._outputs]
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

    def _take_batch(self, frame: Frame, *, is_fresh: bool) -> None:
        batch = _Batch(frame)
        self._drop_unknown(batch)
        self._open_slots(batch, is_fresh=is_fresh)
        self.counters.batches += 1
        self.counters.rows += len(batch.ids)
        self.counters.tokens += len(batch.tokens)
        if not batch.ids:
            return
        outputs = [self._outputs[request_id] for request_id in batch.ids]
        completion_counts = batch.counts.copy()  # before trimming: a stop token is counted and not shown
        self._trim_stop_tokens(batch, outputs)
        text, lengths = self._decode(batch, outputs)
        for output, count in zip(outputs, completion_counts.tolist(), strict=True):
            output.completion_count += count
        special = [
            row
            for row, output in enumerate(outputs)
            if not output.is_plain or batch.codes[row] != FinishCode.NONE
        ]
        if special:
            text, lengths = self._finish_rows(batch, outputs, special, text, lengths)
        columns = (
            np.array(batch.ids, np.uint64),
            lengths,
            text,
            batch.counts,
            batch.tokens,
            completion_counts,
            batch.codes,
            *batch.finish_columns(),
        )
        self._unsent.append((messages.TEXT, len(batch.ids), columns))
        self._ask_aborts(batch.stopped_here)
        for request_id in batch.ended():
            self._end(request_id)

    def _drop_unknown(self, batch: _Batch) -> None:
        """Chunks of requests that ended are late and no news; of others, the scheduler is told to stop."""
        unknown = [row for row, request_id in enumerate(batch.ids) if request_id not in self._outputs]
        if not unknown:
            return
        self.counters.unknown_rows += len(unknown)
        strangers = {batch.ids[row] for row in unknown if batch.ids[row] not in self._ended}
        if strangers:
            log.warning(
                "output of unknown requests was dropped: count=%d, first=%d", len(strangers), min(strangers)
            )
            for request_id in strangers:
                self._ended.add(request_id)
            self._ask_aborts(sorted(strangers))
        batch.drop_rows(unknown)

    def _trim_stop_tokens(self, batch: _Batch, outputs: list[_Output]) -> None:
        """Drop the matched last id, unless the request keeps it. Id 0 is no match, as in SGLang."""
        starts = batch.starts()
        cut: list[int] = []
        for row in np.flatnonzero(batch.codes == FinishCode.STOP_TOKEN).tolist():
            last = int(starts[row + 1]) - 1
            matched = int(batch.values[row])
            if (
                not outputs[row].no_stop_trim
                and matched != 0
                and batch.counts[row]
                and batch.tokens[last] == matched
            ):
                cut.append(last)
                batch.counts[row] -= 1
        if cut:
            batch.tokens = np.delete(batch.tokens, cut)

    def _open_slots(self, batch: _Batch, *, is_fresh: bool) -> None:
        """Give new texts their decoder state. Those for which none is free end; the others go on."""
        if self._decoder is None:
            return
        refused: list[int] = []
        for request_id in batch.ids:
            output = self._outputs[request_id]
            if output.slot >= 0:
                continue
            tail = output.prompt_tail[:0] if is_fresh else output.prompt_tail
            try:
                output.slot = self._decoder.open(
                    tail,
                    skip_special_tokens=output.skip_special_tokens,
                    spaces_between_special_tokens=output.spaces_between_special_tokens,
                )
            except UnavailableError as error:
                problem = str(error)
                refused.append(request_id)
        if refused:
            refused = list(dict.fromkeys(refused))
            log.error("requests were refused: count=%d, why=%s", len(refused), problem)
            self._ask_aborts(refused)
            self._fail(refused, UnavailableError.status, [problem] * len(refused))
            batch.drop_rows([row for row, request_id in enumerate(batch.ids) if request_id in self._ended])

    def _decode(self, batch: _Batch, outputs: list[_Output]) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        if self._decoder is None:
            return np.empty(0, np.uint8), np.zeros(len(outputs), np.uint32)
        slots = np.fromiter((output.slot for output in outputs), np.uint32, len(outputs))
        return self._decoder.decode(slots, batch.counts, batch.tokens)

    def _finish_rows(
        self,
        batch: _Batch,
        outputs: list[_Output],
        special: list[int],
        text: NDArray[np.uint8],
        lengths: NDArray[np.uint32],
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """Apply stops and ends to the rows that have any; the others' text stays as it is."""
        texts = messages.unpack_bytes(lengths, text)
        for row in special:
            texts[row] = self._finish_row(batch, row, outputs[row], texts[row])
        return _swap(messages.pack_bytes(texts))

    def _finish_row(self, batch: _Batch, row: int, output: _Output, delta: bytes) -> bytes:
        reason = batch.reason(row)
        matched_by_scheduler = reason.matched() if reason is not None else None
        if reason is not None and self._decoder is not None:
            delta += self._decoder.finish(output.slot)
        if output.matcher is None:
            if isinstance(matched_by_scheduler, str):
                return trim_at_stop(delta, matched_by_scheduler, output.no_stop_trim)
            return delta
        step = output.matcher.push(delta, armed=output.completion_count >= output.min_new_tokens)
        delta = step.text
        if step.matched is not None:
            # found here: the scheduler does not know of it and goes on until it is told
            if reason is None:
                batch.stopped_here.append(batch.ids[row])
            batch.set_reason(row, FinishReason.stop(step.matched))
        elif reason is not None:
            delta += output.matcher.flush()
            if isinstance(matched_by_scheduler, str):
                delta = trim_at_stop(delta, matched_by_scheduler, output.no_stop_trim)
        return delta

    def _send_unsent(self) -> bool:
        """Push what waits, in order. False: the ring is full with some left."""
        while self._unsent:
            schema, rows, columns = self._unsent[0]
            if schema.payload_length(*columns) > self._reply.payload_length_max:
                self._unsent.popleft()
                parts = _halves(schema, rows, columns) if rows > 1 else _cut_row(schema, columns)
                self._unsent.extendleft(reversed(parts))
                continue
            if not schema.push(self._reply, rows, *columns):
                return False
            self._unsent.popleft()
        return True


def _swap(
    packed: tuple[NDArray[np.uint32], NDArray[np.uint8]],
) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    return packed[1], packed[0]


class _Batch:
    """The columns of one BATCH frame, copied."""

    def __init__(self, frame: Frame) -> None:
        self.ids: list[int] = frame["request_ids"].tolist()
        self.counts: NDArray[np.uint32] = frame["token_counts"].copy()
        # a copy, like the rest: a reply may wait for room longer than the ring keeps this record
        self.tokens: NDArray[np.int32] = frame["token_ids"].copy()
        self.codes: NDArray[np.uint8] = frame["finish_codes"].copy()
        self.values: NDArray[np.int64] = (
            frame["finish_values"].copy() if "finish_values" in frame else np.zeros(frame.rows, np.int64)
        )
        self.details: dict[int, bytes] = {}
        if "finish_details" in frame:
            packed = messages.unpack_bytes(frame["finish_details_lengths"], frame["finish_details"])
            self.details = {row: item for row, item in enumerate(packed) if item}
        self.stopped_here: list[int] = []
        # all of them before anything is delivered: a bad frame is rejected whole
        for row in np.flatnonzero(self.codes).tolist():
            self.reason(row)

    def starts(self) -> NDArray[np.int64]:
        """(n + 1,) where each row's tokens begin."""
        starts = np.zeros(len(self.counts) + 1, np.int64)
        np.cumsum(self.counts, out=starts[1:])
        return starts

    def reason(self, row: int) -> FinishReason | None:
        return finish.decode(int(self.codes[row]), int(self.values[row]), self.details.get(row, b""))

    def set_reason(self, row: int, reason: FinishReason) -> None:
        code, value, details = finish.encode(reason)
        self.codes[row], self.values[row] = code, value
        if details:
            self.details[row] = details
        else:
            self.details.pop(row, None)

    def drop_rows(self, rows: list[int]) -> None:
        keep = np.ones(len(self.ids), bool)
        keep[rows] = False
        self.tokens = self.tokens[np.repeat(keep, self.counts)]
        kept = np.flatnonzero(keep).tolist()
        self.details = {new: self.details[old] for new, old in enumerate(kept) if old in self.details}
        self.ids = [self.ids[row] for row in kept]
        self.counts, self.codes, self.values = self.counts[keep], self.codes[keep], self.values[keep]

    def ended(self) -> list[int]:
        return [self.ids[row] for row in np.flatnonzero(self.codes).tolist()]

    def finish_columns(self) -> tuple[ColumnData, ...]:
        """Values and details; absent on a plain step."""
        values: Any = self.values if self.codes.any() else None
        if not self.details:
            return values, None, None
        return values, *messages.pack_bytes([self.details.get(row, b"") for row in range(len(self.ids))])


def _halves(schema: Schema, rows: int, columns: tuple[ColumnData, ...]) -> list[_Reply]:
    """Cut a frame that can never fit the ring into two with half of the rows each."""
    named: dict[str, Any] = dict(zip(schema.names, columns, strict=True))
    parts: list[_Reply] = []
    for first, last in ((0, rows // 2), (rows // 2, rows)):
        part: list[ColumnData] = []
        for column in schema.columns:
            values = named[column.name]
            if values is None:
                part.append(None)
            elif column.counts is None:
                part.append(values[first:last])
            else:
                counts = named[column.counts]
                start = int(counts[:first].sum(dtype=np.int64))
                part.append(values[start : start + int(counts[first:last].sum(dtype=np.int64))])
        parts.append((schema, last - first, tuple(part)))
    return parts


def _cut_row(schema: Schema, columns: tuple[ColumnData, ...]) -> list[_Reply]:
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
) -> _Reply:
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


def _failure(request_ids: NDArray[np.uint64], status: int, message: bytes) -> _Reply:
    return messages.FAIL, 1, (request_ids, np.array([status], np.uint16), *messages.pack_bytes([message]))


def _character_start(text: NDArray[np.uint8], index: int) -> int:
    """The index, at most `index`, at which a character of UTF-8 begins."""
    while index > 0 and int(text[index]) & 0xC0 == 0x80:
        index -= 1
    return index
