"""The decode step in C, for requests whose ids a table decodes.

A frame is three calls: one finds its columns, one looks at its rows, and one writes the answer
straight into the reply ring, or into a buffer if the ring is full. Stop strings are found by one
automaton per set of them, shared by all requests that ask for the same. Python sees only what is
rare: an end that the scheduler tells in words, and requests with stop regexes, which take the plain
way beside.

The calls give the GIL back: a worker has one thread, so that costs 65 ns a call and no waiting,
and a program that runs a shard in a thread of its own is not held up by a large frame.
"""

from __future__ import annotations

import errno
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from manager import finish, messages
from manager._detok import ffi, lib
from manager.decode_step import Outcome, OutputOptions, PlainStep, is_fresh
from manager.errors import CodecError, DetokenizeError, UnavailableError, ValidationError
from manager.finish import FinishCode, FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from manager._detok import CData
    from manager.detokenize import TableDecoder
    from shmring import Producer, Record

#: Places of the table of requests, twice the requests that it holds. A place is some 60 bytes.
_PLACES_FIRST: Final = 1 << 10
_PLACES_MAX: Final = 1 << 22
_ROWS_FIRST: Final = 256
#: Compiled sets of stop strings that are kept while nobody uses them: how many, and their bytes.
_SETS_MAX: Final = 1024
_SETS_BYTES_MAX: Final = 1 << 24
#: Bytes of all compiled sets, those in use included: the longest stop strings that are let in take
#: 5 MiB a request, and thousands of requests may ask for others each.
_ALL_SETS_BYTES_MAX: Final = 1 << 28

_PLACE_LENGTH: Final = ffi.sizeof("struct detok_request")
_NODE_LENGTH: Final = ffi.sizeof("struct detok_stop_node")
_STARTED_MAX: Final = (1 << 32) - 1


class _StopSet:
    """A compiled set of stop strings, and the memory that it lies in."""

    def __init__(self, stops: Sequence[str]) -> None:
        texts = [_encoded(stop) for stop in stops]
        # what the finish column says when one of them is found, ready to be copied
        details = [finish.encode(FinishReason.stop(stop))[2] for stop in stops]
        self._text, self._offsets = _back_to_back(texts)
        self._details, self._details_offsets = _back_to_back(details)
        self._nodes = np.zeros((len(self._text) + 1, _NODE_LENGTH), np.uint8)
        self.length = self._nodes.nbytes + ffi.sizeof("struct detok_stops") + 2 * len(self._text)
        self.c_stops = ffi.new(
            "struct detok_stops *",
            {
                "text": ffi.from_buffer("uint8_t[]", self._text),
                "offsets": ffi.from_buffer("uint32_t[]", self._offsets),
                "details": ffi.from_buffer("uint8_t[]", self._details),
                "details_offsets": ffi.from_buffer("uint32_t[]", self._details_offsets),
                "nodes": ffi.from_buffer("struct detok_stop_node[]", self._nodes),
                "node_capacity": len(self._nodes),
                "count": len(texts),
                "details_length_max": max(map(len, details)),
            },
        )
        if lib.detok_stops_build(self.c_stops) != 0:
            raise ValidationError("stop string is empty", field="stop")


class _StopSets:
    """Compiled sets, so that requests with the same stop strings share one. Oldest forgotten first."""

    def __init__(self, bytes_max: int = _ALL_SETS_BYTES_MAX) -> None:
        self._kept: OrderedDict[tuple[str, ...], _StopSet] = OrderedDict()
        self._kept_length = 0
        self._all_length = 0
        self._bytes_max = bytes_max

    def of(self, stops: tuple[str, ...]) -> _StopSet:
        """The set of these stop strings; UnavailableError if there is no room for one more."""
        found = self._kept.get(stops)
        if found is not None:
            self._kept.move_to_end(stops)
            return found
        made = _StopSet(stops)
        if self._all_length + made.length > self._bytes_max:
            raise UnavailableError(
                "stop strings of all requests take too much memory: "
                f"bytes={self._all_length + made.length}, max={self._bytes_max}"
            )
        self._all_length += made.length
        weakref.finalize(made, self._forget, made.length).atexit = False
        self._kept[stops] = made
        self._kept_length += made.length
        while len(self._kept) > _SETS_MAX or (self._kept_length > _SETS_BYTES_MAX and len(self._kept) > 1):
            _, oldest = self._kept.popitem(last=False)
            self._kept_length -= oldest.length
        return made

    def _forget(self, length: int) -> None:
        self._all_length -= length


class TableStep:
    """A DecodeStep on a TableDecoder; None: no tokenizer, ids pass through without text."""

    def __init__(self, decoder: TableDecoder | None) -> None:
        self._decoder = decoder
        self._c_table: CData = ffi.NULL if decoder is None else decoder.c_table
        self._plain = PlainStep(decoder)
        self._sets = _StopSets()
        self._sets_in_use: dict[int, _StopSet] = {}
        self._requests: CData = ffi.new("struct detok_requests *")
        self._requests.started_max = _STARTED_MAX if decoder is None else decoder.slots_max
        self._give_places(self._requests, _PLACES_FIRST)
        self._batch: CData = ffi.new("struct detok_batch *")
        self._report: CData = ffi.new("struct detok_report *")
        self._row_capacity = 0
        self._give_rows(_ROWS_FIRST)

    @property
    def unknown_ids(self) -> int:
        """See DecodeStep."""
        return int(self._requests.unknown_ids) + self._plain.unknown_ids

    def __contains__(self, request_id: int) -> bool:
        return bool(lib.detok_request_is_open(self._requests, request_id)) or request_id in self._plain

    def __len__(self) -> int:
        return int(self._requests.count) + len(self._plain)

    def open(self, request_id: int, options: OutputOptions) -> None:
        """See DecodeStep.open."""
        self.close(request_id)
        if options.stop_regexes:
            self._plain.open(request_id, options)
            return
        stop_set = self._sets.of(options.stops) if options.stops else None
        if 2 * (self._requests.count + 1) > self._requests.capacity:
            self._grow()
        tail = np.ascontiguousarray(options.prompt_tail)
        result = lib.detok_request_open(
            self._c_table,
            self._requests,
            request_id,
            max(0, options.min_new_tokens),
            options.skip_special_tokens,
            options.no_stop_trim,
            ffi.NULL if stop_set is None else stop_set.c_stops,
            ffi.from_buffer("int32_t[]", tail),
            len(tail),
        )
        assert result == 0, "there was room, or it has grown"
        if stop_set is not None:
            self._sets_in_use[request_id] = stop_set

    def close(self, request_id: int) -> None:
        """See DecodeStep.close."""
        if lib.detok_request_close(self._requests, request_id):
            self._sets_in_use.pop(request_id, None)
        else:
            self._plain.close(request_id)

    def take(self, record: Record, reply: Producer | None) -> Outcome:
        """See DecodeStep.take."""
        batch = self._batch
        payload = ffi.from_buffer("uint8_t[]", record)  # C reads its memory until the answer is written
        if lib.detok_batch_read(batch, payload, len(payload), messages.BATCH.fingerprint) != 0:
            raise _refusal(record)
        if batch.row_count > self._row_capacity:
            self._give_rows(max(batch.row_count, 2 * self._row_capacity))
        batch.is_fresh = is_fresh(record)
        report = self._look(record)
        cuts = self._read_details() if report.details_count else b""
        outcome = self._write(cuts, reply)
        outcome.rows = report.kept_count
        outcome.tokens = report.token_count
        outcome.late_rows = report.late_count
        outcome.unknown = _ids(report.unknown, report.unknown_count)
        if report.refused_count:
            outcome.refused = _ids(report.refused, report.refused_count)
            outcome.problem = f"no decoder slot is free: slots_max={self._requests.started_max}"
        outcome.stopped = _ids(report.stopped, report.stopped_count)
        outcome.ended = _ids(report.ended, report.ended_count)
        if self._sets_in_use:
            for request_id in outcome.ended:
                self._sets_in_use.pop(request_id, None)
        if outcome.unknown and len(self._plain):
            self._take_plain(record, outcome)
        return outcome

    def _take_plain(self, record: Record, outcome: Outcome) -> None:
        """Rows that C does not know may be those of requests with regexes."""
        request_ids = {request_id for request_id in outcome.unknown if request_id in self._plain}
        if not request_ids:
            return
        outcome.unknown = [request_id for request_id in outcome.unknown if request_id not in request_ids]
        frame = messages.BATCH.read(record)
        plain = self._plain.take_rows(frame, is_fresh=is_fresh(record), request_ids=request_ids)
        outcome.replies += plain.replies
        outcome.rows += plain.rows
        outcome.tokens += plain.tokens
        outcome.late_rows += plain.late_rows
        outcome.refused += plain.refused
        outcome.problem = outcome.problem or plain.problem
        outcome.stopped += plain.stopped
        outcome.ended += plain.ended

    def _look(self, record: Record) -> CData:
        """Find all rows' requests. Raises for a frame that cannot be answered."""
        report = self._report
        result = lib.detok_step_look(self._c_table, self._requests, self._batch, self._rows, report)
        if result == -errno.EBADMSG:
            row = self._rows[report.bad_row]
            finish.decode(row.code, row.value, self._details_of(row))
        if result != 0:
            raise _refusal(record)
        return report

    def _details_of(self, row: CData) -> bytes:
        if not row.details_length:
            return b""
        end = row.details_start + row.details_length
        if end > self._batch.details_length:
            raise CodecError(f"finish details end behind their column: end={end}")
        return bytes(ffi.buffer(self._batch.details + row.details_start, row.details_length))

    def _read_details(self) -> bytes:
        """Judge ends told in words. What a scheduler matched is cut off its text: the bytes of all of it."""
        cuts = bytearray()
        for index in range(self._batch.row_count):
            row = self._rows[index]
            if row.code != FinishCode.DETAILS:
                continue
            reason = finish.decode(row.code, row.value, self._details_of(row))
            matched = None if reason is None else reason.matched()
            if isinstance(matched, str):
                pattern = matched.encode("utf-8", "surrogatepass")
                row.cut_from, row.cut_length = len(cuts), len(pattern)
                cuts += pattern
        return bytes(cuts)

    def _write(self, cuts: bytes, reply: Producer | None) -> Outcome:
        """Write the answer into the ring, or keep it for later if there is no room."""
        bound = self._report.bound
        outcome = Outcome()
        if not self._report.kept_count:
            return outcome
        claim = None
        if reply is not None and bound <= reply.payload_length_max:
            claim = reply.try_claim(bound)
        if claim is None:
            kept = np.empty(bound, np.uint8)
            length = self._say(cuts, ffi.from_buffer("uint8_t[]", kept), bound)
            if length:
                answer = messages.TEXT.read(kept.data[:length])
                columns = tuple(
                    answer[name] if name in answer else None  # noqa: SIM401 - a frame is no dict
                    for name in messages.TEXT.names
                )
                outcome.replies.append((messages.TEXT, answer.rows, columns))
            return outcome
        try:
            length = self._say(cuts, ffi.from_buffer("uint8_t[]", claim.payload), bound)
        except BaseException:
            claim.abort()
            raise
        if length:
            claim.commit(length, messages.ReplyType.TEXT)
        else:
            claim.abort()
        return outcome

    def _say(self, cuts: bytes, out: CData, capacity: int) -> int:
        length = lib.detok_step_write(
            self._c_table,
            self._requests,
            self._batch,
            self._rows,
            ffi.from_buffer("uint8_t[]", cuts),
            self._report,
            messages.TEXT.fingerprint,
            out,
            capacity,
        )
        if length < 0:
            raise CodecError("frame was changed while it was read")
        return length

    def _give_rows(self, count: int) -> None:
        report = self._report
        self._rows: CData = ffi.new("struct detok_row[]", count)
        self._lists: CData = ffi.new("uint64_t[]", 4 * count)
        report.unknown, report.refused = self._lists, self._lists + count
        report.stopped, report.ended = self._lists + 2 * count, self._lists + 3 * count
        self._row_capacity = count

    def _give_places(self, requests: CData, capacity: int) -> None:
        self._places: NDArray[np.uint8] = np.zeros((capacity, _PLACE_LENGTH), np.uint8)
        requests.places = ffi.from_buffer("struct detok_request[]", self._places)
        requests.capacity = capacity

    def _grow(self) -> None:
        capacity = 2 * self._requests.capacity
        if capacity > _PLACES_MAX:
            raise UnavailableError(f"too many requests are open: count={self._requests.count}")
        larger = ffi.new("struct detok_requests *")
        before = self._places  # until its requests have moved
        self._give_places(larger, capacity)
        if lib.detok_requests_move(self._requests, larger) != 0:
            raise DetokenizeError("requests could not be moved to a larger table")
        del before
        self._requests = larger


def _refusal(record: Record) -> CodecError:
    """The error of a frame that does not add up; raises the one that names the column, if there is one."""
    rows = messages.BATCH.read(record).rows
    return CodecError(f"frame does not add up, it was changed while it was read: rows={rows}")


def _ids(start: CData, count: int) -> list[int]:
    return ffi.unpack(start, count) if count else []


def _encoded(stop: str) -> bytes:
    try:
        return stop.encode()
    except UnicodeEncodeError as error:
        raise ValidationError(f"stop string is not valid text: stop={stop!r}", field="stop") from error


def _back_to_back(texts: Sequence[bytes]) -> tuple[bytes, NDArray[np.uint32]]:
    offsets = np.zeros(len(texts) + 1, np.uint32)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    return b"".join(texts), offsets
