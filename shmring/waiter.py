"""Waiting for a ring: how long to spin, when to sleep, and several rings with one system call.

The sleep itself is in C and releases the GIL. It is cut into slices, so that a dead peer is
noticed and a signal handler runs; in between, nothing is polled.
"""

from __future__ import annotations

import enum
import errno
import time
from typing import TYPE_CHECKING, NoReturn

from shmring._fast import ConsumerCore, ProducerCore
from shmring._native import ffi, lib
from shmring.errors import Answer, CorruptRingError, RingClosedError, ShmringError
from shmring.segment import check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from shmring.consumer import Consumer
    from shmring.producer import Producer

#: Seconds between two looks at the peer's life, and the longest that Ctrl-C may have to wait.
CHECK_INTERVAL_S = float(lib.SHR_CHECK_INTERVAL_NS) / 1e9
WAIT_MAX = int(lib.SHR_WAIT_MAX)


class WaitPolicy(enum.Enum):
    """How a waiting side spends its time. The value is the nanoseconds it spins before it sleeps.

    A wake-up costs 5 to 50 us, so spinning for about that long wins whenever the next record
    comes sooner, and loses no more than that when it does not.
    """

    LATENCY = 200_000
    BALANCED = 10_000
    THRIFTY = 0


def check_policy(policy: object) -> None:
    """Raise TypeError for what is no WaitPolicy."""
    if not isinstance(policy, WaitPolicy):
        raise TypeError(f"policy is none: type={type(policy).__name__}")


class Bell:
    """Lets another thread of this process end a wait."""

    def __init__(self) -> None:
        self._bell = ffi.new("shr_bell *")

    def ring(self) -> None:
        """End the wait that is going on, or the next one. Safe from any thread."""
        lib.shr_bell_ring(self._bell)

    @property
    def is_rung(self) -> bool:
        """True until the next answer if it was rung."""
        return bool(lib.shr_bell_is_rung(self._bell))

    def answer(self) -> bool:
        """True if it was rung since the last answer."""
        return bool(lib.shr_bell_answer(self._bell))


def _check_ends(
    consumers: Sequence[object], producers: Sequence[tuple[object, object]], bell: object
) -> None:
    """Refuse what is no end before anything of it is used."""
    for consumer in consumers:
        if not isinstance(consumer, ConsumerCore):
            raise TypeError(f"consumers holds what is none: type={type(consumer).__name__}")
    for pair in producers:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], ProducerCore):
            raise TypeError(f"producers holds what is no pair of a producer and a length: value={pair!r}")
    if bell is not None and not isinstance(bell, Bell):
        raise TypeError(f"bell is none: type={type(bell).__name__}")


class WaitSet:
    """Ring ends that are awaited together: consumers for something to read, producers for room.

    As a context manager it is one wait, whatever the number of slices: the statistics show from
    its start to its end that these ends wait.
    """

    def __init__(
        self,
        consumers: Sequence[Consumer] = (),
        producers: Sequence[tuple[Producer, int]] = (),
        bell: Bell | None = None,
    ) -> None:
        _check_ends(consumers, producers, bell)
        if not consumers and not producers and bell is None:
            raise ValueError("nothing to wait for: rings=0")
        if len(consumers) + len(producers) > WAIT_MAX:
            rings = len(consumers) + len(producers)
            raise ValueError(f"too many rings in one wait: rings={rings}, max={WAIT_MAX}")
        for producer, need in producers:
            producer._check_wait(need)
        self._keep = (tuple(consumers), tuple(p for p, _ in producers), bell)
        self._consumers = ffi.new(
            "shr_consumer *[]", [ffi.cast("shr_consumer *", c.address) for c in consumers]
        )
        self._producers = ffi.new(
            "shr_producer *[]", [ffi.cast("shr_producer *", p.address) for p, _ in producers]
        )
        self._needs = ffi.new("uint64_t[]", [need for _, need in producers])
        self._bell = ffi.NULL if bell is None else bell._bell
        self._counts = (len(consumers), len(producers))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lib.shr_wait_over(self._consumers, self._counts[0], self._producers, self._counts[1])

    def has_lost_peer(self) -> bool:
        """Tell whether the process at the other end of one of them died. One system call a ring."""
        consumers, producers, _ = self._keep
        return any(c._is_peer_lost() for c in consumers) or any(p._is_peer_lost() for p in producers)

    def states(self) -> list[tuple[Consumer | Producer, ShmringError | None]]:
        """Look at each end: those that have something to try, and what is wrong where something is.

        An end whose peer has finished or died is one to try: the try says so.
        """
        consumers, producers, _ = self._keep
        found: dict[Consumer | Producer, ShmringError | None] = {}
        for i, consumer in enumerate(consumers):
            self._look(consumer, lib.shr_readable(self._consumers[i]), consumer.is_readable, found)
        for i, producer in enumerate(producers):
            answer = lib.shr_writable(self._producers[i], self._needs[i])
            self._look(producer, answer, producer.free_bytes, found)
        return list(found.items())

    def ready(self) -> list[Consumer | Producer | Bell]:
        """List the ends to try, and the bell if it was rung. Raises what is wrong with any."""
        ready: list[Consumer | Producer | Bell] = []
        for end, problem in self.states():
            if problem is not None:
                raise problem
            ready.append(end)
        bell = self._keep[2]
        if bell is not None and bell.is_rung:
            ready.append(bell)
        return ready

    @staticmethod
    def _look(
        end: Consumer | Producer,
        answer: int,
        again: Callable[[], object],
        found: dict[Consumer | Producer, ShmringError | None],
    ) -> None:
        if answer in (Answer.CORRUPT, Answer.UNUSABLE):
            try:
                again()
            except ShmringError as error:
                found[end] = error
        elif answer != Answer.NOT_NOW or end._is_peer_lost():
            found[end] = None

    def wait_slice(self, timeout_s: float, spin_ns: int) -> bool:
        """Wait once, at most `timeout_s`. False: nothing yet, or a signal came.

        True also when a peer has finished: the caller's next try says so.
        """
        answer: int = lib.shr_wait(
            self._consumers,
            self._counts[0],
            self._producers,
            self._needs,
            self._counts[1],
            self._bell,
            spin_ns,
            int(timeout_s * 1e9),
        )
        if answer in (Answer.NOT_NOW, -errno.EINTR):
            return False
        if answer == Answer.UNUSABLE:
            raise RingClosedError("an end in this wait is closed, or belongs to the process that forked us")
        if answer == Answer.CORRUPT:
            self._raise_corrupt()
        return True

    def _raise_corrupt(self) -> NoReturn:
        """Ask each end: the one whose segment is damaged raises with what it found."""
        consumers, producers, _ = self._keep
        for consumer in consumers:
            consumer.is_readable()
        for producer in producers:
            producer.free_bytes()
        raise CorruptRingError("segment said what cannot be, and no longer does", position=0, found=0)


class Deadline:
    """A point in time that a wait ends at, or never."""

    def __init__(self, timeout_s: float | None) -> None:
        timeout_s = check_timeout(timeout_s)
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds until then, not negative; the check interval when there is no end."""
        return CHECK_INTERVAL_S if self._at is None else max(0.0, self._at - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Tell whether it has passed."""
        return self._at is not None and time.monotonic() >= self._at


def wait_any(
    consumers: Sequence[Consumer],
    timeout_s: float | None = None,
    *,
    producers: Sequence[tuple[Producer, int]] = (),
    bell: Bell | None = None,
    policy: WaitPolicy = WaitPolicy.BALANCED,
) -> list[Consumer | Producer | Bell]:
    """Wait until one of several rings has something to read, or room, with one system call.

    `producers` are pairs of a producer and the payload bytes it wants room for. Returns the ends to try,
    in the order given, and the bell if it was rung; an empty list: `timeout_s` has passed. A
    peer's end or, within a second, its death ends the wait too: the next try says so. Not for an
    end that was attached with `takeover`.
    """
    check_policy(policy)
    deadline = Deadline(timeout_s)
    spin_ns = policy.value
    with WaitSet(consumers, producers, bell) as waitset:
        while True:
            if waitset.wait_slice(min(deadline.left_s(), CHECK_INTERVAL_S), spin_ns) or (
                waitset.has_lost_peer()
            ):
                ready = waitset.ready()
                if ready:
                    return ready
            if deadline.is_over:
                return []
            spin_ns = 0
