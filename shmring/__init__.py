"""Lock-free single-producer single-consumer rings in POSIX shared memory.

    ring = shmring.create("demo", capacity_bytes=1 << 20)     # one process makes it
    producer = shmring.Producer.attach("demo")                # one process fills it
    consumer = shmring.Consumer.attach("demo")                # one process empties it

Each end belongs to one process and one thread at a time; the kernel holds the role and gives
it back when the process dies, however it dies.
"""

try:
    from shmring._fast import Record
except ModuleNotFoundError as error:
    if error.name != "shmring._fast":
        raise
    raise ImportError(
        "compiled modules are missing: pip install ., or use the environment it was installed in"
    ) from error
from shmring.aio import AsyncWaiter
from shmring.columns import Column, ColumnData, Frame, Schema, Shape
from shmring.consumer import Consumer
from shmring.end import PeerState
from shmring.errors import (
    BadCapacityError,
    BadNameError,
    ClaimError,
    ColumnError,
    CorruptFrameError,
    CorruptRingError,
    EndOfRing,
    LayoutMismatchError,
    NoSharedMemoryError,
    NothingDrainedError,
    PeerLostError,
    RecordTooLargeError,
    RingClosedError,
    RoleTakenError,
    SegmentAccessError,
    SegmentExistsError,
    SegmentNotFoundError,
    ShmringError,
)
from shmring.layout import Role
from shmring.producer import Claim, Producer
from shmring.ring import (
    AttachedRing,
    Blob,
    Ring,
    SegmentInfo,
    attach,
    create,
    list_rings,
    publish_blob,
    read_blob,
    read_statistics,
    sweep,
    unlink,
)
from shmring.segment import Mapping, check_timeout
from shmring.statistics import EndStatistics, RingStatistics
from shmring.waiter import Bell, WaitPolicy, wait_any

__all__ = [
    "AsyncWaiter",
    "AttachedRing",
    "BadCapacityError",
    "BadNameError",
    "Bell",
    "Blob",
    "Claim",
    "ClaimError",
    "Column",
    "ColumnData",
    "ColumnError",
    "Consumer",
    "CorruptFrameError",
    "CorruptRingError",
    "EndOfRing",
    "EndStatistics",
    "Frame",
    "LayoutMismatchError",
    "Mapping",
    "NoSharedMemoryError",
    "NothingDrainedError",
    "PeerLostError",
    "PeerState",
    "Producer",
    "Record",
    "RecordTooLargeError",
    "Ring",
    "RingClosedError",
    "RingStatistics",
    "Role",
    "RoleTakenError",
    "Schema",
    "SegmentAccessError",
    "SegmentExistsError",
    "SegmentInfo",
    "SegmentNotFoundError",
    "Shape",
    "ShmringError",
    "WaitPolicy",
    "attach",
    "check_timeout",
    "create",
    "list_rings",
    "publish_blob",
    "read_blob",
    "read_statistics",
    "sweep",
    "unlink",
    "wait_any",
]
