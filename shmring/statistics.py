"""The counters of a ring, as anybody may read them without touching the processes at its ends."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shmring._native import ffi, lib
from shmring.errors import RingClosedError
from shmring.layout import Role

if TYPE_CHECKING:
    from shmring.segment import Mapping

_STATES = {lib.SHR_END_NEVER: "never", lib.SHR_END_ATTACHED: "attached", lib.SHR_END_CLOSED: "finished"}


@dataclass(frozen=True)
class EndStatistics:
    """One end. Counters only grow, over all processes that held it. Times in nanoseconds."""

    state: str
    """never, attached, finished, lost (its process died), or unknown (the segment is damaged)."""
    pid: int
    """What the holder wrote of itself: for people, of its own pid namespace."""
    attaches: int
    position: int
    """Published (producer) or released (consumer) bytes since the ring was made."""
    records: int
    bytes: int
    """With record headers and padding."""
    batches: int
    """Publications, or releases."""
    stalls: int
    """Times it found the ring full (producer) or empty (consumer)."""
    parks: int
    parked_ns: int
    wakes_sent: int
    idle_ns: int | None
    """Since its last batch, to about 4 ms; None: there was none."""
    waiting_ns: int | None
    """For how long it has been asleep in this wait; None: awake."""
    beats: int = 0
    """Times its process said that it is at work elsewhere."""

    @property
    def pulse(self) -> int:
        """A number that changes while the process does anything here, waiting included."""
        return self.batches + self.stalls + self.parks + self.beats


@dataclass(frozen=True)
class RingStatistics:
    """A ring at one moment; each counter is whole, together they are a few microseconds apart."""

    name: str
    capacity_bytes: int
    used_bytes: int
    """Published and not released."""
    high_water_bytes: int
    """Most that was ever in use, to within a 64th of the capacity."""
    owner_state: str
    """attached: the process that made it lives. lost: nobody will remove it."""
    owner_pid: int
    is_retired: bool
    """The name has been taken away; only those attached still see it."""
    producer: EndStatistics
    consumer: EndStatistics
    waits_log2_ns: tuple[int, ...]
    """Item b counts timed records that waited 2**(b-1) <= ns < 2**b; one publication in 64 is timed."""

    @property
    def fill(self) -> float:
        """Used part of the capacity, 0 to 1; more only if the segment is damaged."""
        return self.used_bytes / self.capacity_bytes

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"fill": self.fill}


def statistics_of(mapping: Mapping) -> RingStatistics:
    """Read a ring's counters through a mapping, which may be read-only.

    Raises RingClosedError once the mapping's descriptor is closed: without it nobody can tell
    who lives.
    """
    if mapping.handle.fd < 0:
        raise RingClosedError(f"closed here, or our parent's: name={mapping.handle.name}")
    snapshot = ffi.new("struct shr_snapshot *")
    lib.shr_snapshot_take(mapping.header, snapshot)
    now = int(lib.shr_now_ns())
    producer = _end(mapping, Role.PRODUCER, snapshot.producer, now)
    consumer = _end(mapping, Role.CONSUMER, snapshot.consumer, now)
    owner_pid = int(mapping.header.owner_pid)
    used_bytes = (producer.position - consumer.position) % 2**64
    return RingStatistics(
        name=mapping.handle.name,
        capacity_bytes=mapping.capacity,
        used_bytes=used_bytes,
        # noted in steps of a 64th of the capacity: what is in use now may be more
        high_water_bytes=max(int(snapshot.producer.high_water), min(used_bytes, mapping.capacity)),
        owner_state="attached" if _is_held(mapping, Role.OWNER) else "lost",
        owner_pid=owner_pid,
        is_retired=mapping.is_retired,
        producer=producer,
        consumer=consumer,
        waits_log2_ns=tuple(snapshot.wait_histogram),
    )


def _is_held(mapping: Mapping, role: Role) -> bool:
    # the kernel does not tell of locks of the very descriptor that asks: the owner's own mapping
    return mapping.handle.fd >= 0 and (role in mapping.handle.taken or mapping.handle.is_held(role))


def _end(mapping: Mapping, role: Role, end: Any, now: int) -> EndStatistics:
    state = _STATES.get(int(end.state), "unknown")
    if state == "attached" and not _is_held(mapping, role):
        state = "lost"
    waiting_since = int(end.waiting_since_ns)
    active = int(end.active_ns)
    return EndStatistics(
        state=state,
        pid=int(end.pid),
        attaches=int(end.generation),
        position=int(end.position),
        records=int(end.records),
        bytes=int(end.bytes),
        batches=int(end.batches),
        stalls=int(end.stalls),
        parks=int(end.parks),
        parked_ns=int(end.parked_ns),
        wakes_sent=int(end.wakes_sent),
        idle_ns=max(0, now - active) if active else None,
        waiting_ns=max(0, now - waiting_since) if waiting_since and state == "attached" else None,
        beats=int(end.beats),
    )
