"""One decode step of a shard: the rows of a batch frame in, the text of its requests out.

What a shard needs of it is `DecodeStep`. Here is the plain way, in Python, over any decoder. It
is the only way for tokenizers that the library decodes, and for requests with stop regexes, and
it is what the fast way (table_step) is held against.

The rules of a row, in order: a stop token that matched is dropped, unless the request keeps it;
ids become text; stop strings are looked for, from the token on that is number `min_new_tokens`;
an end that the scheduler tells flushes what is held back. Rows behind the end of their request,
in the same frame, are left out like those of requests that nobody knows.

Ids are reported in the step in which they come, and text when it is complete and cannot become a
stop any more. So the ids reported so far always make at least the text that was sent, and at the
end both are complete. A stop string cuts the text alone: it may lie inside of tokens, and those behind
it in the same step were generated, counted, and have their log probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from manager import finish, messages
from manager.errors import UnavailableError
from manager.finish import FinishCode, FinishReason
from manager.stop import StopMatcher, trim_at_stop

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from manager.detokenize import BatchDecoder
    from shmring import ColumnData, Frame, Producer, Record, Schema

    #: A frame that is to be sent: its schema, its rows, its columns.
    Reply = tuple[Schema, int, tuple[ColumnData, ...]]


_FRESH_TEXT: Final = int(messages.BatchFlag.FRESH_TEXT)  # an enum's `&` takes half a microsecond


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How a request's output is decoded, as it was registered."""

    prompt_tail: NDArray[np.int32]
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    min_new_tokens: int
    stops: tuple[str, ...]
    stop_regexes: tuple[str, ...] = ()


@dataclass(slots=True)
class Outcome:
    """What came of one frame. Lists of ids are in the order of their rows."""

    replies: list[Reply] = field(default_factory=list)
    """Still to be sent."""
    rows: int = 0
    """Answered."""
    tokens: int = 0
    unknown: list[int] = field(default_factory=list)
    """A row each, of requests that are not open."""
    late_rows: int = 0
    """Behind the end of their request."""
    refused: list[int] = field(default_factory=list)
    """Requests for whose text there is no room; still open."""
    problem: str = ""
    """Why they were refused."""
    stopped: list[int] = field(default_factory=list)
    """Requests that ended here; the scheduler does not know."""
    ended: list[int] = field(default_factory=list)
    """Requests that have ended, and are closed."""


class DecodeStep(Protocol):
    """The open requests of a shard, and their texts."""

    @property
    def unknown_ids(self) -> int:
        """How many ids outside the vocabulary the closed requests met."""
        ...

    def open(self, request_id: int, options: OutputOptions) -> None:
        """Take up a request; an id that is open starts anew. Raises ManagerError for what cannot be."""
        ...

    def close(self, request_id: int) -> None:
        """Forget a request; one that is not open is no news."""
        ...

    def __contains__(self, request_id: int) -> bool: ...

    def __len__(self) -> int: ...

    def take(self, record: Record, reply: Producer | None) -> Outcome:
        """Work on one batch frame. May write the answer straight into `reply`, if there is room.

        Raises CorruptFrameError, ColumnError, CodecError or DetokenizeError for a frame that has to
        be rejected whole.
        """
        ...


@dataclass(slots=True)
class _Output:
    """What is known of one request."""

    options: OutputOptions
    matcher: StopMatcher | None
    slot: int = -1
    """Of the decoder; -1 until the first chunk says whether output continues the prompt."""
    completion_count: int = 0


class PlainStep:
    """The step in Python, over any decoder; None: no tokenizer, ids pass through without text."""

    def __init__(self, decoder: BatchDecoder | None) -> None:
        self._decoder = decoder
        self._outputs: dict[int, _Output] = {}
        self.unknown_ids = 0

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._outputs

    def __len__(self) -> int:
        return len(self._outputs)

    def open(self, request_id: int, options: OutputOptions) -> None:
        """See DecodeStep.open."""
        matcher = None
        if options.stops or options.stop_regexes:
            matcher = StopMatcher(options.stops, keep=options.no_stop_trim, regexes=options.stop_regexes)
        self.close(request_id)
        self._outputs[request_id] = _Output(options, matcher)

    def close(self, request_id: int) -> None:
        """See DecodeStep.close."""
        output = self._outputs.pop(request_id, None)
        if output is not None and output.slot >= 0 and self._decoder is not None:
            self.unknown_ids += self._decoder.unknown_ids(output.slot)
            self._decoder.close(output.slot)

    def take(self, record: Record, reply: Producer | None) -> Outcome:  # noqa: ARG002 - see DecodeStep.take
        """See DecodeStep.take."""
        return self.take_rows(messages.BATCH.read(record), is_fresh=is_fresh(record))

    def take_rows(
        self, frame: Frame, *, is_fresh: bool, request_ids: Collection[int] | None = None
    ) -> Outcome:
        """Work on the rows of `request_ids`, which are open, as if there were no others; None: on all."""
        batch = Batch(frame)
        outcome = Outcome()
        wanted: Collection[int] = self._outputs if request_ids is None else request_ids
        left_out = [row for row, request_id in enumerate(batch.ids) if request_id not in wanted]
        if request_ids is None:
            outcome.unknown = [batch.ids[row] for row in left_out]
        batch.drop_rows(left_out)
        self._open_slots(batch, outcome, is_fresh=is_fresh)
        told_late = _late_rows(batch)  # before anything is decoded: what they hold is nobody's
        batch.drop_rows(told_late)
        outcome.late_rows = len(told_late)
        if not batch.ids:
            return outcome
        completion_counts = batch.counts.copy()  # before trimming: a stop token is counted and not shown
        outputs = [self._outputs[request_id] for request_id in batch.ids]
        _trim_stop_tokens(batch, outputs)
        texts = self._texts(batch, outputs, completion_counts.tolist(), outcome)
        late = _late_rows(batch)
        if late:
            outcome.late_rows += len(late)
            batch.drop_rows(late)
            kept = [row for row in range(len(texts)) if row not in late]
            texts = [texts[row] for row in kept]
            completion_counts = completion_counts[kept]
        outcome.rows = len(batch.ids)
        outcome.tokens = int(completion_counts.sum(dtype=np.int64))
        columns = (
            np.array(batch.ids, np.uint64),
            *messages.pack_bytes(texts),
            batch.counts,
            batch.tokens,
            completion_counts,
            batch.codes,
            *batch.finish_columns(),
        )
        outcome.replies.append((messages.TEXT, len(batch.ids), columns))
        outcome.ended = batch.ended()
        for request_id in outcome.ended:
            self.close(request_id)
        return outcome

    def _open_slots(self, batch: Batch, outcome: Outcome, *, is_fresh: bool) -> None:
        """Give new texts their decoder state. Those for which none is free are left out."""
        if self._decoder is None:
            return
        refused: set[int] = set()
        for request_id in batch.ids:
            output = self._outputs[request_id]
            if output.slot >= 0 or request_id in refused:
                continue
            options = output.options
            try:
                output.slot = self._decoder.open(
                    options.prompt_tail[:0] if is_fresh else options.prompt_tail,
                    skip_special_tokens=options.skip_special_tokens,
                    spaces_between_special_tokens=options.spaces_between_special_tokens,
                )
            except UnavailableError as error:
                outcome.problem = str(error)
                refused.add(request_id)
        if refused:
            rows = [row for row, request_id in enumerate(batch.ids) if request_id in refused]
            outcome.refused = [batch.ids[row] for row in rows]
            batch.drop_rows(rows)

    def _texts(
        self, batch: Batch, outputs: list[_Output], completion_counts: list[int], outcome: Outcome
    ) -> list[bytes]:
        """The text of every row, its stops and its end applied."""
        pieces = self._pieces(batch, outputs, completion_counts)
        texts = []
        ended: set[int] = set()
        codes = batch.codes.tolist()  # a list: to compare numpy's numbers with an enum takes microseconds
        for row, output in enumerate(outputs):
            if batch.ids[row] in ended:  # late
                texts.append(b"")
            elif output.matcher is None and codes[row] == FinishCode.NONE:
                output.completion_count += completion_counts[row]
                texts.append(pieces[row][1])
            else:
                texts.append(
                    self._finish_row(batch, row, output, pieces[row], completion_counts[row], outcome)
                )
                if int(batch.codes[row]) != FinishCode.NONE:
                    ended.add(batch.ids[row])
        return texts

    def _pieces(
        self, batch: Batch, outputs: list[_Output], completion_counts: list[int]
    ) -> list[tuple[bytes, bytes]]:
        """The text of every row in two: of the tokens that come too early for a stop, and of the others."""
        if self._decoder is None:
            return [(b"", b"")] * len(outputs)
        before = {id(output): output.completion_count for output in outputs}
        slots: list[int] = []
        counts: list[int] = []
        for output, shown, count in zip(outputs, batch.counts.tolist(), completion_counts, strict=True):
            unarmed = 0
            if output.matcher is not None:
                unarmed = min(shown, max(0, output.options.min_new_tokens - 1 - before[id(output)]))
            before[id(output)] += count
            slots += [output.slot, output.slot]
            counts += [unarmed, shown - unarmed]
        text, lengths = self._decoder.decode(
            np.array(slots, np.uint32), np.array(counts, np.uint32), batch.tokens
        )
        parts = messages.unpack_bytes(lengths, text)
        return list(zip(parts[::2], parts[1::2], strict=True))

    def _finish_row(
        self,
        batch: Batch,
        row: int,
        output: _Output,
        pieces: tuple[bytes, bytes],
        completion_count: int,
        outcome: Outcome,
    ) -> bytes:
        output.completion_count += completion_count
        reason = batch.reason(row)
        keep = output.options.no_stop_trim
        at_end = b""
        if reason is not None and self._decoder is not None:
            at_end = self._decoder.finish(output.slot)
        matched_by_scheduler = reason.matched() if reason is not None else None
        matcher = output.matcher
        if matcher is None:
            delta = b"".join(pieces) + at_end
        else:
            is_armed = output.completion_count >= output.options.min_new_tokens
            delta = b""
            for piece, armed in ((pieces[0], False), (pieces[1], True), (at_end, is_armed)):
                if not piece:
                    continue
                step = matcher.push(piece, armed=armed)
                delta += step.text
                if step.matched is not None:
                    # found here: the scheduler does not know of it and goes on until it is told
                    if reason is None:
                        outcome.stopped.append(batch.ids[row])
                    batch.set_reason(row, FinishReason.stop(step.matched))
                    return delta
            if reason is not None:
                delta += matcher.flush()
        if isinstance(matched_by_scheduler, str):
            delta = trim_at_stop(delta, matched_by_scheduler, keep)
        return delta


def is_fresh(record: Record) -> bool:
    """Whether the texts of a batch record do not continue their prompts."""
    return bool(record.flags & _FRESH_TEXT)


def _late_rows(batch: Batch) -> list[int]:
    """Rows behind the one that ended their request."""
    if not batch.codes.any():
        return []
    late, ended = [], set()
    for row, (request_id, code) in enumerate(zip(batch.ids, batch.codes.tolist(), strict=True)):
        if request_id in ended:
            late.append(row)
        elif code != FinishCode.NONE:
            ended.add(request_id)
    return late


def _trim_stop_tokens(batch: Batch, outputs: list[_Output]) -> None:
    """Drop the matched last id, unless the request keeps it. Id 0 is no match, as in SGLang."""
    starts = batch.starts()
    cut: list[int] = []
    for row in np.flatnonzero(batch.codes == FinishCode.STOP_TOKEN).tolist():
        last = int(starts[row + 1]) - 1
        matched = int(batch.values[row])
        if (
            not outputs[row].options.no_stop_trim
            and matched != 0
            and batch.counts[row]
            and batch.tokens[last] == matched
        ):
            cut.append(last)
            batch.counts[row] -= 1
    if cut:
        batch.tokens = np.delete(batch.tokens, cut)


class Batch:
    """The columns of one batch frame, copied, and its finishes found to be right."""

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
        # all of them before anything is delivered: a bad frame is rejected whole
        for row in np.flatnonzero(self.codes).tolist():
            self.reason(row)

    def starts(self) -> NDArray[np.int64]:
        """(n + 1,) where each row's tokens begin."""
        starts = np.zeros(len(self.counts) + 1, np.int64)
        np.cumsum(self.counts, out=starts[1:])
        return starts

    def reason(self, row: int) -> FinishReason | None:
        """Why the row's request has ended. Raises CodecError for what cannot be.

        Of a row that has not ended neither value nor details are looked at.
        """
        code = int(self.codes[row])
        if code == FinishCode.NONE:
            return None
        return finish.decode(code, int(self.values[row]), self.details.get(row, b""))

    def set_reason(self, row: int, reason: FinishReason) -> None:
        """End the row's request for another reason."""
        code, value, details = finish.encode(reason)
        self.codes[row], self.values[row] = code, value
        if details:
            self.details[row] = details
        else:
            self.details.pop(row, None)

    def drop_rows(self, rows: list[int]) -> None:
        """Leave these rows out, as if they had never been."""
        if not rows:
            return
        keep = np.ones(len(self.ids), bool)
        keep[rows] = False
        self.tokens = self.tokens[np.repeat(keep, self.counts)]
        kept = np.flatnonzero(keep).tolist()
        self.details = {new: self.details[old] for new, old in enumerate(kept) if old in self.details}
        self.ids = [self.ids[row] for row in kept]
        self.counts, self.codes, self.values = self.counts[keep], self.codes[keep], self.values[keep]

    def ended(self) -> list[int]:
        """Requests that end in this frame."""
        return [self.ids[row] for row in np.flatnonzero(self.codes).tolist()]

    def finish_columns(self) -> tuple[ColumnData, ...]:
        """Values and details; absent on a plain step."""
        values: Any = self.values if self.codes.any() else None
        if not self.details:
            return values, None, None
        return values, *messages.pack_bytes([self.details.get(row, b"") for row in range(len(self.ids))])
