"""The consuming end of a ring. It alone moves `head`.

Invariant: head <= read <= tail. What was drained stays where it is until release(); a process
that dies in between leaves it to the next consumer, which gets it again. "Empty" is an answer
(None, an empty list), not an error. One thread at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING

from shmring._fast import ConsumerCore
from shmring.aio import waiter_of_loop
from shmring.end import Attachment, PeerState, producer_state
from shmring.errors import EndOfRing
from shmring.layout import Role
from shmring.segment import attach_mapping
from shmring.statistics import RingStatistics, statistics_of
from shmring.waiter import Deadline, WaitPolicy, check_policy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from types import TracebackType

    from typing_extensions import Self

    from shmring._fast import Record
    from shmring.segment import Mapping


#: Records that `async for` takes from a full ring before other tasks of the loop have their turn.
RECORDS_AT_ONCE = 64


class Consumer(ConsumerCore):
    """The consuming end. Make one with `Consumer.attach(name)` or `ring.consumer()`."""

    _attachment: Attachment
    _policy: WaitPolicy
    _takeover: bool

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        timeout_s: float | None = 0,
        policy: WaitPolicy = WaitPolicy.BALANCED,
        takeover: bool = False,
        poison: bool = False,
    ) -> Self:
        """Take the consuming end of the ring `name`, waiting up to `timeout_s` for it to be made.

        `takeover`: a producer that went will be replaced by another, so its end is no error here;
        ask `peer_state()`. `poison`: overwrite released bytes, so that a use after release shows; the
        environment variable SHMRING_POISON=1 says so for every consumer.
        Raises RoleTakenError if a living process is the consumer, and what `attach_mapping` raises.
        """
        mapping = attach_mapping(name, writable=True, timeout_s=timeout_s)
        return cls._of(mapping, policy, takeover=takeover, poison=poison)

    @classmethod
    def _of(cls, mapping: Mapping, policy: WaitPolicy, *, takeover: bool, poison: bool) -> Self:
        consumer = cls.__new__(cls)
        poison = poison or os.environ.get("SHMRING_POISON", "0") not in ("", "0")

        def open_core(m: Mapping) -> None:
            check_policy(policy)
            consumer._open(
                m.header_address,
                m.capacity,
                m.handle.fd,
                os.getpid(),
                takeover,
                poison,
                policy.value,
                m.buffer,
            )

        consumer._attachment = Attachment(consumer, mapping, Role.CONSUMER, open_core)
        consumer._policy = policy
        consumer._takeover = takeover
        return consumer

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

    def __iter__(self) -> Iterator[bytes]:
        """Yield every record as bytes until the producer finishes."""
        while True:
            try:
                record = self.pop()
            except EndOfRing:
                return
            assert record is not None, "pop without a timeout returns a record or raises"
            yield record

    async def pop_async(self, timeout_s: float | None = None) -> bytes | None:
        """As pop, while the event loop goes on. Cancelling it takes nothing out of the ring.

        While records are there it does not give way to other tasks; `async for` does.
        """
        deadline = Deadline(timeout_s)
        while True:
            record = self.try_pop()
            if record is not None or not await self._is_readable_async(timeout_s, deadline):
                return record

    async def drain_async(self, max_records: int, timeout_s: float | None = None) -> list[Record]:
        """As drain, waiting up to `timeout_s` for the first record while the event loop goes on."""
        deadline = Deadline(timeout_s)
        while True:
            records = self.drain(max_records)
            if records or not await self._is_readable_async(timeout_s, deadline):
                return records

    async def _is_readable_async(self, timeout_s: float | None, deadline: Deadline) -> bool:
        """Wait until a try is worth it. False: the time is over."""
        left_s = None if timeout_s is None else deadline.left_s()
        if left_s == 0:
            return False
        return await (await waiter_of_loop()).wait_until_readable(self, left_s)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield every record as bytes until the producer finishes, while the event loop goes on."""
        for number in itertools.count(1):
            try:
                record = await self.pop_async()
            except EndOfRing:
                return
            assert record is not None, "pop_async without a timeout returns a record or raises"
            yield record
            if number % RECORDS_AT_ONCE == 0:
                await asyncio.sleep(0)  # a producer that is faster than we are must not stop the loop

    def peer_state(self) -> PeerState:
        """What is known of the producer. One system call."""
        return producer_state(self.address)

    def _is_peer_lost(self) -> bool:
        """Tell whether a wait is in vain: the producer died, and no other is expected."""
        return not self._takeover and self.is_open and self.peer_state() is PeerState.LOST

    def statistics(self) -> RingStatistics:
        """The ring's counters as they stand."""
        return statistics_of(self._attachment.mapping)

    def close(self) -> None:
        """Finish: the producer sees the end. What was not released stays in the ring. Twice is once."""
        self._close()
        self._attachment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
