"""The life of a shared-memory object: made whole, found, refused, replaced, removed."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import math
import os
import pickle
import re
import stat
import subprocess
import sys
import threading
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import posix_ipc
import pytest

import shmring
import shmring.testing
from shmring import ring as ring_module
from shmring import segment
from shmring._native import lib
from shmring.layout import CAPACITY_MAX, NAME_LENGTH_MAX, Kind

SHM = Path("/dev/shm")


def open_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def path_of(name: str) -> Path:
    return SHM / f"shmring.{name}"


def leave_behind(name: str, capacity: int = 4096) -> None:
    """A segment whose owner is gone: made by a process that ends without a word."""
    code = f"import os, shmring; r = shmring.create({name!r}, {capacity}); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# What a ring may be called, and how large it may be


@pytest.mark.parametrize("name", ["r", "shmring-1", "a.b_c-1", "x" * 30, "y" * 31, "0", "_", "x" * 200])
def test_a_sensible_name_is_taken_as_it_is(name, ring_name):
    """A user names rings after hosts, ports and models; none of these may surprise."""
    whole = f"{ring_name}.{name}"[:NAME_LENGTH_MAX]
    with shmring.create(whole, 4096) as ring:
        assert ring.name == whole
        assert path_of(whole).exists()


def test_the_longest_name_is_a_file_name_that_linux_takes(ring_name):
    """The prefix counts too: a limit that forgets it fails at the system call, far from its cause."""
    whole = ring_name + "x" * (NAME_LENGTH_MAX - len(ring_name))
    with shmring.create(whole, 4096), shmring.Producer.attach(whole) as producer:
        assert producer.name == whole
        assert len(path_of(whole).name) < 255


@pytest.mark.parametrize("length", [201, 256, 5000])
def test_a_name_that_is_too_long_is_refused_with_both_lengths(length):
    """ENAMETOOLONG from deep inside tells nobody which of ten rings was meant."""
    with pytest.raises(shmring.BadNameError, match=rf"length={length}, max={NAME_LENGTH_MAX}"):
        shmring.create("x" * length, 4096)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "/a",
        "-a",
        ".a",
        "~a",
        "a b",
        "a\n",
        "a\0b",
        "\u00e4",
        "\ud800",
        "\u0661",
        None,
        5,
        b"a",
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda name: shmring.create(name, 4096),
        shmring.Producer.attach,
        shmring.Consumer.attach,
        shmring.read_statistics,
        shmring.unlink,
        shmring.read_blob,
        lambda name: shmring.publish_blob(name, b""),
    ],
    ids=["create", "producer", "consumer", "statistics", "unlink", "read_blob", "publish_blob"],
)
def test_a_name_that_cannot_be_is_refused_by_every_call(name, use):
    """A slash would lead into somebody else's folder, a dot would hide the ring from its operator."""
    with pytest.raises(shmring.BadNameError, match="name"):
        use(name)


@pytest.mark.parametrize("capacity", [0, -1, 1, 10, 24, 2048, 4095, 4097, 6144, 12288, CAPACITY_MAX * 2])
def test_a_capacity_that_cannot_be_is_refused_and_leaves_no_name(capacity, ring_name):
    """Rounding it up silently would make the sum that an operator reserved wrong."""
    with pytest.raises(shmring.BadCapacityError, match=f"capacity_bytes={capacity}"):
        shmring.create(ring_name, capacity)
    assert not path_of(ring_name).exists()


def test_a_capacity_that_is_no_power_of_two_is_told_the_next(ring_name):
    """Nobody should have to compute what is known."""
    with pytest.raises(shmring.BadCapacityError, match="capacity_bytes=6144, next=8192"):
        shmring.create(ring_name, 6144)


@pytest.mark.parametrize("capacity", [2**63, 2**64, 2**64 - 1, 2**70])
def test_an_absurd_capacity_never_reaches_the_kernel(capacity, ring_name):
    """Sizes beyond 64 bits wrap around in C, and a wrapped size maps too little."""
    with pytest.raises(shmring.BadCapacityError):
        shmring.create(ring_name, capacity)


@pytest.mark.parametrize("capacity", [True, 4096.0, "4096", None, b"4096"])
def test_a_capacity_is_an_int(capacity, ring_name):
    """True is 1 to Python; a size of 1 is nobody's wish."""
    with pytest.raises(TypeError, match="capacity_bytes is an int"):
        shmring.create(ring_name, capacity)


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o644, 0o666, 0o777])
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_the_mode_is_exact_whatever_the_umask(mode, umask, ring_name):
    """A service started by hand and one started by systemd must let the same people in."""
    before = os.umask(umask)
    try:
        with shmring.create(ring_name, 4096, mode=mode):
            assert stat.S_IMODE(path_of(ring_name).stat().st_mode) == mode
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("mode", "kind"), [(True, TypeError), ("600", TypeError), (-1, ValueError), (0o1000, ValueError)]
)
def test_a_mode_is_permission_bits(mode, kind, ring_name):
    """A set-uid bit or a decimal 600 taken for octal would open the ring to strangers."""
    with pytest.raises(kind, match="mode"):
        shmring.create(ring_name, 4096, mode=mode)
    assert not path_of(ring_name).exists()


def test_the_default_mode_lets_only_the_owner_in(ring_name):
    """Prompts travel through rings; other users of the machine have no business with them."""
    with shmring.create(ring_name, 4096):
        assert stat.S_IMODE(path_of(ring_name).stat().st_mode) == 0o600


@pytest.mark.parametrize("timeout", [-1, -0.0001, math.nan, -math.inf])
def test_a_negative_timeout_or_none_at_all_is_refused(timeout, ring_name):
    """A computed deadline that went wrong must show, not become a busy loop or a wait for ever."""
    with pytest.raises(ValueError, match="timeout_s is not negative"):
        shmring.Producer.attach(ring_name, timeout_s=timeout)


@pytest.mark.parametrize("timeout", [True, "1", b"", 1j, [1]])
def test_a_timeout_is_a_number(timeout, ring_name):
    """True would wait a second where `block=True` was meant."""
    with pytest.raises(TypeError, match="timeout_s is a number"):
        shmring.Producer.attach(ring_name, timeout_s=timeout)


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [
        (0, 0.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.uint8(0), 0.0),
        (np.float16(0.25), 0.25),
        (Fraction(1, 4), 0.25),
        (math.inf, None),
        (np.float32(math.inf), None),
        (10**400, None),
        (None, None),
    ],
)
def test_any_real_number_is_a_timeout(timeout, seconds, ring_name):
    """A timeout that was computed with numpy is as good; as a float32 the deadline is off by seconds."""
    checked = shmring.check_timeout(timeout)
    assert checked == seconds
    assert type(checked) is (float if seconds is not None else type(None))
    if seconds == 0.0:
        with pytest.raises(shmring.SegmentNotFoundError):
            shmring.Producer.attach(ring_name, timeout_s=timeout)


@pytest.mark.parametrize(
    "timeout",
    [
        np.bool_(True),
        np.array([1.0]),
        Decimal(1),
        np.datetime64(1, "s"),
        np.timedelta64(5, "ns"),
        np.timedelta64(5, "s"),
    ],
)
def test_what_is_like_a_number_is_no_timeout(timeout):
    """Only what orders and adds as seconds do."""
    with pytest.raises(TypeError, match="timeout_s is a number"):
        shmring.check_timeout(timeout)


@pytest.mark.parametrize("timeout", [-(10**400), np.float32(-1), np.int64(-1), np.float32(math.nan)])
def test_a_negative_timeout_of_any_type_is_refused(timeout):
    """As of the usual ones."""
    with pytest.raises(ValueError, match="timeout_s is not negative"):
        shmring.check_timeout(timeout)


def test_every_wait_takes_a_number_of_numpy(ring_name):
    """Consumers, producers and both at once."""
    timeout = np.float32(0.001)
    with shmring.create(ring_name, 4096) as ring, ring.producer() as producer, ring.consumer() as consumer:
        assert consumer.pop(timeout) is None
        assert consumer.drain_wait(1, timeout) == []
        assert not consumer.wait_until_readable(timeout)
        assert shmring.wait_any([consumer], timeout) == []
        shmring.testing.fill(producer)
        assert not producer.push(b"x" * 57, timeout)
        assert producer.claim(57, timeout) is None
        assert not producer.wait_until_writable(57, timeout)


# Found, or not


def test_attaching_to_nothing_says_so_by_name(ring_name):
    """A misspelt name is the commonest mistake; the message must hold the spelling."""
    with pytest.raises(shmring.SegmentNotFoundError, match=ring_name) as caught:
        shmring.Producer.attach(ring_name)
    assert caught.value.name == ring_name
    assert isinstance(caught.value, FileNotFoundError)


def test_attaching_waits_for_a_ring_that_is_made_later(ring_name):
    """Processes start in any order; the first one up must not have to retry by hand."""
    made: list[shmring.Ring] = []
    timer = threading.Timer(0.05, lambda: made.append(shmring.create(ring_name, 4096)))
    timer.start()
    with shmring.Consumer.attach(ring_name, timeout_s=60) as consumer:
        assert consumer.capacity_bytes == 4096
    timer.join()
    made[0].close()


def test_an_empty_file_of_that_name_is_not_a_ring_and_can_be_removed(ring_name):
    """What a crashed foreign program left under our prefix must not need rm by hand."""
    path_of(ring_name).touch()
    with pytest.raises(shmring.LayoutMismatchError, match="size=0") as caught:
        shmring.Producer.attach(ring_name, timeout_s=0.01)
    assert (caught.value.expected, caught.value.found) == (4096, 0)
    shmring.unlink(ring_name)
    assert not path_of(ring_name).exists()


def test_an_empty_file_of_that_name_makes_way_for_a_ring(ring_name):
    """A restart must not fail for ever because of one bad file."""
    path_of(ring_name).touch()
    with shmring.create(ring_name, 4096) as ring, ring.producer() as producer:
        assert producer.try_push(b"x")


def header_with(ring_name: str, **changes: int) -> bytes:
    """Bytes of a good 4096-byte ring's file, with 8-byte fields overwritten by name."""
    offsets = {"magic": 0, "version": 8, "header_length": 12, "kind": 16, "capacity": 24, "ready": 0x80}
    sizes = {"magic": 8, "capacity": 8}
    with shmring.create(ring_name, 4096):
        image = bytearray(path_of(ring_name).read_bytes())
    for what, value in changes.items():
        at, size = offsets[what], sizes.get(what, 4)
        image[at : at + size] = value.to_bytes(size, "little")
    return bytes(image)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"magic": 0x1234}, 0x1234),
        ({"version": 2}, 2),
        ({"version": 0}, 0),
        ({"header_length": 8192}, 8192),
        ({"ready": 0}, 0),
        ({"kind": 3}, 3),
        ({"kind": 0}, 0),
        ({"capacity": 0}, 0),
        ({"capacity": 4097}, 4097),
        ({"capacity": 12288}, 12288),
        ({"capacity": 1 << 20}, 8192),
        ({"capacity": 1 << 63}, 8192),
        ({"capacity": 2**64 - 4096}, 2**64 - 4096),
    ],
)
def test_a_header_that_cannot_be_is_refused_with_what_was_found(changes, found, ring_name):
    """Mapping what a bad header says would end in SIGBUS, in a process that did nothing wrong."""
    image = header_with(ring_name, **changes)
    path_of(ring_name).write_bytes(image)
    for attach in (shmring.Producer.attach, shmring.Consumer.attach, shmring.read_statistics):
        with pytest.raises(shmring.LayoutMismatchError) as caught:
            attach(ring_name)
        assert caught.value.found == found
    assert path_of(ring_name).stat().st_size == len(image), "attaching never resizes"
    shmring.unlink(ring_name)


def test_both_versions_are_named_when_the_layout_differs(ring_name):
    """After an upgrade of half of a deployment the message must say which half is old."""
    path_of(ring_name).write_bytes(header_with(ring_name, version=7))
    with pytest.raises(shmring.LayoutMismatchError, match="layout_version=7, expected=1"):
        shmring.Producer.attach(ring_name)
    shmring.unlink(ring_name)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 8191, 8193, 12288])
def test_an_object_of_another_size_than_its_header_says_is_refused(size, ring_name):
    """Somebody truncated the file: the next attacher gets an error, not a signal."""
    with shmring.create(ring_name, 4096):
        os.truncate(path_of(ring_name), size)
        with pytest.raises(shmring.LayoutMismatchError):
            shmring.Consumer.attach(ring_name)
        os.truncate(path_of(ring_name), 8192)


def test_positions_that_cannot_be_are_refused_at_attach(ring_name):
    """A tail far beyond the head would let the consumer read what was never written."""
    with shmring.create(ring_name, 4096):
        with path_of(ring_name).open("r+b") as file:
            file.seek(0x100)
            file.write((1 << 40).to_bytes(8, "little"))
        with pytest.raises(shmring.CorruptRingError) as caught:
            shmring.Consumer.attach(ring_name)
        assert (caught.value.position, caught.value.found) == (0, 1 << 40)
        with pytest.raises(shmring.CorruptRingError):
            shmring.Producer.attach(ring_name)


def test_a_blob_is_not_taken_for_a_ring_nor_a_ring_for_a_blob(ring_name):
    """Two settings mixed up must end in a sentence."""
    blob = shmring.publish_blob(ring_name, b"facts")
    for attach in (shmring.Producer.attach, shmring.Consumer.attach, shmring.read_statistics):
        with pytest.raises(shmring.LayoutMismatchError, match="no ring") as caught:
            attach(ring_name)
        assert (caught.value.expected, caught.value.found) == (Kind.RING, Kind.BLOB)
    blob.close()
    with shmring.create(ring_name, 4096), pytest.raises(shmring.LayoutMismatchError, match="no blob"):
        shmring.read_blob(ring_name)


@pytest.mark.parametrize("kind", ["fifo", "folder", "symlink"])
def test_what_is_no_shared_memory_is_refused_and_never_waited_for(kind, ring_name):
    """Anybody may put a pipe into that folder; looking at it must not hang the operator's tool."""
    path = path_of(ring_name)
    {
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "symlink": lambda: path.symlink_to("/etc/hostname"),
    }[kind]()
    try:
        with pytest.raises(shmring.LayoutMismatchError, match="no shared memory"):
            shmring.Producer.attach(ring_name)
        assert [i.problem for i in shmring.list_rings() if i.name == ring_name] != [None]
        with pytest.raises(shmring.LayoutMismatchError, match="no shared memory"):
            shmring.create(ring_name, 4096)
    finally:
        path.rmdir() if kind == "folder" else path.unlink()


# Who owns the name


def test_a_living_owner_is_refused_with_its_pid_and_is_unharmed(ring_name):
    """The second start of a service must say who has the name, and not break the first."""
    with shmring.create(ring_name, 4096) as first, first.producer() as producer:
        inode = path_of(ring_name).stat().st_ino
        with pytest.raises(shmring.SegmentExistsError, match=f"owner_pid={os.getpid()}") as caught:
            shmring.create(ring_name, 8192)
        assert (caught.value.name, caught.value.owner_pid) == (ring_name, os.getpid())
        assert isinstance(caught.value, FileExistsError)
        assert path_of(ring_name).stat().st_ino == inode
        assert producer.try_push(b"still here")


def test_the_leftover_of_a_dead_owner_makes_way(ring_name):
    """After a crash the service starts again under the same name, without a person."""
    leave_behind(ring_name)
    inode = path_of(ring_name).stat().st_ino
    with shmring.create(ring_name, 8192) as ring:
        assert ring.capacity_bytes == 8192
        assert path_of(ring_name).stat().st_ino != inode


def test_the_pid_in_a_header_is_for_people_and_decides_nothing(ring_name):
    """A dead owner's pid may be a stranger's by now: who lives is told by a lock that the kernel drops."""
    leave_behind(ring_name)
    with path_of(ring_name).open("r+b") as segment:
        segment.seek(0x14)
        segment.write(os.getppid().to_bytes(4, sys.byteorder))
    [info] = [info for info in shmring.list_rings() if info.name == ring_name]
    assert info.owner_alive is False
    with shmring.create(ring_name, 4096) as ring, path_of(ring_name).open("r+b") as segment:
        segment.seek(0x14)
        segment.write((2**22 + 5).to_bytes(4, sys.byteorder))  # above the largest pid there can be
        with pytest.raises(shmring.SegmentExistsError):
            shmring.create(ring_name, 4096)
        assert ring.is_open


def test_ends_on_a_replaced_leftover_learn_that_nobody_will_come(ring_name):
    """They hold the old object: without a word they would wait beside the new one for ever."""
    leave_behind(ring_name)
    with shmring.Consumer.attach(ring_name) as consumer:
        assert consumer.try_pop() is None
        with shmring.create(ring_name, 4096), pytest.raises(shmring.EndOfRing):
            consumer.pop(timeout_s=60)


def test_many_that_replace_one_leftover_make_one_ring(ring_name):
    """Eight workers restarted at once: one makes the ring, nobody is told of a dead owner as alive."""
    for _ in range(5):
        leave_behind(ring_name)
        made: list[shmring.Ring] = []
        refused: list[shmring.SegmentExistsError] = []
        gate = threading.Barrier(8)

        def start(made=made, refused=refused, gate=gate):
            gate.wait()
            try:
                made.append(shmring.create(ring_name, 4096))
            except shmring.SegmentExistsError as refusal:
                refused.append(refusal)

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1
        assert len(refused) == 7
        assert {error.owner_pid for error in refused} == {os.getpid()}
        made[0].close()


def test_a_leftover_that_another_process_is_removing_is_waited_for(ring_name):
    """Two removers at once: the slower one must not take the name away from what came next."""
    leave_behind(ring_name)
    other = segment.Handle(segment._open(ring_name, read_only=False), ring_name)
    assert other.take(segment.Role.REMOVER)
    timer = threading.Timer(0.05, lambda: (path_of(ring_name).unlink(), other.close()))
    timer.start()
    with shmring.create(ring_name, 8192) as ring:
        assert path_of(ring_name).stat().st_size == 4096 + ring.capacity_bytes
    timer.join()


def test_a_ring_that_is_being_removed_is_not_attached_to(ring_name):
    """Whoever attached would share the ring with nobody."""
    ring = shmring.create(ring_name, 4096)
    lib.shr_header_retire(ring._segment.mapping.header)
    with pytest.raises(shmring.SegmentNotFoundError, match="being removed"):
        shmring.Consumer.attach(ring_name, timeout_s=0.01)
    assert shmring.read_statistics(ring_name).is_retired
    ring.close()


def test_closing_takes_only_its_own_object_away(ring_name):
    """Somebody removed the name by hand and made another: closing the first must not take that one."""
    first = shmring.create(ring_name, 4096)
    path_of(ring_name).unlink()
    with shmring.create(ring_name, 8192):
        first.close()
        assert path_of(ring_name).stat().st_size == 4096 + 8192


def test_closing_twice_or_after_the_name_is_gone_is_closing_once(ring_name):
    """Clean-up code runs twice in every program that lives long enough."""
    ring = shmring.create(ring_name, 4096)
    path_of(ring_name).unlink()
    ring.close()
    ring.close()
    assert not ring.is_open


def test_a_ring_that_is_forgotten_gives_its_name_back(ring_name):
    """A ring dropped on an error path must not stay for the next start to trip over."""
    ring = shmring.create(ring_name, 4096)
    del ring
    gc.collect()
    assert not path_of(ring_name).exists()


def test_ends_go_on_after_the_name_is_gone(ring_name):
    """The owner may leave first; what is on its way must still arrive."""
    ring = shmring.create(ring_name, 4096)
    with ring.producer() as producer, ring.consumer() as consumer:
        ring.close()
        assert producer.try_push(b"late")
        assert consumer.try_pop() == b"late"


def test_no_end_is_taken_from_a_closed_ring(ring_name):
    """The error must speak of the ring, not of a file in /proc."""
    ring = shmring.create(ring_name, 4096)
    ring.close()
    with pytest.raises(shmring.RingClosedError, match=ring_name):
        ring.producer()
    with pytest.raises(shmring.RingClosedError):
        ring.consumer()


def test_the_owner_lock_is_taken_under_python_o_as_well(ring_name):
    """Without it every ring of a server started with -O would be swept as a leftover."""
    code = (
        f"import shmring; r = shmring.create({ring_name!r}, 4096);"
        "print(r.statistics().owner_state, shmring.read_statistics(r.name).owner_state)"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["attached", "attached"]


# Sweeping, listing, unlinking


@pytest.fixture
def only_ours(monkeypatch, ring_name):
    """Let sweep() see the names of this test alone: others may be at work on this machine."""
    everything = segment.segment_names
    monkeypatch.setattr(ring_module, "segment_names", lambda: [n for n in everything() if ring_name in n])


@pytest.mark.usefixtures("only_ours")
def test_sweep_takes_the_leftovers_of_the_dead_and_nothing_else(ring_name):
    """Twenty crashes must not fill shared memory, and a living neighbour must not lose a ring."""
    foreign = SHM / f"psm_{ring_name}"
    foreign.touch()
    try:
        leave_behind(f"{ring_name}.dead")
        path_of(f"{ring_name}.empty").touch()
        with shmring.create(f"{ring_name}.alive", 4096) as alive, alive.producer() as producer:
            assert shmring.sweep() == [f"{ring_name}.dead", f"{ring_name}.empty"]
            assert producer.try_push(b"x")
            assert foreign.exists()
            assert path_of(f"{ring_name}.alive").exists()
            assert shmring.sweep() == []
    finally:
        foreign.unlink()


@pytest.mark.usefixtures("only_ours")
def test_sweep_leaves_an_unfinished_segment_alone_until_it_is_old(ring_name, monkeypatch):
    """Its maker may be about to lock it; sweeping it would make a healthy start fail."""
    path = SHM / f"shmring.~{ring_name}"
    path.touch()
    try:
        assert shmring.sweep() == []
        monkeypatch.setattr(ring_module, "UNFINISHED_AGE_S", 0.0)
        assert shmring.sweep() == [f"~{ring_name}"]
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.usefixtures("only_ours")
def test_sweep_goes_on_past_what_it_may_not_remove(ring_name, monkeypatch):
    """One entry of another user in the sticky folder must not protect all leftovers behind it."""
    for part in "abc":
        leave_behind(f"{ring_name}.{part}")
    path_of(f"{ring_name}.a2").mkdir()
    unlink = posix_ipc.unlink_shared_memory

    def refuse_b(name: str) -> None:
        if name.endswith(".b"):
            raise posix_ipc.PermissionsError("not yours")
        unlink(name)

    monkeypatch.setattr(posix_ipc, "unlink_shared_memory", refuse_b)
    assert shmring.sweep() == [f"{ring_name}.a", f"{ring_name}.c"]
    monkeypatch.undo()
    path_of(f"{ring_name}.a2").rmdir()
    assert not shmring.read_statistics(f"{ring_name}.b").is_retired, "what stays is left as it was"
    shmring.unlink(f"{ring_name}.b")


def test_unlink_refuses_a_living_owner_and_a_missing_name(ring_name):
    """`unlink` in the wrong terminal must not cut off a running server."""
    with shmring.create(ring_name, 4096):
        with pytest.raises(shmring.SegmentExistsError) as caught:
            shmring.unlink(ring_name)
        assert caught.value.owner_pid == os.getpid()
    with pytest.raises(shmring.SegmentNotFoundError):
        shmring.unlink(ring_name)


def test_the_list_shows_every_kind_of_thing_that_is_ours(ring_name):
    """What `ls` does not show cannot be cleaned up by an operator."""
    leave_behind(f"{ring_name}.dead")
    path_of(f"{ring_name}.junk").write_bytes(b"junk")
    blob = shmring.publish_blob(f"{ring_name}.blob", b"facts")
    with shmring.create(f"{ring_name}.ring", 8192, mode=0o640):
        infos = {i.name.removeprefix(f"{ring_name}."): i for i in shmring.list_rings() if ring_name in i.name}
    blob.close()
    assert list(infos) == ["blob", "dead", "junk", "ring"]
    assert {name: (i.kind, i.owner_alive) for name, i in infos.items()} == {
        "blob": ("blob", True),
        "dead": ("ring", False),
        "junk": ("damaged", None),
        "ring": ("ring", True),
    }
    ring = infos["ring"]
    assert (ring.size_bytes, ring.mode, ring.uid, ring.problem) == (12288, 0o640, os.getuid(), None)
    assert ring.statistics is not None
    assert ring.statistics.capacity_bytes == 8192
    assert infos["blob"].statistics is None
    assert "size=4" in (infos["junk"].problem or "")
    shmring.unlink(f"{ring_name}.dead")
    shmring.unlink(f"{ring_name}.junk")


def test_looking_at_rings_changes_nothing(ring_name):
    """An operator looks at a sick system all day; looking must not be part of the illness."""
    with shmring.create(ring_name, 4096) as ring, ring.producer() as producer:
        producer.try_push(b"x")
        before = path_of(ring_name).read_bytes()
        shmring.list_rings()
        shmring.read_statistics(ring_name)
        assert path_of(ring_name).read_bytes() == before


# Blobs


@pytest.mark.parametrize("payload", [b"", b"x", b"\0" * 4095, b"y" * 4096, bytes(range(256)) * 40])
def test_a_blob_is_read_as_it_was_published(payload, ring_name):
    """The scheduler learns all it knows of a deployment from one of these."""
    blob = shmring.publish_blob(ring_name, payload)
    mapping = shmring.read_blob(ring_name)
    assert bytes(mapping.payload) == payload
    assert mapping.payload.readonly
    blob.close()
    assert bytes(mapping.payload) == payload, "those who mapped it keep it"
    mapping.handle.close()


def test_a_blob_that_says_it_is_longer_than_it_is_is_refused(ring_name):
    """Its length is in shared memory, where anybody with access may write."""
    blob = shmring.publish_blob(ring_name, b"x")
    with path_of(ring_name).open("r+b") as file:
        file.seek(48)
        file.write((4097).to_bytes(8, "little"))
    mapping = shmring.read_blob(ring_name)
    with pytest.raises(shmring.LayoutMismatchError, match="length=4097, max=4096"):
        mapping.payload  # noqa: B018
    mapping.handle.close()
    blob.close()


# Descriptors and errors of the machine


def test_no_descriptor_is_left_open_on_any_path(ring_name):
    """A manager that restarts its workers for months runs out of descriptors one by one."""
    blob_name = f"{ring_name}.blob"
    for round_number in range(3):
        with (
            shmring.create(ring_name, 4096) as ring,
            ring.producer() as producer,
            ring.consumer() as consumer,
        ):
            blob = shmring.publish_blob(blob_name, b"x")
            for use in (
                lambda: shmring.create(ring_name, 4096),
                lambda: shmring.Producer.attach(ring_name),
                lambda: shmring.Producer.attach(blob_name),
                lambda: shmring.read_blob(ring_name),
                lambda: shmring.read_statistics(blob_name),
                lambda: shmring.unlink(ring_name),
                lambda: shmring.read_blob(blob_name),  # and forget it
                shmring.list_rings,
                ring.statistics,
                producer.statistics,
                consumer.peer_state,
            ):
                with contextlib.suppress(shmring.ShmringError, OSError):
                    use()
            blob.close()
        if round_number == 0:
            before = open_descriptors()
    assert open_descriptors() == before


def test_too_little_shared_memory_is_one_error_with_both_sizes(ring_name, monkeypatch):
    """ftruncate would succeed, and the first write would kill the process by SIGBUS."""

    def no_room(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(shmring.NoSharedMemoryError, match=r"needed=8392704, free=\d+") as caught:
        shmring.create(ring_name, 1 << 23)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.needed_bytes == (1 << 23) + 4096
    assert caught.value.free_bytes > 0
    assert not path_of(ring_name).exists()


def test_a_failed_mapping_leaves_the_name_to_its_owner(ring_name, monkeypatch):
    """An attacher that runs out of address space must not take the ring down with it."""
    with shmring.create(ring_name, 4096) as ring:
        before = open_descriptors()
        real = segment.lib

        class NoMap:
            def __getattr__(self, name: str):
                return getattr(real, name)

            def shr_map(self, fd, capacity, writable, doubled, error):
                error[0] = -errno.ENOMEM
                return segment.ffi.NULL

        monkeypatch.setattr(segment, "lib", NoMap())
        with pytest.raises(OSError, match=re.escape(ring_name)) as caught:
            shmring.Producer.attach(ring_name)
        assert caught.value.errno == errno.ENOMEM
        with pytest.raises(OSError):
            ring.producer()
        monkeypatch.undo()
        assert open_descriptors() == before
        with shmring.Producer.attach(ring_name) as producer:
            assert producer.try_push(b"fine")


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, pickle.dumps, lambda ring: copy.copy(ring._mapping.handle)]
)
def test_a_refused_copy_leaves_the_ring_to_its_owner(duplicate, ring_name):
    """A settings object that holds a ring is copied now and then: the name must not be free after it."""
    with shmring.create(ring_name, 4096) as ring:
        with pytest.raises(TypeError, match="copied"):
            duplicate(ring)
        gc.collect()
        with pytest.raises(shmring.SegmentExistsError):
            shmring.create(ring_name, 4096)
