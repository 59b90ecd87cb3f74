"""Owns the life of a shared-memory object: made whole, found, mapped, held by role, unlinked.

A segment is built under a temporary name, locked by its owner, filled in, and only then linked
to its name; so an attacher sees a whole segment or none. Who lives is told by locks that the
kernel drops at death, never by a pid. An object is unlinked by its owner, or by the one process
that holds the remover's lock of an object without owner; so a name that somebody else re-created
is never touched.
"""

from __future__ import annotations

import contextlib
import errno
import math
import numbers
import os
import secrets
import stat
import time
import weakref
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import posix_ipc

from shmring._native import ffi, lib
from shmring.errors import (
    LayoutMismatchError,
    NoSharedMemoryError,
    RingClosedError,
    RoleTakenError,
    SegmentAccessError,
    SegmentExistsError,
    SegmentNotFoundError,
)
from shmring.layout import (
    HEADER_LENGTH,
    NAME_PREFIX,
    PAGE_LENGTH,
    TEMPORARY_PREFIX,
    Kind,
    Role,
    check_mode,
    check_name,
)

#: Where Linux shows POSIX shared memory as files: linking, listing and inode checks need it.
SHM_FOLDER = Path("/dev/shm")  # noqa: S108 - it is the shared-memory file system, not a scratch folder

_ATTACH_POLL_S = 0.005
_REMOVAL_POLL_S = 0.001
_REMOVAL_PATIENCE_S = 5.0

_held: weakref.WeakSet[Handle] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Give up every descriptor that the parent's segments had.

    A lock of an open file description lives as long as any copy of its descriptor: without this
    a child would keep its dead parent's roles alive.
    """
    for handle in list(_held):
        handle.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def check_timeout(timeout_s: float | None) -> float | None:
    """Return the seconds as a float, or None, which waits for ever as infinity does; 0 does not wait.

    Any real number will do, numpy's as well. Raises TypeError, or ValueError for a negative one and NaN.
    """
    if timeout_s is None:
        return None
    # numpy has its spans of time among the integers, whatever their unit
    if isinstance(timeout_s, (bool, np.timedelta64)) or not isinstance(timeout_s, (int, float, numbers.Real)):
        raise TypeError(f"timeout_s is a number of seconds or None: timeout_s={timeout_s!r}")
    try:
        # before anything is computed: with a float32 the clock would be one too, and tell no milliseconds
        seconds = float(timeout_s)
    except OverflowError:
        seconds = math.inf if timeout_s > 0 else -math.inf
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"timeout_s is not negative: timeout_s={timeout_s!r}")
    return None if math.isinf(seconds) else seconds


class Handle:
    """One open file description of a segment. It carries at most the locks taken through it.

    It is never mapped: a mapping holds its description open, in forked children as well, and the
    lock of a dead parent would live on in every child.
    """

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name
        self.taken: set[Role] = set()
        _held.add(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: what a copy closes would be our descriptor, with our locks."""
        raise TypeError(f"what holds a segment cannot be copied: name={self.name}")

    def take(self, role: Role) -> bool:
        """Take a role's lock; False if somebody has it."""
        answer: int = lib.shr_role_take(self.fd, role)
        if answer not in (0, -errno.EAGAIN):
            raise OSError(-answer, os.strerror(-answer), self.name)
        if answer == 0:
            self.taken.add(role)
        return answer == 0

    def is_held(self, role: Role) -> bool:
        """Tell whether somebody else holds the role. One system call."""
        answer: int = lib.shr_role_held(self.fd, role)
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer), self.name)
        return answer == 1

    def reopen(self) -> Handle:
        """Another open file description of the same object, whatever its name leads to by now."""
        if self.fd < 0:
            raise RingClosedError(f"the segment is closed here, or belongs to our parent: name={self.name}")
        return Handle(_open_again(self.fd, writable=True), self.name)

    def names_us(self) -> bool:
        """Tell whether the name still leads to the object that we hold."""
        try:
            there = _path(self.name).stat()
        except FileNotFoundError:
            return False
        here = os.fstat(self.fd)
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def close(self) -> None:
        """Drop the locks and close the descriptor. Twice is once."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _held.discard(self)
            for role in self.taken:  # a child that was forked behind Python's back may have a copy
                lib.shr_role_drop(fd, role)
            os.close(fd)
        self.taken.clear()

    def __del__(self) -> None:
        """Do as close: a handle that is forgotten must not cost a descriptor, or keep a lock."""
        self.close()

    def forget(self) -> None:
        """In a forked child: close our copy; the parent's locks stay the parent's."""
        self.taken.clear()
        with contextlib.suppress(OSError):
            self.close()


def _open_again(fd: int, *, writable: bool) -> int:
    """Open the object behind `fd` once more, whatever has become of its name."""
    return os.open(f"/proc/self/fd/{fd}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)


def _path(name: str) -> Path:
    return SHM_FOLDER / (NAME_PREFIX + name)


def _open(name: str, *, read_only: bool) -> int:
    """Open an existing object; the descriptor is close-on-exec."""
    try:
        # anybody may put a pipe in that folder, and opening one would wait for its other end
        if not stat.S_ISREG(_path(name).lstat().st_mode):
            raise LayoutMismatchError(
                f"what has that name is no shared memory: name={name}",
                expected="a regular file",
                found="something else",
            )
        return int(posix_ipc.SharedMemory(f"/{NAME_PREFIX}{name}", read_only=read_only).fd)
    except (posix_ipc.ExistentialError, FileNotFoundError):
        raise SegmentNotFoundError(f"no segment of that name: name={name}", name=name) from None
    except (posix_ipc.PermissionsError, PermissionError):
        raise SegmentAccessError(f"segment belongs to another user: name={name}", name=name) from None


class Mapping:
    """A mapped segment. The memory stays mapped while this object or any view of it lives."""

    def __init__(self, handle: Handle, *, writable: bool) -> None:
        self.handle = handle
        size = os.fstat(handle.fd).st_size
        if size < HEADER_LENGTH:
            raise LayoutMismatchError(
                f"object is no segment of ours: name={handle.name}, size={size}, min={HEADER_LENGTH}",
                expected=HEADER_LENGTH,
                found=size,
            )
        self.kind, self.capacity = _check_header(handle, size)
        self.writable = writable
        self.buffer, self.header = _map(
            handle, self.capacity, writable=writable, doubled=self.kind == Kind.RING
        )

    @property
    def header_address(self) -> int:
        """Where the header lies in this process."""
        return int(ffi.cast("uintptr_t", self.header))

    @property
    def payload(self) -> memoryview:
        """A blob's bytes, read-only; valid for as long as the view lives."""
        length = int(self.header.payload_length)
        if length > self.capacity:
            raise LayoutMismatchError(
                f"blob is longer than its segment: length={length}, max={self.capacity}",
                expected=self.capacity,
                found=length,
            )
        return memoryview(self.buffer)[HEADER_LENGTH : HEADER_LENGTH + length].toreadonly()

    @property
    def is_whole(self) -> bool:
        """False once the object is shorter than it was when it was mapped. One system call."""
        return self.handle.fd < 0 or os.fstat(self.handle.fd).st_size >= HEADER_LENGTH + self.capacity

    @property
    def is_retired(self) -> bool:
        """True once the owner has taken the name away."""
        return bool(lib.shr_header_retired(self.header))


def _map(handle: Handle, capacity: int, *, writable: bool, doubled: bool) -> tuple[Any, Any]:
    error = ffi.new("int *")
    fd = _open_again(handle.fd, writable=writable)
    base = lib.shr_map(fd, capacity, writable, doubled, error)
    os.close(fd)
    if base == ffi.NULL:
        raise OSError(-error[0], f"cannot map segment: name={handle.name}, capacity={capacity}")
    # cast first: what comes of a later cast would not keep the memory mapped, and a pointer that
    # outlives its mapping by one line is a crash
    header = ffi.gc(
        ffi.cast("struct shr_header *", base), lambda pointer: lib.shr_unmap(pointer, capacity, doubled)
    )
    # a view of this buffer keeps `header` alive, and with it the mapping
    return ffi.buffer(header, HEADER_LENGTH + capacity * (2 if doubled else 1)), header


def _check_header(handle: Handle, size: int) -> tuple[Kind, int]:
    """Kind and capacity, after every constant of the header was compared. Read-only mapping."""
    error = ffi.new("int *")
    fd = _open_again(handle.fd, writable=False)
    base = lib.shr_map_header(fd, error)
    os.close(fd)
    if base == ffi.NULL:
        raise OSError(-error[0], f"cannot map segment: name={handle.name}")
    header = ffi.gc(ffi.cast("struct shr_header *", base), lambda pointer: lib.shr_unmap(pointer, 0, 0))
    facts = {
        "magic": (lib.SHR_MAGIC, int(header.magic)),
        "layout_version": (lib.SHR_LAYOUT_VERSION, int(header.layout_version)),
        "header_length": (HEADER_LENGTH, int(header.header_length)),
        "ready": (1, int(lib.shr_header_ready(header))),
    }
    for what, (expected, found) in facts.items():
        if expected != found:
            raise LayoutMismatchError(
                f"segment has another layout: name={handle.name}, {what}={found}, expected={expected}",
                expected=expected,
                found=found,
            )
    kind, capacity = int(header.kind), int(header.capacity)
    if kind not in (Kind.RING, Kind.BLOB):
        raise LayoutMismatchError(
            f"segment is of an unknown kind: name={handle.name}, kind={kind}",
            expected=tuple(Kind),
            found=kind,
        )
    if capacity % PAGE_LENGTH or (kind == Kind.RING and (capacity == 0 or capacity & (capacity - 1))):
        raise LayoutMismatchError(
            f"segment has an impossible capacity: name={handle.name}, capacity={capacity}",
            expected="a power of two",
            found=capacity,
        )
    if size != HEADER_LENGTH + capacity:
        raise LayoutMismatchError(
            f"segment is not as large as it says: name={handle.name}, size={size}, "
            f"expected={HEADER_LENGTH + capacity}",
            expected=HEADER_LENGTH + capacity,
            found=size,
        )
    return Kind(kind), capacity


class OwnedSegment:
    """A segment that this process made. Closing it takes the name away; views stay valid."""

    def __init__(
        self,
        name: str,
        kind: Kind,
        capacity: int,
        *,
        mode: int,
        payload: bytes = b"",
        start_position: int = 0,
    ) -> None:
        self.name = check_name(name)
        check_mode(mode)
        temporary = f"~{secrets.token_hex(8)}"
        self._handle = Handle(_create_object(temporary), temporary)
        try:
            self._fill(kind, capacity, payload, start_position)
            os.fchmod(self._handle.fd, mode)  # exactly as asked, whatever the umask
            _link(self._handle, temporary, self.name)
        except BaseException:
            self._handle.close()
            raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                _path(temporary).unlink()
        self._handle.name = self.name
        self._finalizer = weakref.finalize(self, _give_up, self._handle, self.mapping, os.getpid())

    def _fill(self, kind: Kind, capacity: int, payload: bytes, start_position: int) -> None:
        handle = self._handle
        is_ours = handle.take(Role.OWNER)
        assert is_ours, "nobody else can know this object yet"
        _reserve(handle, HEADER_LENGTH + capacity)
        buffer, header = _map(handle, capacity, writable=True, doubled=False)
        if payload:
            memoryview(buffer)[HEADER_LENGTH : HEADER_LENGTH + len(payload)] = payload
        lib.shr_header_init(
            header, kind, capacity, secrets.randbits(64), len(payload), os.getpid(), start_position
        )
        self.mapping = Mapping(handle, writable=True)

    @property
    def is_open(self) -> bool:
        """False once closed, and in a forked child."""
        return self._finalizer.alive and self._handle.fd >= 0

    def close(self) -> None:
        """Take the name away, if it still leads to this segment. Twice is once."""
        self._finalizer()


def _give_up(handle: Handle, mapping: Mapping, pid: int) -> None:
    if handle.fd < 0 or os.getpid() != pid:
        return
    lib.shr_header_retire(mapping.header)
    _unlink_if_ours(handle)
    handle.close()


def _unlink_if_ours(handle: Handle) -> None:
    """Take the name away if it still leads to this object.

    The caller is its owner, or holds the remover's lock of an object without owner: nobody else
    takes the name from it, so nobody gives it to another object between the look and the unlink.
    """
    if not handle.names_us():
        return
    try:
        posix_ipc.unlink_shared_memory(f"/{NAME_PREFIX}{handle.name}")
    except posix_ipc.ExistentialError:
        pass
    except (posix_ipc.PermissionsError, PermissionError):
        raise SegmentAccessError(
            f"segment belongs to another user: name={handle.name}", name=handle.name
        ) from None


def _create_object(name: str) -> int:
    memory = posix_ipc.SharedMemory(f"/{NAME_PREFIX}{name}", posix_ipc.O_CREX, mode=0o600)
    os.fchmod(memory.fd, 0o600)  # under a umask of 0o777 we could not open it again ourselves
    return int(memory.fd)


def _reserve(handle: Handle, size: int) -> None:
    """Get the pages now: ftruncate alone would leave it to a SIGBUS at the first write."""
    free = os.statvfs(SHM_FOLDER)
    try:
        os.posix_fallocate(handle.fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        os.ftruncate(handle.fd, 0)
        free_bytes = free.f_bavail * free.f_frsize
        raise NoSharedMemoryError(
            f"too little shared memory: needed={size}, free={free_bytes}, folder={SHM_FOLDER}",
            needed_bytes=size,
            free_bytes=free_bytes,
        ) from None


def _link(handle: Handle, temporary: str, name: str) -> None:
    """Give the finished object its name, exclusively; a dead owner's leftover makes way."""
    while True:
        try:
            os.link(_path(temporary), _path(name))
        except FileExistsError:
            if not remove_leftover(name):
                raise_in_use(name)
        else:
            handle.name = name
            return


def raise_in_use(name: str) -> NoReturn:
    """Say which living process owns the name."""
    pid = _owner_pid(name)
    raise SegmentExistsError(
        f"name is in use by a living process: name={name}, owner_pid={pid}", name=name, owner_pid=pid
    ) from None


def _owner_pid(name: str) -> int:
    """What the owner wrote of itself, for a message; 0 if it cannot be read."""
    try:
        mapping = look_at(name)
    except (OSError, LayoutMismatchError):
        return 0
    try:
        return int(mapping.header.owner_pid)
    finally:
        mapping.handle.close()


def remove_leftover(name: str) -> bool:
    """Unlink the segment of that name if its owner is dead. False if a living process owns it.

    Staleness is told by the owner's lock alone: an object without a holder of that lock is
    either a leftover or was made by something else than us, and both are in the way. Several
    processes may be at the same leftover: one removes it, the others wait until it has.
    """
    patience = time.monotonic() + _REMOVAL_PATIENCE_S
    while time.monotonic() < patience:
        try:
            handle = Handle(_open(name, read_only=False), name)
        except SegmentNotFoundError:
            return True
        try:
            if handle.is_held(Role.OWNER):
                return False
            if handle.take(Role.REMOVER):
                _unlink_if_ours(handle)
                with contextlib.suppress(LayoutMismatchError, OSError):
                    lib.shr_header_retire(Mapping(handle, writable=True).header)
                return True
        finally:
            handle.close()
        time.sleep(_REMOVAL_POLL_S)
    return False  # a living process holds on to it after all, if only as its remover


def attach_mapping(name: str, *, writable: bool, timeout_s: float | None = 0) -> Mapping:
    """Map the segment of that name. Waits up to `timeout_s` for it to appear (None: for ever).

    One that is just being removed does not count: whoever made it is gone, and a next one may
    come. Raises SegmentNotFoundError, SegmentAccessError (at once: waiting would not help) or
    LayoutMismatchError.
    """
    check_name(name)
    timeout_s = check_timeout(timeout_s)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            mapping = look_at(name, writable=writable)
            if not mapping.is_retired:
                return mapping
            mapping.handle.close()
            raise SegmentNotFoundError(f"segment is being removed: name={name}", name=name)  # noqa: TRY301
        except SegmentNotFoundError:
            if deadline is not None and time.monotonic() >= deadline:
                raise
        except LayoutMismatchError:
            # something of that name is not whole; another process may be about to replace it
            if deadline is None or time.monotonic() >= deadline:
                raise
        time.sleep(_ATTACH_POLL_S)


def look_at(name: str, *, writable: bool = False) -> Mapping:
    """Map the segment of that name as it is, one that is being removed as well. Never waits."""
    handle = Handle(_open(name, read_only=not writable), name)
    try:
        return Mapping(handle, writable=writable)
    except BaseException:
        handle.close()
        raise


def take_role(mapping: Mapping, role: Role) -> None:
    """Take one end of a ring through the mapping's own descriptor, or say who has it."""
    if not mapping.handle.take(role):
        end = mapping.header.producer if role == Role.PRODUCER else mapping.header.consumer
        pid = int(end.pid)
        raise RoleTakenError(
            f"another process is the {role.name.lower()}: name={mapping.handle.name}, holder_pid={pid}",
            role=role.name.lower(),
            holder_pid=pid,
        )


def segment_names() -> list[str]:
    """Names of everything in shared memory that carries our prefix, sorted; temporary ones too."""
    with os.scandir(SHM_FOLDER) as entries:
        return sorted(e.name[len(NAME_PREFIX) :] for e in entries if e.name.startswith(NAME_PREFIX))


def is_temporary(name: str) -> bool:
    """Tell whether it is a segment that was never finished."""
    return (NAME_PREFIX + name).startswith(TEMPORARY_PREFIX)
