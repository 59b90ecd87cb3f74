"""Making a ring, and everything that is done by a ring's name."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmring.consumer import Consumer
from shmring.errors import LayoutMismatchError, SegmentNotFoundError
from shmring.layout import MODE_DEFAULT, NAME_PREFIX, PAGE_LENGTH, Kind, check_capacity, check_name
from shmring.producer import Producer
from shmring.segment import (
    SHM_FOLDER,
    Mapping,
    OwnedSegment,
    attach_mapping,
    is_temporary,
    look_at,
    raise_in_use,
    remove_leftover,
    segment_names,
)
from shmring.statistics import RingStatistics, statistics_of
from shmring.waiter import WaitPolicy

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


#: Seconds after which an unfinished segment without an owner is a leftover; making one takes milliseconds.
UNFINISHED_AGE_S = 10.0


class AttachedRing:
    """A ring of somebody else's, known by its name. The ends are taken apart from it.

    It goes on showing the ring that it was attached to, also when the name leads to another by now.
    """

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping

    @property
    def name(self) -> str:
        """What others attach by."""
        return self._mapping.handle.name

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the data area."""
        return self._mapping.capacity

    @property
    def is_retired(self) -> bool:
        """True once the name is gone: nobody new will come, though the ends go on."""
        return self._mapping.is_retired

    @property
    def is_whole(self) -> bool:
        """False once somebody has cut its object short; then its ends say CorruptRingError."""
        return self._mapping.is_whole

    def producer(self, *, policy: WaitPolicy = WaitPolicy.BALANCED, takeover: bool = False) -> Producer:
        """Take the producing end here. See Producer.attach."""
        return Producer._of(self._again(), policy, takeover=takeover)

    def consumer(
        self, *, policy: WaitPolicy = WaitPolicy.BALANCED, takeover: bool = False, poison: bool = False
    ) -> Consumer:
        """Take the consuming end here. See Consumer.attach."""
        return Consumer._of(self._again(), policy, takeover=takeover, poison=poison)

    def _again(self) -> Mapping:
        handle = self._mapping.handle.reopen()
        try:
            return Mapping(handle, writable=True)
        except BaseException:
            handle.close()
            raise

    def statistics(self) -> RingStatistics:
        """The ring's counters as they stand."""
        return statistics_of(self._mapping)

    def close(self) -> None:
        """Let go of it; ends that were taken go on. Twice is once."""
        self._mapping.handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Ring(AttachedRing):
    """A ring that this process made and will remove.

    Closing takes the name away; ends that are attached go on until they are closed.
    """

    def __init__(self, segment: OwnedSegment) -> None:
        super().__init__(segment.mapping)
        self._segment = segment

    @property
    def is_open(self) -> bool:
        """False once closed, and in a forked child."""
        return self._segment.is_open

    def close(self) -> None:
        """Take the name away. Twice is once. Does nothing in a forked child."""
        self._segment.close()


class Blob:
    """Bytes that this process publishes once for others to map read-only."""

    def __init__(self, segment: OwnedSegment) -> None:
        self._segment = segment

    @property
    def name(self) -> str:
        """What others attach by."""
        return self._segment.name

    @property
    def is_open(self) -> bool:
        """False once closed, and in a forked child."""
        return self._segment.is_open

    def close(self) -> None:
        """Take the name away; those who mapped it keep it. Twice is once."""
        self._segment.close()


def create(name: str, capacity_bytes: int, *, mode: int = MODE_DEFAULT) -> Ring:
    """Make a ring of `capacity_bytes` (a power of two, at least 4096) under `name`.

    The leftover of a dead owner makes way. Raises BadNameError, BadCapacityError,
    SegmentExistsError (a living process owns the name) or NoSharedMemoryError; in each case
    nothing is left behind. `mode` is exact, whatever the umask.
    """
    return Ring(OwnedSegment(name, Kind.RING, check_capacity(capacity_bytes), mode=mode))


def attach(name: str, *, timeout_s: float | None = 0) -> AttachedRing:
    """Attach to the ring `name`, waiting up to `timeout_s` for it to be made (None: for ever).

    Takes neither end: ask what it returns for one. Errors as Producer.attach.
    """
    mapping = attach_mapping(name, writable=True, timeout_s=timeout_s)
    if mapping.kind != Kind.RING:
        mapping.handle.close()
        raise LayoutMismatchError(f"segment is no ring: name={name}", expected=Kind.RING, found=mapping.kind)
    return AttachedRing(mapping)


def publish_blob(name: str, payload: bytes, *, mode: int = MODE_DEFAULT) -> Blob:
    """Publish `payload` under `name`, read-only for everybody else. Errors as `create`."""
    capacity = -(-max(1, len(payload)) // PAGE_LENGTH) * PAGE_LENGTH
    return Blob(OwnedSegment(name, Kind.BLOB, capacity, mode=mode, payload=bytes(payload)))


def read_blob(name: str, *, timeout_s: float | None = 0) -> Mapping:
    """Map a blob read-only, waiting up to `timeout_s` for it. Its bytes are `mapping.payload`."""
    mapping = attach_mapping(name, writable=False, timeout_s=timeout_s)
    if mapping.kind != Kind.BLOB:
        mapping.handle.close()
        raise LayoutMismatchError(f"segment is no blob: name={name}", expected=Kind.BLOB, found=mapping.kind)
    return mapping


@dataclass(frozen=True)
class SegmentInfo:
    """One entry of shared memory that carries our prefix."""

    name: str
    kind: str
    """ring, blob, unfinished (its maker died before it was whole, or is at it), or damaged."""
    size_bytes: int
    mode: int
    uid: int
    statistics: RingStatistics | None
    """Of a ring that could be read."""
    problem: str | None
    """Why it could not be read."""
    owner_alive: bool | None
    """None where it could not be told."""


def list_rings() -> list[SegmentInfo]:
    """Everything of ours in shared memory, sorted by name. Changes nothing, waits for nobody."""
    infos = []
    for name in segment_names():
        info = _look_at(name)
        if info is not None:
            infos.append(info)
    return infos


def _look_at(name: str) -> SegmentInfo | None:
    try:
        status = (SHM_FOLDER / f"{NAME_PREFIX}{name}").stat()
    except FileNotFoundError:
        return None
    kind, statistics, problem, owner_alive = "damaged", None, None, None
    if is_temporary(name):
        kind = "unfinished"
    else:
        try:
            mapping = look_at(name)
            try:
                kind = mapping.kind.name.lower()
                statistics = statistics_of(mapping)
            finally:
                mapping.handle.close()
            owner_alive = statistics.owner_state == "attached"
            if mapping.kind == Kind.BLOB:
                statistics = None
        except (SegmentNotFoundError, FileNotFoundError):
            return None
        except (OSError, LayoutMismatchError, ValueError) as error:
            problem = str(error)
    return SegmentInfo(
        name=name,
        kind=kind,
        size_bytes=status.st_size,
        mode=status.st_mode & 0o777,
        uid=status.st_uid,
        statistics=statistics,
        problem=problem,
        owner_alive=owner_alive,
    )


def read_statistics(name: str) -> RingStatistics:
    """The counters of the ring `name`, through a read-only mapping."""
    mapping = look_at(check_name(name))
    try:
        if mapping.kind != Kind.RING:
            raise LayoutMismatchError(
                f"segment is no ring: name={name}", expected=Kind.RING, found=mapping.kind
            )
        return statistics_of(mapping)
    finally:
        mapping.handle.close()


def unlink(name: str) -> None:
    """Remove a segment whose owner is dead. Raises SegmentExistsError if the owner lives."""
    check_name(name)
    if name not in segment_names():
        raise SegmentNotFoundError(f"no segment of that name: name={name}", name=name)
    if not remove_leftover(name):
        raise_in_use(name)


def _age_s(name: str) -> float:
    try:
        return time.time() - (SHM_FOLDER / f"{NAME_PREFIX}{name}").stat().st_ctime
    except FileNotFoundError:
        return 0.0


def sweep() -> list[str]:
    """Remove every leftover of dead owners that we may remove; return their names."""
    swept = []
    for name in segment_names():
        if is_temporary(name) and _age_s(name) < UNFINISHED_AGE_S:
            continue  # its maker may be about to lock it
        try:
            if remove_leftover(name):
                swept.append(name)
        except (OSError, LayoutMismatchError, UnicodeError):
            continue  # another user's, no shared memory at all, or gone meanwhile
    return swept
