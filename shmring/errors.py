"""Every error of shmring, sorted by who can act on it.

"Not now" (full, empty, timed out) is no error but an answer. Text is
`what went wrong: name=value, name=value`; the facts are attributes too.
"""

from __future__ import annotations

import errno
from enum import IntEnum


class Answer(IntEnum):
    """What the C helper answers; the numbers are those of `ring.h` (compared in tests/abi)."""

    DONE = 1
    NOT_NOW = 0
    TOO_LARGE = -1
    UNUSABLE = -2
    CORRUPT = -3
    PEER_FINISHED = -4
    PEER_LOST = -5
    CLAIM_OPEN = -6
    NO_CLAIM = -7
    NOTHING_DRAINED = -8
    BAD_FRAME = -9
    UNRELEASED = -10


class ShmringError(Exception):
    """Base of every error that shmring raises of its own."""

    def __reduce__(self) -> tuple[object, ...]:
        """Travel between processes with text and facts, whatever the constructor takes."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[ShmringError], args: tuple[object, ...], facts: dict[str, object]) -> ShmringError:
    error = kind.__new__(kind)
    (OSError if isinstance(error, OSError) else Exception).__init__(error, *args)
    error.__dict__.update(facts)
    return error


class _EnvironmentError(ShmringError, OSError):
    """Not our doing and not the caller's. `errno` is set, as with every OSError."""

    def __str__(self) -> str:
        return str(self.args[1])


class BadNameError(ShmringError, ValueError):
    """The name cannot name a segment."""


class BadCapacityError(ShmringError, ValueError):
    """The capacity is outside what a ring can have."""


class RecordTooLargeError(ShmringError, ValueError):
    """The record can never fit this ring. `length` and `length_max` are payload bytes."""

    def __init__(self, message: str, *, length: int, length_max: int) -> None:
        super().__init__(message)
        self.length = length
        self.length_max = length_max


class ClaimError(ShmringError, ValueError):
    """A claim was taken twice or used after it was given back, or what is in hand bars the way."""


class NothingDrainedError(ShmringError, ValueError):
    """release() without anything drained since the last one."""


class ColumnError(ShmringError, ValueError):
    """A column does not fit its schema. `column` names it."""

    def __init__(self, message: str, column: str) -> None:
        super().__init__(message)
        self.column = column


class CorruptFrameError(ShmringError, ValueError):
    """A record's payload is not the frame that it should be."""


class RingClosedError(ShmringError, ValueError):
    """This end was closed here, or belongs to the parent of a forked process."""


class EndOfRing(ShmringError, EOFError):  # noqa: N818 - an end is no error, and the name says so
    """The other end finished in good order, and everything it left has been taken."""


class PeerLostError(ShmringError, ConnectionError):
    """The process at the other end died, and nothing is left to take or no room to fill.

    `pid` is what that process wrote of itself: for people, of its own pid namespace.
    """

    def __init__(self, message: str, *, pid: int = 0) -> None:
        super().__init__(message)
        self.pid = pid


class CorruptRingError(ShmringError):
    """The segment says what cannot be. `position` is where we stood, `found` what we read there."""

    def __init__(self, message: str, *, position: int, found: int) -> None:
        super().__init__(message)
        self.position = position
        self.found = found


class RoleTakenError(_EnvironmentError, PermissionError):
    """Another process holds this end of the ring. `holder_pid` is what that process wrote of itself."""

    def __init__(self, message: str, *, role: str, holder_pid: int) -> None:
        super().__init__(errno.EACCES, message)
        self.role = role
        self.holder_pid = holder_pid


class SegmentExistsError(_EnvironmentError, FileExistsError):
    """A living process owns a segment of that name."""

    def __init__(self, message: str, *, name: str, owner_pid: int) -> None:
        super().__init__(errno.EEXIST, message)
        self.name = name
        self.owner_pid = owner_pid


class SegmentNotFoundError(_EnvironmentError, FileNotFoundError):
    """No segment of that name, or none within the time given."""

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(errno.ENOENT, message)
        self.name = name


class SegmentAccessError(_EnvironmentError, PermissionError):
    """The segment is there and belongs to somebody who does not let us in."""

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(errno.EACCES, message)
        self.name = name


class LayoutMismatchError(ShmringError):
    """The segment is not one of ours, or of another layout. `expected` and `found` are what differs."""

    def __init__(self, message: str, *, expected: object, found: object) -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found


class NoSharedMemoryError(_EnvironmentError):
    """There is too little shared memory. Sizes in bytes."""

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(errno.ENOSPC, message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


def error_of(answer: int, position: int, value: int, length: int, length_max: int) -> ShmringError:
    """Turn a negative answer of the C helper into the error that tells of it."""
    if answer == Answer.TOO_LARGE:
        return RecordTooLargeError(
            f"record can never fit: length={length}, max={length_max}", length=length, length_max=length_max
        )
    if answer == Answer.CORRUPT:
        return CorruptRingError(
            f"segment says what cannot be: position={position}, found={value}", position=position, found=value
        )
    if answer == Answer.PEER_LOST:
        return PeerLostError(f"the process at the other end died: pid={value}", pid=value)
    texts: dict[int, tuple[type[ShmringError], str]] = {
        Answer.UNUSABLE: (RingClosedError, "this end is closed, or belongs to the process that forked us"),
        Answer.PEER_FINISHED: (EndOfRing, "the other end has finished"),
        Answer.CLAIM_OPEN: (ClaimError, "a claim is open: commit or abort it first"),
        Answer.NO_CLAIM: (ClaimError, "no claim is open"),
        Answer.UNRELEASED: (ClaimError, "records were drained and not released: release() them first"),
        Answer.NOTHING_DRAINED: (NothingDrainedError, "nothing was drained since the last release"),
    }
    kind, text = texts.get(answer, (ShmringError, f"unknown answer of the C helper: answer={answer}"))
    return kind(text)
