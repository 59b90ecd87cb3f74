"""The manager's way to the rings: it only ever tries, and keeps what did not fit.

The manager waits for nobody, so that no circle of full rings can lock. New requests are refused
when a ring is full; aborts and deregistrations are kept and tried again, in order, ahead of
everything new. What is kept is bounded by the number of requests in flight.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

import shmring
from manager import messages
from manager.errors import InternalError, QueueFullError, ValidationError
from manager.extras import NOTHING_ASKED, OPTIONS_DTYPE, ExtrasAsked
from manager.finish import FinishCode
from manager.ids import shard_of
from manager.sampling import SAMPLING_DTYPE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from manager.sampling import NormalizedSampling
    from shmring import ColumnData, Producer, Schema

log = logging.getLogger(__name__)

_IDS_AT_ONCE: Final = 256
#: Bytes of a registration without stops, and of what its record and that of a decode have beside ids.
_DECODE_OVERHEAD: Final = 512


@dataclass(frozen=True)
class Dispatch:
    """A request that is ready to go."""

    request_id: int
    rid: str
    prompt_ids: NDArray[np.int32]
    """(n,) int32, n >= 1, checked."""
    prompt_tail: NDArray[np.int32]
    """The last few of them, for the decoder."""
    sampling: NormalizedSampling
    asked: ExtrasAsked = NOTHING_ASKED
    attachments: bytes = b""
    """Packed; the engine's business alone."""


class Outbox:
    """The producing ends of the manager: the ingress ring and one register ring a shard."""

    def __init__(self, ingress: Producer, registers: Sequence[Producer]) -> None:
        self._ingress = ingress
        self._registers = tuple(registers)
        self._aborts: deque[int] = deque()
        self._deregistrations: tuple[deque[int], ...] = tuple(deque() for _ in registers)

    @property
    def kept_count(self) -> int:
        """Aborts and deregistrations that did not fit yet."""
        return len(self._aborts) + sum(map(len, self._deregistrations))

    def send(self, dispatch: Dispatch) -> None:
        """Register the request with its shard, then give it to the scheduler: in this order.

        A worker must know of a request before its first chunk can come. Raises QueueFullError,
        with nothing left behind.
        """
        shard = shard_of(dispatch.request_id, len(self._registers))
        self.flush()
        if self._aborts or self._deregistrations[shard]:
            # they were here first, and a new request must not make them wait
            raise QueueFullError("rings are full: aborts are waiting for room")
        if not self._register(shard, dispatch):
            raise QueueFullError(f"register ring is full: shard={shard}")
        if not self._push_request(dispatch):
            self.deregister(dispatch.request_id)
            raise QueueFullError("ingress ring is full: the scheduler is behind")

    def decode(
        self,
        request_id: int,
        token_ids: NDArray[np.int32],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> None:
        """Register ids with their shard and have them decoded: both, or neither.

        Raises QueueFullError, and ValidationError for more ids than a register ring ever takes.
        """
        shard = shard_of(request_id, len(self._registers))
        producer = self._registers[shard]
        count_max = max(0, producer.payload_length_max - _DECODE_OVERHEAD) // token_ids.itemsize
        if len(token_ids) > count_max:
            raise ValidationError(
                f"token_ids do not fit the register ring: count={len(token_ids)}, max={count_max}",
                field="token_ids",
            )
        self.flush()
        if self._deregistrations[shard]:
            raise QueueFullError("rings are full: deregistrations are waiting for room")
        ids = np.array([request_id], np.uint64)
        output = (0, skip_special_tokens, spaces_between_special_tokens, False, False)
        if not (
            _push_registration(producer, request_id, output, token_ids[:0], b"", publish=False)
            and _push(
                messages.DECODE,
                producer,
                1,
                ids,
                np.array([len(token_ids)], np.uint32),
                token_ids,
                np.array([FinishCode.STOP], np.uint8),
                None,
                None,
                None,
            )
        ):
            producer.discard()
            raise QueueFullError(f"register ring is full: shard={shard}")

    def ask(self, control_id: int, payload: bytes) -> None:
        """Put a question to the scheduler. Raises QueueFullError, or ValidationError if it never fits."""
        lengths, data = messages.pack_bytes([payload])
        ids = np.array([control_id], np.uint64)
        beside = messages.CONTROL.payload_length(ids, lengths, data[:0])
        length_max = self._ingress.payload_length_max - beside
        if len(payload) > length_max:
            raise ValidationError(
                f"payload does not fit the ingress ring: length={len(payload)}, max={length_max}",
                field="payload",
            )
        if not _push(messages.CONTROL, self._ingress, 1, ids, lengths, data):
            raise QueueFullError("ingress ring is full: the scheduler is behind")

    def abort(self, request_id: int) -> None:
        """Tell the scheduler to drop a request. Never lost: kept until there is room."""
        self._aborts.append(request_id)
        self._flush_aborts()

    def deregister(self, request_id: int) -> None:
        """Tell the shard that a request has ended elsewhere."""
        shard = shard_of(request_id, len(self._registers))
        self._deregistrations[shard].append(request_id)
        self._flush_deregistrations(shard)

    def flush(self) -> int:
        """Try again what was kept; returns how many are still kept."""
        self._flush_aborts()
        for shard in range(len(self._registers)):
            self._flush_deregistrations(shard)
        return self.kept_count

    def _flush_aborts(self) -> None:
        while self._aborts:
            ids = _head(self._aborts)
            if not self._try(messages.ABORT, self._ingress, ids, self._aborts):
                return

    def _flush_deregistrations(self, shard: int) -> None:
        kept = self._deregistrations[shard]
        while kept:
            ids = _head(kept)
            if not self._try(messages.DEREGISTER, self._registers[shard], ids, kept):
                return

    def _try(self, schema: Schema, producer: Producer, ids: NDArray[np.uint64], kept: deque[int]) -> bool:
        """Push kept ids. Through a damaged ring nobody can be told, and nothing is kept for it."""
        try:
            if not _push(schema, producer, len(ids), ids):
                return False
        except InternalError as error:
            log.error("ids cannot be sent: count=%d, why=%s", len(kept), error)  # noqa: TRY400 - the text says it
            kept.clear()
            return False
        _drop(kept, len(ids))
        return True

    def _register(self, shard: int, dispatch: Dispatch) -> bool:
        sampling, params = dispatch.sampling, dispatch.sampling.params
        output = (
            params.min_new_tokens,
            params.skip_special_tokens,
            params.spaces_between_special_tokens,
            params.no_stop_trim,
            dispatch.asked.logprob_texts,
        )
        stops = messages.pack_stops(sampling.stop_strs, sampling.stop_regex_strs)
        return _push_registration(
            self._registers[shard], dispatch.request_id, output, dispatch.prompt_tail, stops
        )

    def _push_request(self, dispatch: Dispatch) -> bool:
        sampling = dispatch.sampling
        extra_lengths, extras = messages.pack_bytes([sampling.extras()])
        rid_lengths, rids = messages.pack_bytes([dispatch.rid.encode()])
        return _push(
            messages.REQUEST,
            self._ingress,
            1,
            np.array([dispatch.request_id], np.uint64),
            np.array([len(dispatch.prompt_ids)], np.uint32),
            dispatch.prompt_ids,
            np.array([sampling.to_row()], SAMPLING_DTYPE),
            np.array([len(sampling.stop_token_ids)], np.uint32),
            np.array(sampling.stop_token_ids, np.int32),
            np.array([dispatch.asked.to_row()], OPTIONS_DTYPE),
            np.array([len(dispatch.asked.token_ids_logprob)], np.uint32),
            np.array(dispatch.asked.token_ids_logprob, np.int32),
            extra_lengths,
            extras,
            *messages.pack_bytes([dispatch.attachments]),
            rid_lengths,
            rids,
        )

    def close(self) -> None:
        """Finish all ends: the scheduler and the workers take what is there and see the end."""
        self._ingress.close()
        for register in self._registers:
            register.close()


def _push_registration(
    producer: Producer,
    request_id: int,
    output: tuple[int, bool, bool, bool, bool],
    prompt_tail: NDArray[np.int32],
    stops: bytes,
    *,
    publish: bool = True,
) -> bool:
    """`output`: a row of OUTPUT_DTYPE. `stops`: see `messages.pack_stops`."""
    return _push(
        messages.REGISTER,
        producer,
        1,
        np.array([request_id], np.uint64),
        np.array([output], messages.OUTPUT_DTYPE),
        np.array([len(prompt_tail)], np.uint32),
        prompt_tail,
        *messages.pack_bytes([stops]),
        publish=publish,
    )


def _push(schema: Schema, producer: Producer, rows: int, *columns: ColumnData, publish: bool = True) -> bool:
    """Push a frame; a damaged ring is an error of ours that ends the request and not the manager."""
    try:
        return schema.push(producer, rows, *columns, publish=publish)
    except shmring.CorruptRingError as error:
        raise InternalError(f"ring is damaged: ring={producer.name}, why={error}") from error


def _head(kept: deque[int]) -> NDArray[np.uint64]:
    count = min(len(kept), _IDS_AT_ONCE)
    return np.fromiter((kept[i] for i in range(count)), np.uint64, count)


def _drop(kept: deque[int], count: int) -> None:
    for _ in range(count):
        kept.popleft()
