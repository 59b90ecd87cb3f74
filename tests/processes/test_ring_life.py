"""Real processes at the two ends: death, succession, signals, forks, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import shmring
from shmring import testing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
WATCHDOG_S = 60
TOLD_S = 20
"""Far above what is promised: a loaded machine must not fail these, a side that is never told must."""

pytestmark = pytest.mark.timeout(120)


class Child:
    """Another Python process that runs `code`; it says lines on stdout and hears them on stdin."""

    def __init__(self, code: str, *prefix: str, options: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [
                *prefix,
                sys.executable,
                *options,
                "-c",
                "import os, sys, time, signal, shmring\n" + textwrap.dedent(code),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def hears(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def says(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            self.process.wait(WATCHDOG_S)
            pytest.fail(f"the child said nothing more: {self.process.stderr.read()}")
        return line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WATCHDOG_S)

    def ends(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=WATCHDOG_S)
        return self.process.returncode, out, err

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WATCHDOG_S)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(code: str, *prefix: str, options: tuple[str, ...] = ()) -> Child:
        children.append(Child(code, *prefix, options=options))
        return children[-1]

    yield start
    for child in children:
        child.close()


@pytest.fixture
def ring(ring_name):
    with shmring.create(ring_name, 4096) as ring:
        yield ring


def path_of(name: str) -> Path:
    return Path(f"/dev/shm/shmring.{name}")


def told_within(act: Callable[[], object]) -> float:
    start = time.monotonic()
    act()
    return time.monotonic() - start


def wait_until_asleep(end: Callable[[], shmring.EndStatistics]) -> None:
    """Until the other process sleeps in its wait: the statistics show it."""
    deadline = time.monotonic() + WATCHDOG_S
    while end().waiting_ns is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


# Attaching from elsewhere


def test_an_unrelated_process_leaves_the_name_alone_and_says_nothing(start, ring):
    """Trackers that clean up after attachers have removed living rings, and filled stderr."""
    for way in ("c.close(); p.close()", "pass", "sys.exit()", "os._exit(0)", "del c, p"):
        code = f"""
            c = shmring.Consumer.attach({ring.name!r}); p = shmring.Producer.attach({ring.name!r})
            shmring.read_statistics({ring.name!r}); shmring.list_rings()
            {way}
        """
        assert start(code).ends() == (0, "", ""), way
        assert path_of(ring.name).exists()
    with shmring.Producer.attach(ring.name) as producer:
        assert producer.try_push(b"x")


def test_the_owners_exit_is_silent_and_leaves_nothing(start, ring_name):
    """However it ends, short of a kill."""
    for way in ("r.close()", "pass", "sys.exit(0)", "del r", "b.close(); r.close()"):
        code = f"""
            r = shmring.create({ring_name!r}, 4096); b = shmring.publish_blob({ring_name + ".b"!r}, b"x")
            p = r.producer(); c = r.consumer(); p.try_push(b"x"); kept = c.drain(1)[0].payload
            m = shmring.read_blob({ring_name + ".b"!r}); view = m.payload
            {way}
        """
        assert start(code).ends() == (0, "", ""), way
        assert not path_of(ring_name).exists()
        assert not path_of(ring_name + ".b").exists()


def test_spawned_children_that_attach_twice_each_leave_stderr_empty(start, ring_name):
    """A whole tree of multiprocessing children, each of which would once have cleaned up."""
    code = f"""
        import multiprocessing
        import tests_child
        if __name__ == "__main__":
            r = shmring.create({ring_name!r}, 4096)
            context = multiprocessing.get_context("spawn")
            children = [context.Process(target=tests_child.attach_twice, args=(r.name,)) for _ in range(4)]
            for child in children: child.start()
            for child in children: child.join()
            assert [c.exitcode for c in children] == [0] * 4, [c.exitcode for c in children]
            assert shmring.read_statistics(r.name).consumer.attaches == 8
            r.close()
    """
    child = start("sys.path.insert(0, " + repr(str(Path(__file__).parent)) + ")\n" + textwrap.dedent(code))
    assert child.ends() == (0, "", "")


def test_records_cross_between_two_processes_unchanged(start, ring):
    """The plain use: one process fills, another empties, both wait for each other."""
    child = start(
        f"""
        with shmring.Producer.attach({ring.name!r}) as p:
            for n in range(5000):
                p.push(bytes([n % 251]) * (n * 7 % 1201), type=n % 256)
        """
    )
    with shmring.Consumer.attach(ring.name) as consumer:
        count = 0
        with contextlib.suppress(shmring.EndOfRing):
            while True:
                for record in consumer.drain_wait(7, WATCHDOG_S):
                    assert record.type == count % 256
                    assert bytes(record) == bytes([count % 251]) * (count * 7 % 1201)
                    count += 1
                consumer.release()
    assert count == 5000
    assert child.ends() == (0, "", "")


# Death


STAY = "print('there'); time.sleep(99)"

CONSUMER_DIES = {
    "idle": f"c.try_pop(); {STAY}",
    "with drained records": f"kept = c.drain(2); {STAY}",
    "waiting for records": "print('there'); c.drain(9); c.release(); c.pop()",
}


@pytest.mark.parametrize("how", CONSUMER_DIES)
def test_a_killed_consumer_is_told_to_the_producer_and_succeeded(how, start, ring):
    """The producer waits on a full ring for somebody who will never free anything."""
    with ring.producer() as producer:
        for n in range(3):
            producer.try_push(bytes([n]) * 5)
        child = start(f"c = shmring.Consumer.attach({ring.name!r}, timeout_s=60); {CONSUMER_DIES[how]}")
        assert child.says() == "there"
        if how == "waiting for records":
            wait_until_asleep(lambda: ring.statistics().consumer)
        released = ring.statistics().consumer.records
        pid = child.pid
        child.kill()
        assert producer.peer_state() is shmring.PeerState.LOST
        assert ring.statistics().consumer.state == "lost"
        with pytest.raises(shmring.PeerLostError) as caught:
            testing.fill(producer)
        with pytest.raises(shmring.PeerLostError):
            producer.push(b"x" * 57)
        assert caught.value.pid == pid
        with ring.consumer() as successor:
            assert producer.peer_state() is shmring.PeerState.ATTACHED
            first = [bytes([n]) * 5 for n in range(3)][released:]
            assert [bytes(r) for r in successor.drain(3 - released)] == first if first else True
            successor.drain(1)
            successor.release()
            assert producer.push(b"x" * 57, WATCHDOG_S)


def test_a_producer_asleep_on_a_full_ring_is_told_of_the_death(start, ring):
    """No wake comes from the dead: the sleeper looks for itself."""
    child = start(
        f"""
        p = shmring.Producer.attach({ring.name!r}, timeout_s=60)
        try:
            while p.push(b"x" * 57): pass
        except shmring.PeerLostError as error:
            print("told", error.pid)
        """
    )
    victim = start(
        f"c = shmring.Consumer.attach({ring.name!r}, timeout_s=60); print('there'); time.sleep(99)"
    )
    assert victim.says() == "there"
    wait_until_asleep(lambda: ring.statistics().producer)
    victim.kill()
    assert told_within(lambda: child.process.wait(WATCHDOG_S)) < TOLD_S
    assert child.says() == f"told {victim.pid}"


PRODUCER_DIES = {
    "idle": f"p.push(b'last'); {STAY}",
    "in the middle of a claim": f"p.push(b'last'); p.try_claim(99).payload[:] = b'x' * 99; {STAY}",
    "with an unpublished batch": f"p.push(b'last'); p.try_append(b'no'); p.try_append(b'no'); {STAY}",
    "waiting for room": "p.push(b'last'); print('there'); p.push(b'y' * 4080)",
}


@pytest.mark.parametrize("how", PRODUCER_DIES)
def test_a_killed_producer_is_told_to_the_consumer_and_succeeded(how, start, ring):
    """What it had published arrives, what it had not was never there, and the next one goes on."""
    with ring.consumer() as consumer:
        child = start(f"p = shmring.Producer.attach({ring.name!r}, timeout_s=60); {PRODUCER_DIES[how]}")
        assert child.says() == "there"
        if how == "waiting for room":
            wait_until_asleep(lambda: ring.statistics().producer)
        child.kill()
        assert consumer.pop(WATCHDOG_S) == b"last"
        with pytest.raises(shmring.PeerLostError) as caught:
            consumer.pop()
        assert caught.value.pid == child.pid
        with ring.producer() as successor:
            assert successor.push(b"next", WATCHDOG_S)
            assert consumer.pop(WATCHDOG_S) == b"next"
            assert consumer.try_pop() is None


def test_a_frame_for_a_killed_consumer_says_who_it_was(start, ring):
    """As other records do: the pid is what a person looks for in the logs."""
    schema = shmring.Schema("bytes", 1, [shmring.Column("bytes", "u1", shmring.Shape.FREE)])
    with ring.producer() as producer:
        child = start(f"c = shmring.Consumer.attach({ring.name!r}, timeout_s=60); {STAY}")
        assert child.says() == "there"
        testing.fill(producer)
        child.kill()
        with pytest.raises(shmring.PeerLostError) as caught:
            schema.push(producer, 0, bytes(100), timeout_s=WATCHDOG_S)
        assert caught.value.pid == child.pid


def test_a_consumer_asleep_on_an_empty_ring_is_told_of_the_death(start, ring):
    """By every kind of wait, in another process, without a timeout."""
    victim = start(
        f"p = shmring.Producer.attach({ring.name!r}, timeout_s=60); print('there'); time.sleep(99)"
    )
    assert victim.says() == "there"
    child = start(
        f"""
        c = shmring.Consumer.attach({ring.name!r}, timeout_s=60)
        assert c.wait_until_readable()
        assert shmring.wait_any([c])
        try: c.drain(1)
        except shmring.PeerLostError as error: print("told", error.pid)
        """
    )
    wait_until_asleep(lambda: ring.statistics().consumer)
    victim.kill()
    assert told_within(lambda: child.process.wait(WATCHDOG_S)) < TOLD_S
    assert child.says() == f"told {victim.pid}"


def test_a_worker_that_dies_again_and_again_loses_nothing(start, ring_name):
    """Each successor starts with what the last one had in hand."""
    sent = [n.to_bytes(2, "little") * (n % 9 + 1) for n in range(200)]
    with shmring.create(ring_name, 8192) as ring, ring.producer(takeover=True) as producer:
        for payload in sent:
            assert producer.try_push(payload)
        got: list[bytes] = []
        for _ in range(6):
            child = start(
                f"""
                c = shmring.Consumer.attach({ring.name!r}, timeout_s=60, takeover=True)
                for record in c.drain(30): print(bytes(record).hex())
                c.release()
                c.drain(20)
                print("in hand"); time.sleep(99)
                """
            )
            while (line := child.says()) != "in hand":
                got.append(bytes.fromhex(line))
            child.kill()
        with ring.consumer() as last:
            while (record := last.try_pop()) is not None:
                got.append(record)
    assert got == sent


def test_a_stopped_process_is_not_a_dead_one(start, ring):
    """A debugger, a full disk or a busy host: taking its role away would make two producers."""
    child = start(
        f"""
        p = shmring.Producer.attach({ring.name!r}, timeout_s=60)
        claim = p.try_claim(9); claim.payload[:4] = b"half"
        print("there"); sys.stdin.readline()
        claim.payload[4:] = b"whole"; claim.commit()
        """
    )
    with ring.consumer() as consumer:
        assert child.says() == "there"
        os.kill(child.pid, signal.SIGSTOP)
        try:
            assert consumer.pop(1.2) is None
            assert not consumer.wait_until_readable(0.3)
            assert consumer.peer_state() is shmring.PeerState.ATTACHED
            with pytest.raises(shmring.RoleTakenError) as caught:
                ring.producer()
            assert caught.value.holder_pid == child.pid
        finally:
            os.kill(child.pid, signal.SIGCONT)
        child.hears("go on")
        assert consumer.pop(WATCHDOG_S) == b"halfwhole"
        assert child.ends()[0] == 0


# Owners


def test_a_killed_owner_leaves_a_leftover_that_the_next_start_replaces(start, ring_name):
    """Restart after a crash, without a person; and while the first lives, a clear refusal."""
    code = f"r = shmring.create({ring_name!r}, 4096); print('made'); time.sleep(99)"
    for _ in range(3):
        owner = start(code)
        assert owner.says() == "made"
        with pytest.raises(shmring.SegmentExistsError) as caught:
            shmring.create(ring_name, 4096)
        assert caught.value.owner_pid == owner.pid
        with pytest.raises(shmring.SegmentExistsError):
            shmring.unlink(ring_name)
        assert shmring.read_statistics(ring_name).owner_state == "attached"
        owner.kill()
        assert shmring.read_statistics(ring_name).owner_state == "lost"
        assert [i.owner_alive for i in shmring.list_rings() if i.name == ring_name] == [False]
    with shmring.create(ring_name, 8192) as ring:
        assert ring.capacity_bytes == 8192


def test_the_ends_outlive_a_killed_owner(start, ring_name):
    """The process that made the ring need not be one of the two that use it."""
    owner = start(f"r = shmring.create({ring_name!r}, 4096); print('made'); time.sleep(99)")
    assert owner.says() == "made"
    with shmring.Producer.attach(ring_name) as producer, shmring.Consumer.attach(ring_name) as consumer:
        owner.kill()
        for n in range(300):
            assert producer.push(bytes([n % 256]) * 50, 0)
            assert consumer.pop(0) == bytes([n % 256]) * 50
        shmring.unlink(ring_name)
        assert producer.try_push(b"still")
        assert consumer.try_pop() == b"still"


def test_processes_that_start_at_once_end_up_on_one_ring(start, ring_name):
    """Create or attach, in any order, after a crash: two rings of one name would cut half of them off."""
    start(f"r = shmring.create({ring_name!r}, 4096); os._exit(0)").ends()
    code = f"""
        sys.stdin.readline()
        while True:
            try:
                ring = shmring.create({ring_name!r}, 4096)
                break
            except shmring.SegmentExistsError:
                try: ring = shmring.read_statistics({ring_name!r}) and None
                except (shmring.SegmentNotFoundError, shmring.LayoutMismatchError): continue
                break
        print(os.stat("/dev/shm/shmring.{ring_name}").st_ino, ring is not None)
        sys.stdin.readline()
    """
    children = [start(code) for _ in range(8)]
    for child in children:
        child.hears("go")
    said = [child.says().split() for child in children]
    assert len({inode for inode, _ in said}) == 1
    assert sorted(made for _, made in said) == ["False"] * 7 + ["True"]
    for child in children:
        child.hears("end")
        assert child.ends()[0] == 0


def test_a_maker_stopped_half_way_does_not_show_an_unfinished_ring(start, ring_name):
    """An attacher that took the empty object for a ring, or for rubbish, would be alone."""
    stopped = start(
        f"""
        import shmring.segment as segment
        fill = segment._reserve
        def stop(handle, size): print("half way"); os.kill(os.getpid(), signal.SIGSTOP); fill(handle, size)
        segment._reserve = stop
        r = shmring.create({ring_name!r}, 4096)
        print("made"); sys.stdin.readline()
        """
    )
    assert stopped.says() == "half way"
    try:
        with pytest.raises(shmring.SegmentNotFoundError):
            shmring.Consumer.attach(ring_name, timeout_s=0.05)
        assert not path_of(ring_name).exists()
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.says() == "made"
    with shmring.Consumer.attach(ring_name) as consumer:
        assert consumer.try_pop() is None
    stopped.hears("end")
    assert stopped.ends()[0] == 0


# Forks


def test_a_forked_child_cannot_use_its_parents_ends_and_its_exit_changes_nothing(start, ring_name):
    """Two processes at one end overwrite each other; a child's clean-up would take the ring away."""
    code = f"""
        r = shmring.create({ring_name!r}, 4096); p = r.producer(); c = r.consumer()
        p.try_push(b"before"); record = c.drain(1)[0]; view = record.payload
        pid = os.fork()
        if pid == 0:
            for use in (lambda: p.try_push(b"x"), lambda: c.drain(1), c.release, p.peer_state, r.producer,
                        lambda: bytes(record), r.statistics):
                try: use()
                except (shmring.RingClosedError, ValueError): pass
                else: os._exit(3)
            assert not r.is_open and not p.is_open and not c.is_open
            assert bytes(view) == b"before"
            p.close(); c.close(); r.close()
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert os.path.exists("/dev/shm/shmring.{ring_name}")
        s = r.statistics()
        assert (s.producer.state, s.consumer.state, s.owner_state) == ("attached",) * 3, s
        c.release(); p.try_push(b"after"); assert c.try_pop() == b"after"
        r.close(); p.close(); c.close()
    """
    assert start(code).ends() == (0, "", "")


def test_a_child_forked_during_a_long_copy_is_told_that_the_end_is_not_its_own(start, ring_name):
    """Not that another thread copies: the child has no such thread, and would wait for it for ever."""
    code = f"""
        import threading
        r = shmring.create({ring_name!r}, 1 << 26); p = r.producer(); c = r.consumer()
        payload = bytes(40 << 20)
        def copy():
            while not done:
                p.try_push(payload); c.try_pop()
        done = []; thread = threading.Thread(target=copy, daemon=True); thread.start()
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                p.discard()
                for use in (p._abort, c.try_pop, c.release, lambda: c.drain(1)):
                    try: use()
                    except shmring.RingClosedError: pass
                    else: os._exit(3)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status == 0, status
        done.append(1); thread.join()
        p.close(); c.close(); r.close()
    """
    assert start(code).ends() == (0, "", "")


def test_a_parents_death_is_seen_although_its_forked_child_lives(start, ring):
    """A worker pool forked from the server must not keep the dead server's roles alive."""
    child = start(
        f"""
        p = shmring.Producer.attach({ring.name!r}, timeout_s=60)
        p.push(b"from the parent")
        pid = os.fork()
        if pid == 0:
            print("forked", os.getpid()); time.sleep(99)
        os.waitpid(pid, 0)
        """
    )
    grandchild = int(child.says().split()[1])
    try:
        with ring.consumer() as consumer:
            assert consumer.pop(WATCHDOG_S) == b"from the parent"
            assert consumer.peer_state() is shmring.PeerState.ATTACHED
            child.kill()
            os.kill(grandchild, 0)  # it lives
            with pytest.raises(shmring.PeerLostError):
                consumer.pop()
            with ring.producer() as successor:
                assert successor.try_push(b"next")
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_child_forked_behind_pythons_back_does_not_hold_a_closed_end(start, ring):
    """A C library that forks copies descriptors; closing an end drops its lock all the same."""
    child = start(
        f"""
        import ctypes
        p = shmring.Producer.attach({ring.name!r}, timeout_s=60)
        pid = ctypes.CDLL(None).fork()
        if pid == 0:
            time.sleep(99)
        p.close()
        print("closed", pid); sys.stdin.readline()
        """
    )
    forked = int(child.says().split()[1])
    try:
        with ring.producer() as successor:
            assert successor.try_push(b"x")
    finally:
        os.kill(forked, signal.SIGKILL)


# Signals


@pytest.mark.parametrize(
    "wait", ["c.pop(timeout_s=60)", "c.pop()", "c.wait_until_readable()", "shmring.wait_any([c])"]
)
def test_ctrl_c_ends_a_wait(wait, start, ring):
    """A program that cannot be interrupted is killed, and then leaves things behind."""
    child = start(
        f"""
        c = shmring.Consumer.attach({ring.name!r}, timeout_s=60)
        try: {wait}
        except KeyboardInterrupt: print("interrupted")
        """
    )
    wait_until_asleep(lambda: ring.statistics().consumer)
    os.kill(child.pid, signal.SIGINT)
    assert told_within(lambda: child.process.wait(WATCHDOG_S)) < TOLD_S
    assert child.says() == "interrupted"


def test_signal_handlers_run_during_a_wait_and_the_wait_goes_on(start, ring):
    """Timers and child-exit handlers must not wait for the next record, nor end the wait."""
    child = start(
        f"""
        count = 0
        def handler(*_):
            global count
            count += 1
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        c = shmring.Consumer.attach({ring.name!r}, timeout_s=60)
        began = time.monotonic()
        assert c.pop(0.5) is None
        lasted = time.monotonic() - began
        print("there", count >= 5, lasted >= 0.5)
        for n in range(50): assert c.pop(60) == bytes([n])
        signal.setitimer(signal.ITIMER_REAL, 0)
        """
    )
    assert child.says() == "there True True"
    with ring.producer() as producer:
        for n in range(50):
            producer.push(bytes([n]))
            time.sleep(0.005)  # so that the child sleeps in between
        assert child.ends() == (0, "", "")


# The machine


UNSHARE = ("unshare", "-Urm", "--propagation", "private")


def unshare_works() -> bool:
    probe = "mount -t tmpfs -o size=2m tmpfs /dev/shm"
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run([*UNSHARE, "sh", "-c", probe], capture_output=True, check=False).returncode == 0
    return False


needs_unshare = pytest.mark.skipif(not unshare_works(), reason="no user and mount namespaces here")


@needs_unshare
def test_too_little_shared_memory_is_an_error_and_not_a_signal(start, ring_name):
    """A container's /dev/shm has 64 MiB; writing beyond it kills the process by SIGBUS."""
    child = start(
        f"""
        import subprocess
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", "/dev/shm"], check=True)
        try: shmring.create({ring_name!r}, 8 << 20)
        except shmring.NoSharedMemoryError as error:
            assert (error.errno, error.needed_bytes) == (28, (8 << 20) + 4096), error
            assert 0 < error.free_bytes <= 2 << 20, error
        assert os.listdir("/dev/shm") == []
        with shmring.create({ring_name!r}, 1 << 20) as r, r.producer() as p, r.consumer() as c:
            assert p.try_push(b"x" * 1000000)
            try: shmring.create({ring_name + ".2"!r}, 1 << 20)
            except shmring.NoSharedMemoryError: pass
            else: raise AssertionError
            assert os.listdir("/dev/shm") == ["shmring.{ring_name}"]
            assert len(c.try_pop()) == 1000000
        """,
        *UNSHARE,
    )
    assert child.ends() == (0, "", "")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_told_that_it_may_not(start, ring):
    """Not "no such ring", and no wait for a permission that will not come."""
    child = start(
        f"""
        os.setgid(65534); os.setuid(65534)
        for use in (lambda: shmring.Consumer.attach({ring.name!r}, timeout_s=60),
                    lambda: shmring.read_statistics({ring.name!r}),
                    lambda: shmring.create({ring.name!r}, 4096),
                    lambda: shmring.unlink({ring.name!r})):
            try: use()
            except shmring.SegmentAccessError as error: assert error.name == {ring.name!r}
            else: raise AssertionError
        (info,) = [i for i in shmring.list_rings() if i.name == {ring.name!r}]
        assert "another user" in info.problem and info.uid == 0
        """
    )
    assert child.ends() == (0, "", "")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_may_be_let_in_and_still_cannot_remove_the_ring(start, ring_name):
    """The folder is sticky: whoever may write to a leftover may not always unlink it."""
    leftover = f"{ring_name}.dead"
    start(f"r = shmring.create({leftover!r}, 4096, mode=0o666); os._exit(0)").ends()
    with shmring.create(ring_name, 4096, mode=0o666) as ring, ring.producer() as producer:
        producer.try_push(b"for everybody")
        child = start(
            f"""
            os.setgid(65534); os.setuid(65534)
            with shmring.Consumer.attach({ring_name!r}) as c: assert c.try_pop() == b"for everybody"
            try: shmring.create({leftover!r}, 4096)
            except shmring.SegmentAccessError as error: assert error.name == {leftover!r}
            else: raise AssertionError
            with shmring.create({ring_name + ".mine"!r}, 4096) as mine:
                with mine.producer() as p, mine.consumer() as c:
                    assert p.try_push(b"x") and c.try_pop() == b"x"
            """
        )
        assert child.ends() == (0, "", "")
    assert not shmring.read_statistics(leftover).is_retired
    shmring.unlink(leftover)


@needs_unshare
def test_a_process_in_another_pid_namespace_is_alive_all_the_same(start, ring):
    """Containers share /dev/shm and not their pids: only the kernel's lock tells."""
    child = start(
        f"""
        p = shmring.Producer.attach({ring.name!r}, timeout_s=60)
        p.push(b"x"); print(os.getpid()); sys.stdin.readline()
        """,
        "unshare",
        "-Urpf",
        "--kill-child",
    )
    with ring.consumer() as consumer:
        assert child.says() == "1"
        assert consumer.pop(WATCHDOG_S) == b"x"
        assert consumer.peer_state() is shmring.PeerState.ATTACHED
        assert consumer.pop(0.4) is None
        with pytest.raises(shmring.RoleTakenError):
            ring.producer()
        child.kill()
        with pytest.raises(shmring.PeerLostError):
            consumer.pop()


def test_a_failed_mapping_leaves_the_owners_name_alone(start, ring_name):
    """Little address space is one process's trouble, not that of the ring's owner."""
    with shmring.create(ring_name, 1 << 28):
        child = start(
            f"""
            import resource
            resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
            try: shmring.Consumer.attach({ring_name!r})
            except OSError as error: assert error.errno == 12 and {ring_name!r} in str(error), error
            else: raise AssertionError
            """
        )
        assert child.ends() == (0, "", "")
        with shmring.Consumer.attach(ring_name) as consumer:
            assert consumer.try_pop() is None


def test_a_full_ring_of_a_killed_pair_is_emptied_by_the_next_one(start, ring):
    """Both sides are restarted together; what was on its way is still on its way."""
    child = start(
        f"""
        p = shmring.Producer.attach({ring.name!r}); c = shmring.Consumer.attach({ring.name!r})
        n = 0
        while p.try_push(n.to_bytes(2, "little") * 20): n += 1
        print(n); time.sleep(99)
        """
    )
    count = int(child.says())
    child.kill()
    with ring.consumer() as consumer, ring.producer() as producer:
        assert testing.fill(producer, b"x" * 40) == 0
        assert [bytes(r) for r in consumer.drain(999)] == [n.to_bytes(2, "little") * 20 for n in range(count)]
        consumer.release()
        assert producer.push(b"x" * 4088, 0)


def test_no_child_of_these_tests_was_sent_a_signal_by_a_ring():
    """Nothing in the library sends signals: a pid is for people to read."""
    modules = [p for p in (ROOT / "shmring").rglob("*.py") if p.parent.name != "testing"]  # it kills its own
    sources = "".join(p.read_text() for p in modules)
    sources += "".join(p.read_text() for p in (ROOT / "native").rglob("src/*.c"))
    assert not re.search(r"\b(os\.)?kill(pg)?\s*\(", sources)
