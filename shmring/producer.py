"""The producing end of a ring. It alone moves `tail`.

Invariant: head <= tail <= head + capacity. Positions only grow. "Full" is an answer
(False, None), not an error: the caller decides whether to wait, refuse or abort.
One thread at a time; another process cannot take the end while this one lives.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from shmring._fast import ProducerCore
from shmring.aio import waiter_of_loop
from shmring.end import Attachment, PeerState, consumer_state
from shmring.errors import ClaimError, RecordTooLargeError, RingClosedError
from shmring.layout import Role
from shmring.segment import attach_mapping, check_timeout
from shmring.statistics import RingStatistics, statistics_of
from shmring.waiter import CHECK_INTERVAL_S, Deadline, WaitPolicy, WaitSet, check_policy

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Buffer, Self

    from shmring.segment import Mapping


def payload_length_max_of(capacity: int) -> int:
    """Bytes of the largest payload that fits a ring of `capacity` bytes: a record's length is a u32."""
    return min(capacity, 0xFFFFFFF0) - 8


class Claim:
    """Room in the ring that nobody else sees yet.

    As a context manager it commits and publishes at the end of the block, and gives
    everything back if the block raises.
    """

    __slots__ = ("_claimed", "_is_open", "_number", "_producer", "payload")

    def __init__(self, producer: Producer, payload: memoryview) -> None:
        self._producer = producer
        self._number = producer._claims
        #: Writable bytes in place, as many as were claimed. Released by commit, abort and the producer's
        #: discard: what is written later would change a record that the consumer may be reading.
        self.payload = payload
        self._claimed = len(payload)
        self._is_open = True

    def commit(self, length: int | None = None, type: int = 0, flags: int = 0) -> None:
        """Make a record of the first `length` bytes (default: all) and publish it."""
        producer = self._producer_if_open()
        producer._commit(self._length(length), type, flags)
        self._close()
        producer.publish()

    def append(self, length: int | None = None, type: int = 0, flags: int = 0) -> None:
        """As commit, but seen only after the producer's publish()."""
        self._producer_if_open()._commit(self._length(length), type, flags)
        self._close()

    def abort(self) -> None:
        """Give all of it back. Nobody has seen anything."""
        self._producer_if_open()._abort()
        self._close()

    def _length(self, length: int | None) -> int:
        if length is None:
            return self._claimed
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"length is an int: length={length!r}")
        if not 0 <= length <= self._claimed:
            raise RecordTooLargeError(
                f"commit is longer than its claim: length={length}, max={self._claimed}",
                length=length,
                length_max=self._claimed,
            )
        return length

    def _producer_if_open(self) -> Producer:
        # the producer may have discarded this one and claimed again: not ours to commit
        if not self._is_open or self._number != self._producer._claims:
            raise ClaimError("the claim was given back already")
        return self._producer

    def _close(self) -> None:
        self._is_open = False
        try:  # noqa: SIM105 -- contextlib.suppress would be a third of a commit
            self.payload.release()
        except BufferError:  # an array over it still lives: its maker knows
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_open:
            return
        if kind is None:
            self.commit()
            return
        # the block may have closed the producer or discarded the claim; its own error says more
        with contextlib.suppress(RingClosedError, ClaimError):
            self.abort()


class Producer(ProducerCore):
    """The producing end. Make one with `Producer.attach(name)` or `ring.producer()`."""

    _attachment: Attachment
    _policy: WaitPolicy
    _takeover: bool
    _claims: int
    """Claims taken so far: tells a claim that was discarded from the one that is open."""
    _payload_length_max: int
    _payload: memoryview
    """Of the last claim."""

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        timeout_s: float | None = 0,
        policy: WaitPolicy = WaitPolicy.BALANCED,
        takeover: bool = False,
    ) -> Self:
        """Take the producing end of the ring `name`, waiting up to `timeout_s` for it to be made.

        `takeover`: a consumer that went will be replaced by another, so its end is no error here;
        ask `peer_state()`. Raises RoleTakenError if a living process is the producer, and what
        `attach_mapping` raises.
        """
        return cls._of(attach_mapping(name, writable=True, timeout_s=timeout_s), policy, takeover=takeover)

    @classmethod
    def _of(cls, mapping: Mapping, policy: WaitPolicy, *, takeover: bool) -> Self:
        producer = cls.__new__(cls)

        def open_core(m: Mapping) -> None:
            check_policy(policy)
            producer._open(
                m.header_address, m.capacity, m.handle.fd, os.getpid(), takeover, policy.value, m.buffer
            )

        producer._attachment = Attachment(producer, mapping, Role.PRODUCER, open_core)
        producer._policy = policy
        producer._takeover = takeover
        producer._claims = 0
        producer._payload_length_max = payload_length_max_of(mapping.capacity)
        return producer

    @property
    def name(self) -> str:
        """The ring's name."""
        return self._attachment.name

    @property
    def is_retired(self) -> bool:
        """True once the ring's name is gone, or leads to another ring made in its place."""
        return self._attachment.mapping.is_retired

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the data area."""
        return self._attachment.mapping.capacity

    @property
    def payload_length_max(self) -> int:
        """Bytes of the largest payload that can ever fit."""
        return self._payload_length_max

    def try_claim(self, length: int) -> Claim | None:
        """Room for a payload of `length` bytes to be written in place. None: no room now."""
        # whatever is no plain length is told apart there
        if type(length) is not int or not 0 <= length <= self._payload_length_max:
            self._check_length(length)
        window = self._claim(length)
        if window is None:
            return None
        self._claims += 1
        self._payload = memoryview(window)
        return Claim(self, self._payload)

    def _check_length(self, length: int) -> None:
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"length is an int: length={length!r}")
        if length < 0:
            raise ValueError(f"length is not negative: length={length}")
        if length > self.payload_length_max:
            raise RecordTooLargeError(
                f"record can never fit: length={length}, max={self.payload_length_max}",
                length=length,
                length_max=self.payload_length_max,
            )

    def _check_wait(self, length: int) -> None:
        """Raise if room for `length` cannot come while we wait: the consumer frees what it can see."""
        self._check_length(length)
        needed, unpublished = (length + 15) & ~7, self.unpublished_bytes
        if needed + unpublished > self.capacity_bytes:
            raise ClaimError(
                "unpublished records leave no room to wait for: publish() or discard() them first: "
                f"needed={needed}, unpublished={unpublished}, capacity={self.capacity_bytes}"
            )

    def claim(self, length: int, timeout_s: float | None = None) -> Claim | None:
        """As try_claim, waiting for room up to `timeout_s`. None: still full."""
        check_timeout(timeout_s)
        claim = self.try_claim(length)
        if claim is not None:
            return claim
        found: list[Claim] = []

        def again() -> bool:
            claim = self.try_claim(length)
            if claim is not None:
                found.append(claim)
            return claim is not None

        return found[0] if self._wait_for(length, timeout_s, again) else None

    def wait_until_writable(self, length: int, timeout_s: float | None = None) -> bool:
        """Wait until a payload of `length` bytes has room. False: `timeout_s` has passed."""
        check_timeout(timeout_s)
        self._check_length(length)

        def has_room() -> bool:
            return self._has_room(length)

        return has_room() or self._wait_for(length, timeout_s, has_room)

    def _wait_for(self, length: int, timeout_s: float | None, again: Callable[[], bool]) -> bool:
        deadline = Deadline(timeout_s)
        if deadline.left_s() == 0:
            return False
        spin_ns = self._policy.value
        with WaitSet(producers=[(self, length)]) as waitset:
            while not deadline.is_over:
                waitset.wait_slice(min(deadline.left_s(), CHECK_INTERVAL_S), spin_ns)
                # tried after a silent slice too: the try asks whether the peer still lives
                if again():
                    return True
                spin_ns = 0
        return False

    async def push_async(
        self, payload: Buffer, timeout_s: float | None = None, type: int = 0, flags: int = 0
    ) -> bool:
        """As push, while the event loop goes on. Cancelled, it has pushed nothing.

        The payload is read when there is room: leave it as it is until then.
        """
        deadline = Deadline(timeout_s)
        while not self.try_push(payload, type, flags):
            left_s = None if timeout_s is None else deadline.left_s()
            if left_s == 0:
                return False
            length = memoryview(payload).nbytes
            await (await waiter_of_loop()).wait_until_writable(self, length, left_s)
        return True

    def peer_state(self) -> PeerState:
        """What is known of the consumer. One system call."""
        return consumer_state(self.address)

    def _is_peer_lost(self) -> bool:
        """Tell whether a wait is in vain: the consumer died, and no other is expected."""
        return not self._takeover and self.is_open and self.peer_state() is PeerState.LOST

    def statistics(self) -> RingStatistics:
        """The ring's counters as they stand."""
        return statistics_of(self._attachment.mapping)

    def close(self) -> None:
        """Finish: the consumer takes what is there and then sees the end. Twice is once.

        What was appended and not published is given back, and the payload of an open claim released:
        the bytes are the next producer's.
        """
        self._release_payload()
        self._close()
        self._attachment.close()

    def discard(self) -> None:
        """Give back what was appended or claimed and not published; releases the payload of an open claim."""
        super().discard()
        self._release_payload()

    def _release_payload(self) -> None:
        if self._claims:
            with contextlib.suppress(BufferError):  # an array over it still lives: its maker knows
                self._payload.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
