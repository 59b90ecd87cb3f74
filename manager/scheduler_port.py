"""The scheduler's end of a deployment: what an engine author imports.

    port = SchedulerPort.attach("NAME")
    while port.wait(timeout_s=1.0) or True:
        arrivals = port.drain(max_requests=64)      # requests as columns, and aborts
        ...                                         # one decode step
        port.push_batch(request_ids, token_counts, token_ids, finish_codes, finish_values)

Each part of a batch goes straight into the ring of the worker that owns its requests, so there
is no dispatcher in between. A push waits while a ring is full and never drops anything: the
scheduler has already committed the output. Used by one thread.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import shmring
from manager import extras_frame, messages
from manager._egress import Dealer
from manager.arguments import as_bytes, request_number
from manager.batch_frame import batch_columns, batch_parts
from manager.columns import column
from manager.deployment import Manifest, egress_name, ingress_name, read_manifest, remove_leftovers
from manager.errors import DeploymentEndedError
from manager.extras import OPTIONS_DTYPE
from manager.finish import FINISH_CODES, FinishCode, check_end
from manager.frame_cut import parts_that_fit, select_rows
from manager.ids import shard_of, shards_of
from manager.running_batch import RowOrder, RunningBatch
from manager.sampling import SAMPLING_DTYPE
from shmring import Consumer, PeerState, Producer, WaitPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    import numpy.typing as npt
    from numpy.typing import NDArray
    from typing_extensions import Self

    from manager.extras import BatchExtras
    from manager.frame_cut import Columns, Frames
    from shmring import ColumnData, Schema

#: Seconds between two looks at the manager's life while nothing else happens.
CHECK_INTERVAL_S: Final = 0.25
_RECORDS_AT_ONCE: Final = 256
#: Bytes of an ERROR frame of one row beside its message: header, directory, id, length, padding.
_ERROR_OVERHEAD: Final = 64
#: Bytes of a record beside its payload, padding included.
_RECORD_OVERHEAD: Final = 16


@dataclass(frozen=True)
class Control:
    """A question to the scheduler, to be answered with `push_result`."""

    control_id: int
    payload: bytes


@dataclass(frozen=True)
class Arrivals:
    """What one drain brought. The arrays are copies: they are the engine's to keep."""

    request_ids: NDArray[np.uint64]
    """(n,) unique for the life of the deployment."""
    prompt_counts: NDArray[np.uint32]
    """(n,)"""
    prompt_ids: NDArray[np.int32]
    """(sum of prompt_counts,) all prompts back to back, every id in the vocabulary."""
    sampling: NDArray[np.void]
    """(n,) of SAMPLING_DTYPE."""
    stop_token_counts: NDArray[np.uint32]
    """(n,)"""
    stop_token_ids: NDArray[np.int32]
    """(sum of stop_token_counts,)"""
    options: NDArray[np.void]
    """(n,) of OPTIONS_DTYPE: what the requests want beside tokens."""
    token_id_logprob_counts: NDArray[np.uint32]
    """(n,)"""
    token_ids_logprob: NDArray[np.int32]
    """(sum of token_id_logprob_counts,) ids whose log probabilities are wanted at each place."""
    extras: list[bytes]
    """(n,) rare fields as msgpack, see `manager.sampling.decode_extras`; b"" for none."""
    attachments: list[bytes]
    """(n,) what the requests carry for the engine alone, see `manager.decode_attachments`; b"" for none."""
    rids: list[str]
    """(n,) the client's own names, for logs."""
    aborts: NDArray[np.uint64]
    """(m,) requests to drop. May name requests of this very drain, and unknown ones."""
    controls: list[Control]

    def __len__(self) -> int:
        return len(self.request_ids)


_IS_FINISH_CODE: Final = np.isin(np.arange(256), list(FINISH_CODES))


class SchedulerPort:
    """One scheduler's place in a deployment. Make it with `attach`."""

    def __init__(
        self,
        manifest: Manifest,
        ingress: Consumer,
        egress: Sequence[Producer],
        *,
        continues_prompt: bool = True,
    ) -> None:
        self.name = manifest.name
        self.shards = manifest.shards
        self.vocab_size = manifest.vocab_size
        self.context_length = manifest.context_length
        self.eos_token_ids = tuple(manifest.eos_token_ids)
        self._manifest = manifest
        self._ingress = ingress
        self._egress = tuple(egress)
        self._batch_flags = 0 if continues_prompt else int(messages.BatchFlag.FRESH_TEXT)
        self._dealer = Dealer(
            self._egress,
            tuple(producer.address for producer in self._egress),
            messages.BATCH.fingerprint,
            messages.BATCH.record_type,
            self._batch_flags,
        )

    @classmethod
    def attach(
        cls,
        name: str,
        timeout_s: float | None = 0,
        *,
        continues_prompt: bool = True,
        policy: WaitPolicy = WaitPolicy.BALANCED,
    ) -> Self:
        """Become the scheduler of the deployment `name`, waiting up to `timeout_s` for it to appear.

        `continues_prompt=False` says that output starts a text of its own instead of going on where
        the prompt ended. Raises shmring.SegmentNotFoundError (no such deployment),
        shmring.RoleTakenError (it has a living scheduler), shmring.LayoutMismatchError (another
        version), ConfigError (bad name).
        """
        manifest = _await_manifest(name, timeout_s)
        with contextlib.ExitStack() as undo:
            ingress = _take_ingress(name, policy)
            undo.callback(ingress.close)
            egress = []
            for shard in range(manifest.shards):
                producer = Producer.attach(egress_name(name, shard), takeover=True, policy=policy)
                undo.callback(producer.close)
                egress.append(producer)
            undo.pop_all()
        return cls(manifest, ingress, egress, continues_prompt=continues_prompt)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until there is something to drain (True) or `timeout_s` has passed (False).

        Raises DeploymentEndedError if the manager has gone, at most a second after it went.
        """
        seconds = shmring.check_timeout(timeout_s)
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            left = CHECK_INTERVAL_S if deadline is None else max(0.0, deadline - time.monotonic())
            if self._ingress.wait_until_readable(min(left, CHECK_INTERVAL_S)):
                return True
            self._check_manager()
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def beat(self) -> None:
        """Say that the scheduler is at work, in the midst of a long step without any other call here.

        Every other call says so by itself. Without one for `Settings.stalled_after_s` the manager's
        health calls the scheduler stalled; its requests go on.
        """
        self._ingress.beat()

    def drain(self, max_requests: int = 256) -> Arrivals:
        """Take what has arrived: at most `max_requests` requests, and the aborts up to there.

        Never waits. A record that cannot be read is dropped, and the requests it names are
        answered with an error. Raises DeploymentEndedError once the manager has gone and
        everything it left was taken.
        """
        frames: list[shmring.Frame] = []
        aborts: list[int] = []
        controls: list[Control] = []
        count = 0
        while count < max_requests:
            try:
                records = self._ingress.drain(min(_RECORDS_AT_ONCE, max_requests - count))
            except (shmring.EndOfRing, shmring.PeerLostError):
                if not (count or aborts or controls):
                    self._check_manager()
                break
            if not records:
                break
            for record in records:
                count += self._take(record, frames, aborts, controls)
        arrivals = _arrivals(frames, aborts, controls)
        # only now: the frames are views of the ring
        if self._ingress.read_position != self._ingress.position:
            self._ingress.release()
        return arrivals

    def _take(
        self,
        record: shmring.Record,
        frames: list[shmring.Frame],
        aborts: list[int],
        controls: list[Control],
    ) -> int:
        """Sort one record into its list; returns how many requests it brought."""
        try:
            if record.type == messages.IngressType.REQUEST:
                frame = messages.REQUEST.read(record)
                frames.append(frame)
                return frame.rows
            if record.type == messages.IngressType.ABORT:
                aborts.extend(messages.ABORT.read(record)["request_ids"].tolist())
                return 0
            if record.type == messages.IngressType.CONTROL:
                frame = messages.CONTROL.read(record)
                payloads = messages.unpack_bytes(frame["payloads_lengths"], frame["payloads"])
                ids = frame["control_ids"].tolist()
                controls.extend(Control(i, p) for i, p in zip(ids, payloads, strict=True))
        except (shmring.CorruptFrameError, shmring.ColumnError) as error:
            problem = str(error)
        else:
            if record.type == messages.IngressType.CONTROL:
                return 0
            problem = f"record has an unknown type: type={record.type}"
        for request_id in messages.recover_request_ids(record):
            self.push_error(request_id, f"invalid request: {problem}")
        return 0

    def push_batch(
        self,
        request_ids: npt.ArrayLike,
        token_counts: npt.ArrayLike,
        token_ids: npt.ArrayLike,
        finish_codes: npt.ArrayLike | None = None,
        finish_values: npt.ArrayLike | None = None,
        finish_details: Sequence[bytes] | None = None,
        *,
        extras: BatchExtras | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Hand over one decode step of n requests; waits while a worker's ring is full.

        request_ids (n,) uint64; token_counts (n,) uint32, 0 allowed; token_ids (sum,) int32, all
        requests' new ids back to back; finish_codes (n,) uint8 of FinishCode, None: nobody
        finished; finish_values (n,) int64, see FinishCode; finish_details n msgpack maps for the
        rows whose code is DETAILS; extras: log probabilities and hidden states, an entry a request
        in each family. Arrays of these dtypes are taken as they are, anything else is converted, and
        refused (ValueError) if that would change a value. A stop token is part of token_ids: the
        worker trims it. Raises TimeoutError, DeploymentEndedError.
        """
        if timeout_s is not None:
            timeout_s = shmring.check_timeout(timeout_s)
        ids = column("request_ids", request_ids, np.uint64)
        counts = column("token_counts", token_counts, np.uint32)
        tokens = column("token_ids", token_ids, np.int32)
        codes = None if finish_codes is None else column("finish_codes", finish_codes, np.uint8)
        values = None if finish_values is None else column("finish_values", finish_values, np.int64)
        if finish_details is not None:
            finish_details = [as_bytes("finish_details", item) for item in finish_details]
        if codes is not None:
            _check_codes(codes)
            _check_ends(codes, values, finish_details)
        ahead = {} if extras is None else self._deal_extras(ids, extras)
        if finish_details is None and not ahead:
            left = self._dealer.deal(ids, counts, tokens, codes, values)
            if left is None:
                return
        else:
            _check_lengths(ids, counts, tokens, codes, values, finish_details)
            left = list(range(self.shards))
        columns = batch_columns(ids, counts, tokens, codes, values, finish_details)
        self._push_left(left, columns, timeout_s, ahead)

    def _deal_extras(self, ids: NDArray[np.uint64], extras: BatchExtras) -> dict[int, Frames]:
        """By shard, cut into what its ring can take, before anything is sent. Raises ValueError."""
        columns = extras_frame.encode(ids, extras)
        if columns is None:
            return {}
        schema = messages.EXTRAS
        shards = shards_of(np.asarray(columns[0]), self.shards)
        dealt: dict[int, Frames] = {}
        for shard in np.unique(shards).tolist():
            mine = shards == shard
            part = select_rows(schema, columns, mine)
            length_max = self._egress[shard].payload_length_max
            parts = parts_that_fit(schema, int(mine.sum()), part, length_max)
            if parts is None:
                raise ValueError(
                    f"extras of one position never fit the ring: shard={shard}, max={length_max}"
                )
            dealt[shard] = parts
        return dealt

    def _push_left(
        self, left: list[int], columns: Columns, timeout_s: float | None, ahead: dict[int, Frames]
    ) -> None:
        """Give these shards their rows of a batch one after the other: waited for, and cut where too long.

        Raises ValueError, with nothing sent, for a row whose details no ring can take.
        """
        shards = shards_of(np.asarray(columns[0]), self.shards)
        dealt: list[tuple[int, int, Frames]] = []
        for shard in left:
            mine = shards == shard
            if not mine.any():
                continue
            part = select_rows(messages.BATCH, columns, mine)
            length = messages.BATCH.payload_length(*part) + _RECORD_OVERHEAD
            dealt.append((shard, length, list(batch_parts(part, self._egress[shard].payload_length_max))))
        for shard, _, frames in dealt:
            self._check_fits(shard, frames)
        for shard, length, frames in dealt:
            if shard in ahead:
                self._push_extras(shard, ahead[shard], length, timeout_s)
            for rows, fitting in frames:
                self._push_frame(shard, messages.BATCH, rows, fitting, self._batch_flags, timeout_s)

    def _check_fits(self, shard: int, frames: Frames) -> None:
        length_max = self._egress[shard].payload_length_max
        for _, columns in frames:
            length = messages.BATCH.payload_length(*columns)
            if length > length_max:
                raise ValueError(
                    "finish details of one request never fit the ring: "
                    f"request_id={np.asarray(columns[0])[0]}, length={length}, max={length_max}"
                )

    def _push_extras(self, shard: int, frames: Frames, batch_length: int, timeout_s: float | None) -> None:
        """Write what goes ahead of a batch, seen by the worker together with it if the ring can hold both.

        Waits for room for both first: a step that finds none in time has left nothing behind.
        """
        producer = self._egress[shard]
        schema = messages.EXTRAS
        length = batch_length + sum(
            schema.payload_length(*columns) + _RECORD_OVERHEAD for _, columns in frames
        )
        if producer.free_bytes() < length <= producer.payload_length_max:
            self._wait_for_room(producer, length, lambda: producer.free_bytes() >= length, timeout_s)
        for rows, columns in frames:
            self._push_frame(shard, schema, rows, columns, 0, timeout_s, publish=False)

    def running_batch(self, order: RowOrder = RowOrder.SWAP_LAST) -> RunningBatch:
        """Make a batch that keeps its requests from step to step; see `manager.running_batch`.

        `order`: what the engine does with its own rows when a request leaves.
        """
        if not isinstance(order, RowOrder):
            raise TypeError(f"order is a RowOrder: order={order!r}, type={type(order).__name__}")
        return RunningBatch(self._dealer, self.shards, order, self._push_left, self._deal_extras)

    def push_error(self, request_id: int, message: str, *, timeout_s: float | None = None) -> None:
        """End one request with an error that its client sees (class 400): a bad field of its own.

        A message that is longer than the ring is cut: the end must come through.
        """
        if not isinstance(message, str):
            raise TypeError(f"message is a text: type={type(message).__name__}")
        number, timeout_s = request_number("request_id", request_id), shmring.check_timeout(timeout_s)
        shard = shard_of(number, self.shards)
        length_max = self._egress[shard].payload_length_max - _ERROR_OVERHEAD
        lengths, text = messages.pack_bytes([message.encode("utf-8", "replace")[:length_max]])
        columns = (np.array([number], np.uint64), lengths, text)
        self._push_frame(shard, messages.ERROR, 1, columns, 0, timeout_s)

    def push_result(self, control_id: int, payload: bytes, *, timeout_s: float | None = None) -> None:
        """Answer a control request; `payload` is bytes."""
        lengths, data = messages.pack_bytes([as_bytes("payload", payload)])
        number, timeout_s = request_number("control_id", control_id), shmring.check_timeout(timeout_s)
        columns = (np.array([number], np.uint64), lengths, data)
        self._push_frame(shard_of(number, self.shards), messages.RESULT, 1, columns, 0, timeout_s)

    def _push_frame(
        self,
        shard: int,
        schema: Schema,
        rows: int,
        columns: tuple[ColumnData, ...],
        flags: int,
        timeout_s: float | None,
        *,
        publish: bool = True,
    ) -> None:
        producer = self._egress[shard]
        if schema.push(producer, rows, *columns, publish=publish, flags=flags):
            return
        producer.publish()  # room comes of what the worker can see
        self._wait_for_room(
            producer,
            schema.payload_length(*columns),
            lambda: schema.push(producer, rows, *columns, publish=publish, flags=flags),
            timeout_s,
        )

    def _wait_for_room(
        self, producer: Producer, length: int, again: Callable[[], bool], timeout_s: float | None
    ) -> None:
        """Wait for a worker, also while a dead one is being replaced; but not for a dead deployment."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = CHECK_INTERVAL_S if deadline is None else max(0.0, deadline - time.monotonic())
            shmring.wait_any([], min(left, CHECK_INTERVAL_S), producers=[(producer, length)])
            if again():
                return
            self._check_manager()
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"egress ring stayed full: ring={producer.name}, timeout_s={timeout_s}")

    def _check_manager(self) -> None:
        state = self._ingress.peer_state()
        if state is PeerState.FINISHED:
            raise DeploymentEndedError(f"the deployment has ended: name={self.name}", orderly=True)
        if state is PeerState.LOST:
            remove_leftovers(self._manifest)
            raise DeploymentEndedError(f"the manager has died: name={self.name}", orderly=False)

    def close(self) -> None:
        """Leave the deployment in good order; another scheduler may take the place. Twice is once."""
        self._ingress.close()
        for producer in self._egress:
            producer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _take_ingress(name: str, policy: WaitPolicy) -> Consumer:
    try:
        return Consumer.attach(ingress_name(name), policy=policy)
    except shmring.RoleTakenError as error:
        raise shmring.RoleTakenError(
            f"the deployment has a scheduler already: name={name}, pid={error.holder_pid}",
            role=error.role,
            holder_pid=error.holder_pid,
        ) from error


def _await_manifest(name: str, timeout_s: float | None) -> Manifest:
    """Wait also through a dead deployment's leftover: its successor will replace it."""
    seconds = shmring.check_timeout(timeout_s)
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return read_manifest(name, left)
        except DeploymentEndedError:
            if left == 0.0:
                raise
        time.sleep(0.02)


def _check_codes(codes: NDArray[np.uint8]) -> None:
    """Refuse a code that nobody knows here: further on it would cost the whole step."""
    known = _IS_FINISH_CODE[codes]
    if not known.all():
        row = int(np.argmin(known))
        raise ValueError(f"finish code is none of FinishCode: row={row}, code={codes[row]}")


def _check_ends(
    codes: NDArray[np.uint8], values: NDArray[np.int64] | None, details: Sequence[bytes] | None
) -> None:
    """Refuse values and details that the code of their row cannot have, for the same reason."""
    if any(given is not None and len(given) != len(codes) for given in (values, details)):
        return  # told with all the other lengths
    for row in np.flatnonzero(codes).tolist():
        value = 0 if values is None else int(values[row])
        check_end(row, int(codes[row]), value, b"" if details is None else details[row])


def _check_lengths(
    ids: NDArray[np.uint64],
    counts: NDArray[np.uint32],
    tokens: NDArray[np.int32],
    codes: NDArray[np.uint8] | None,
    values: NDArray[np.int64] | None,
    details: Sequence[bytes] | None,
) -> None:
    lengths = {
        "request_ids": len(ids),
        "token_counts": len(counts),
        "finish_codes": len(ids) if codes is None else len(codes),
        "finish_values": len(ids) if values is None else len(values),
        "finish_details": len(ids) if details is None else len(details),
    }
    if len(set(lengths.values())) > 1:
        raise ValueError(
            "columns differ in length: " + ", ".join(f"{name}={n}" for name, n in lengths.items())
        )
    total = int(counts.sum(dtype=np.int64))
    if total != len(tokens):
        raise ValueError(f"token_ids and token_counts disagree: token_ids={len(tokens)}, sum={total}")


def _arrivals(frames: list[shmring.Frame], aborts: list[int], controls: list[Control]) -> Arrivals:
    def join(name: str, dtype: npt.DTypeLike) -> NDArray[Any]:
        if not frames:
            return np.empty(0, dtype)
        return np.concatenate([frame[name] for frame in frames])

    extra_lengths = join("extras_lengths", np.uint32)
    attachment_lengths = join("attachments_lengths", np.uint32)
    rid_lengths = join("rids_lengths", np.uint32)
    return Arrivals(
        request_ids=join("request_ids", np.uint64),
        prompt_counts=join("prompt_counts", np.uint32),
        prompt_ids=join("prompt_ids", np.int32),
        sampling=join("sampling", SAMPLING_DTYPE),
        stop_token_counts=join("stop_token_counts", np.uint32),
        stop_token_ids=join("stop_token_ids", np.int32),
        options=join("options", OPTIONS_DTYPE),
        token_id_logprob_counts=join("token_id_logprob_counts", np.uint32),
        token_ids_logprob=join("token_ids_logprob", np.int32),
        extras=messages.unpack_bytes(extra_lengths, join("extras", np.uint8)),
        attachments=messages.unpack_bytes(attachment_lengths, join("attachments", np.uint8)),
        rids=[
            rid.decode("utf-8", "replace")
            for rid in messages.unpack_bytes(rid_lengths, join("rids", np.uint8))
        ],
        aborts=np.array(aborts, np.uint64),
        controls=controls,
    )


__all__ = ["Arrivals", "Control", "FinishCode", "SchedulerPort"]
