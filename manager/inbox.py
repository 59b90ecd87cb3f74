"""What the workers reply, turned into calls. A bad frame is rejected whole and the loop lives."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import numpy as np

import shmring
from manager import extras_frame, finish, messages
from manager.errors import CodecError, InternalError, ManagerError, UnavailableError, ValidationError

if TYPE_CHECKING:
    from manager.extras import Extras
    from manager.finish import FinishReason
    from shmring import Consumer, Frame, Record

log = logging.getLogger(__name__)


class ReplyReceiver(Protocol):
    """Who is told of what the workers say. Unknown ids are no news to it."""

    def on_text(
        self,
        request_id: int,
        text: str,
        token_ids: list[int],
        completion_count: int,
        reason: FinishReason | None,
    ) -> None:
        """More output of a request; `reason` with the last of it."""
        ...

    def on_extras(self, request_id: int, extras: Extras) -> None:
        """What belongs to the next output of a request; it may come in several pieces."""
        ...

    def on_fail(self, request_id: int, error: ManagerError) -> None:
        """A request ended with an error."""
        ...

    def on_abort_asked(self, request_id: int) -> None:
        """A worker wants the scheduler to drop a request."""
        ...

    def on_result(self, control_id: int, payload: bytes) -> None:
        """The scheduler answered a control request."""
        ...


class Inbox:
    """The consuming end of one worker's reply ring."""

    def __init__(self, reply: Consumer, receiver: ReplyReceiver) -> None:
        self._reply = reply
        self._receiver = receiver
        self.rejected_frames = 0

    def do_work(self, limit: int) -> int:
        """Take at most `limit` records; returns how many there were."""
        records = self._reply.drain(limit)
        for record in records:
            try:
                self._take(record)
            except (shmring.CorruptFrameError, shmring.ColumnError, ManagerError) as error:
                self._reject(record, error)
        if records:
            self._reply.release()
        return len(records)

    def _take(self, record: Record) -> None:
        receiver = self._receiver
        if record.type == messages.ReplyType.TEXT:
            self._take_text(messages.TEXT.read(record))
        elif record.type == messages.ReplyType.EXTRAS:
            for request_id, extras in extras_frame.decode(messages.REPLY_EXTRAS.read(record)):
                receiver.on_extras(request_id, extras)
        elif record.type == messages.ReplyType.FAIL:
            frame = messages.FAIL.read(record)
            texts = messages.unpack_bytes(frame["messages_lengths"], frame["messages"])
            rows = zip(frame["request_ids"].tolist(), frame["statuses"].tolist(), texts, strict=True)
            for request_id, status, text in rows:
                receiver.on_fail(request_id, _error_of(status, text.decode("utf-8", "replace")))
        elif record.type == messages.ReplyType.ABORT_ASKED:
            for request_id in messages.ABORT_ASKED.read(record)["request_ids"].tolist():
                receiver.on_abort_asked(request_id)
        elif record.type == messages.ReplyType.RESULT:
            frame = messages.REPLY_RESULT.read(record)
            payloads = messages.unpack_bytes(frame["payloads_lengths"], frame["payloads"])
            for control_id, payload in zip(frame["control_ids"].tolist(), payloads, strict=True):
                receiver.on_result(control_id, payload)
        else:
            raise CodecError(f"reply record has an unknown type: type={record.type}")

    def _take_text(self, frame: Frame) -> None:
        """Decode all rows before the first is handed over: a bad frame delivers nothing."""
        codes = frame["finish_codes"]
        values = frame["finish_values"].tolist()
        details: list[bytes] = []
        if "finish_details" in frame:
            details = messages.unpack_bytes(frame["finish_details_lengths"], frame["finish_details"])
        reasons = {
            row: finish.decode(
                int(codes[row]), values[row] if values else 0, details[row] if details else b""
            )
            for row in np.flatnonzero(codes).tolist()
        }
        try:
            texts = [text.decode() for text in messages.unpack_bytes(frame["texts_lengths"], frame["texts"])]
        except UnicodeDecodeError as error:
            raise CodecError(f"reply text is not UTF-8: why={error}") from error
        token_ids: list[int] = frame["token_ids"].tolist()
        start = 0
        rows = zip(
            frame["request_ids"].tolist(),
            texts,
            frame["token_counts"].tolist(),
            frame["completion_counts"].tolist(),
            strict=True,
        )
        for row, (request_id, text, token_count, completion_count) in enumerate(rows):
            end = start + token_count
            self._receiver.on_text(request_id, text, token_ids[start:end], completion_count, reasons.get(row))
            start = end

    def _reject(self, record: Record, error: Exception) -> None:
        self.rejected_frames += 1
        named = messages.recover_request_ids(record)
        if not named:
            log.error("reply frame was rejected and names no request, so they will hang: why=%s", error)
        for request_id in named:
            self._receiver.on_abort_asked(request_id)
            self._receiver.on_fail(request_id, InternalError(f"internal error: malformed reply: {error}"))


def _error_of(status: int, text: str) -> ManagerError:
    for kind in (ValidationError, UnavailableError):
        if status == kind.status:
            return kind(text)
    return InternalError(text)
