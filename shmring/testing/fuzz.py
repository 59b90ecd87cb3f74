"""Attaches to damaged segments and uses them: nothing but the errors of shmring may come of it.

Each case is a segment with some of its bytes set to what a faulty or hostile process might leave
there, or cut or grown; half of the cases are damaged further between the calls that use them, and some
by a second process at the same time. Cases run in child processes, so that a crash or a hang is found
and its number told: `--seed S --start N --count 1` runs it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import random
import secrets
import signal
import struct
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from shmring.cli import command
from shmring.columns import Column, Schema, Shape
from shmring.consumer import Consumer
from shmring.errors import ShmringError
from shmring.layout import HEADER_LENGTH, NAME_PREFIX
from shmring.producer import Producer
from shmring.ring import create, list_rings, publish_blob, read_blob, read_statistics, unlink
from shmring.segment import SHM_FOLDER
from shmring.testing.states import fill, ring_at

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shmring.ring import Ring

#: Cases that one child runs before the next one takes over.
CHUNK = 2000
#: Of so many chunks one has a second process that writes into its segments while they are used.
SCRIBBLED_EVERY = 8
PATIENCE_S = 30.0
_CAPACITY = 4096

SCHEMA = Schema(
    "fuzz",
    7,
    [
        Column("ids", np.uint64),
        Column("counts", np.uint32),
        Column("tokens", np.int32, Shape.RAGGED, counts="counts"),
        Column("note", np.uint8, Shape.FREE, is_optional=True),
    ],
)

#: Offset and length of the words of the header: constants, positions, states, statistics.
_WORDS = [
    *((offset, 8) for offset in (0x00, 0x18, 0x20, 0x28, 0x30)),
    *((offset, 4) for offset in (0x08, 0x0C, 0x10, 0x14, 0x80, 0x84, 0x400, 0x480)),
    *((offset, 8) for offset in (0x100, 0x108, 0x110, 0x280)),
    *((base + offset, 4) for base in (0x180, 0x300) for offset in (0, 4, 8)),
    *((base + 16, 8) for base in (0x180, 0x300)),
    *((base + 8 * i, 8) for base in (0x200, 0x380) for i in range(12)),
    *((0x500 + 8 * i, 8) for i in range(0, 64, 7)),
]
_POSITIONS = (0x100, 0x280)
_PLAIN = [0, 1, 2, 3, 7, 8, 9, 16, 24, 4088, 4095, 4096, 4097, 8192, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


@dataclass
class Report:
    """What a run did and found."""

    seed: int
    cases: int = 0
    attached: int = 0
    """Cases in which an end could be taken."""
    refused: int = 0
    """Cases that ended in an error, as most should."""
    duration_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def text(self) -> str:
        """All of it, for people."""
        counts = f"cases={self.cases}, attached={self.attached}, refused={self.refused}"
        lines = [f"{counts}, time={self.duration_s:.1f} s"]
        lines += [f"FAILED: {failure}" for failure in self.failures]
        lines.append("some cases failed" if self.failures else "no crash, no hang, no error but ours")
        return "\n".join(lines)


class _Board:
    """Where a child says which case it is at; it outlives the child."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.words = (ctypes.c_uint64 * 4).from_buffer(self._memory)

    CASE, ATTACHED, REFUSED, SCRIBBLER = range(4)


def run(count: int, seed: int, *, start: int = 0, progress: Callable[[str], None] | None = None) -> Report:
    """Run cases `start` to `start + count`. Forks: call it in a process with one thread."""
    report = Report(seed)
    board = _Board()
    name = f"fuzz-{os.getpid()}-{secrets.token_hex(4)}"
    began = time.monotonic()
    images = _images(name)
    number, last = start, start + count
    try:
        while number < last:
            stop = min(last, number - number % CHUNK + CHUNK)
            try:
                problem = _run_chunk(_Case(name, images, seed, board), number, stop, board)
            finally:
                _end_scribbler(board)
            number = stop
            if problem is not None:
                number = int(board.words[_Board.CASE]) + 1
                report.failures.append(f"{problem}: --seed {seed} --start {number - 1} --count 1")
                if len(report.failures) >= 20:
                    break
            if progress is not None and number % 100_000 == 0:
                progress(f"{number - start} cases")
    finally:
        _path(name).unlink(missing_ok=True)
    report.cases = number - start
    report.attached = int(board.words[_Board.ATTACHED])
    report.refused = int(board.words[_Board.REFUSED])
    report.duration_s = time.monotonic() - began
    return report


def _run_chunk(case: _Case, start: int, stop: int, board: _Board) -> str | None:
    """Run some cases in a child; say what is wrong with the one that stands on the board."""
    board.words[_Board.CASE] = start
    pid = os.fork()
    if pid == 0:
        case.live(start, stop)
    seen, patience = -1, 0.0
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return None if code == 0 else f"crash, signal {-code}" if code < 0 else "unexpected error"
        if board.words[_Board.CASE] != seen:
            seen, patience = int(board.words[_Board.CASE]), time.monotonic() + PATIENCE_S
        elif time.monotonic() > patience:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hang"
        time.sleep(0.002)


def _end_scribbler(board: _Board) -> None:
    """Nobody else waits for it: it is the child's child, and the child may be dead."""
    pid, board.words[_Board.SCRIBBLER] = int(board.words[_Board.SCRIBBLER]), 0
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _path(name: str) -> Path:
    return SHM_FOLDER / f"{NAME_PREFIX}{name}"


def _images(name: str) -> list[bytes]:
    """The bytes of sound segments of several kinds, to start from."""
    ids = np.arange(5, dtype=np.uint64)
    counts = np.array([1, 0, 3, 2, 1], np.uint32)
    tokens = np.arange(7, dtype=np.int32)

    def empty(ring: Ring) -> None:
        pass

    def records(ring: Ring) -> None:
        with ring.producer() as producer:
            for length in (0, 1, 57, 300, 8):
                producer.try_push(b"r" * length, length % 7)
            SCHEMA.push(producer, 5, ids, counts, tokens, None)

    def full(ring: Ring) -> None:
        with ring.producer() as producer, ring.consumer() as consumer:
            producer.try_push(b"x" * 3000)
            consumer.try_pop()
            while SCHEMA.push(producer, 5, ids, counts, tokens, np.frombuffer(b"note", np.uint8)):
                pass
            fill(producer, b"")

    images = []
    for start in (0, 2**32 - 64, 2**64 - 128):
        for make in (empty, records, full):
            with ring_at(name, _CAPACITY, start) as ring:
                make(ring)
                images.append(_path(name).read_bytes())
    with contextlib.closing(publish_blob(name, b"blob" * 1000)):
        images.append(_path(name).read_bytes())
    return images


class _Case:
    """Makes a damaged segment and uses it, in a child."""

    def __init__(self, name: str, images: list[bytes], seed: int, board: _Board) -> None:
        self._name = name
        self._images = images
        self._seed = seed
        self._words = board.words
        self._dice = random.Random()  # noqa: S311 -- a seed that replays - replayable is what it must be
        self._fd = -1
        self._memory: mmap.mmap | None = None
        self._may_resize = True

    def live(self, start: int, stop: int) -> NoReturn:
        """Run the cases; whatever is no error of ours ends the child."""
        code = 1
        try:
            self._open()
            is_scribbled_on = start // CHUNK % SCRIBBLED_EVERY == SCRIBBLED_EVERY - 1
            if is_scribbled_on:
                self._words[_Board.SCRIBBLER] = self._fork_scribbler(start)
            for number in range(start, stop):
                self._words[_Board.CASE] = number
                self._dice.seed(self._seed << 40 | number)
                self._run(may_resize=not is_scribbled_on)
            code = 0
        except BaseException:  # noqa: BLE001 - the parent sees the code, people this
            traceback.print_exc()
        finally:
            os._exit(code)

    def _open(self) -> None:
        self._fd = os.open(_path(self._name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _fork_scribbler(self, seed: int) -> int:
        """Fork a process that writes nonsense into the segment for as long as it lives."""
        size = HEADER_LENGTH + _CAPACITY
        os.ftruncate(self._fd, size)
        pid = os.fork()
        if pid == 0:
            dice = random.Random(seed)  # noqa: S311 -- a seed that replays
            memory = mmap.mmap(self._fd, size)
            parent = os.getppid()
            while os.getppid() == parent:
                for _ in range(200):
                    offset, data = self._harm(dice, memory)
                    memory[offset : offset + len(data)] = data
                time.sleep(0.0002)  # the one that it disturbs needs the processor too
            os._exit(0)
        return pid

    def _run(self, *, may_resize: bool) -> None:
        dice = self._dice
        image = bytearray(dice.choice(self._images))
        for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
            offset, data = self._harm(dice, image)
            image[offset : offset + len(data)] = data
        size = len(image)
        if may_resize and dice.random() < 0.08:
            size = dice.choice((0, 1, 4095, 4096, 4097, 8191, 8193, 12288, 1 << 20))
        if not os.path.lexists(_path(self._name)):  # the case before has removed it
            os.close(self._fd)
            self._open()
        os.ftruncate(self._fd, size)
        os.pwrite(self._fd, image[:size], 0)
        is_live = size == HEADER_LENGTH + _CAPACITY and dice.random() < 0.5
        self._memory = mmap.mmap(self._fd, size) if is_live else None
        self._may_resize = may_resize
        uses = [self._consume, self._produce, self._look]
        dice.shuffle(uses)
        refused = 0
        for use in uses:
            try:
                use()
            except ShmringError:
                refused = 1
        self._words[_Board.REFUSED] += refused

    def _harm(self, dice: random.Random, image: bytearray | mmap.mmap) -> tuple[int, bytes]:
        """Choose bytes and where to write them, all inside."""
        offset, data = self._choose_harm(dice, image)
        return offset, data[: len(image) - offset]

    def _choose_harm(self, dice: random.Random, image: bytearray | mmap.mmap) -> tuple[int, bytes]:
        kind = dice.randrange(8)
        if kind < 3:
            offset, length = dice.choice(_WORDS)
            return offset, self._number(dice, image, length)
        if kind == 3:
            offset = dice.choice(_POSITIONS)
            return offset, self._number(dice, image, 8)
        if kind == 4:
            return dice.randrange(HEADER_LENGTH // 2), bytes([dice.randrange(256)])
        place = HEADER_LENGTH + dice.randrange(_CAPACITY // 8) * 8
        if kind == 5:  # where a record may begin
            return place, dice.choice(
                [self._number(dice, image, 4), struct.pack("<I", dice.randrange(300)), dice.randbytes(8)]
            )
        if kind == 6:  # where a frame's directory may be
            return place, struct.pack("<II", dice.randrange(400), dice.randrange(400))
        return place, bytes([dice.choice((0, 0xFF, dice.randrange(256)))]) * dice.randint(1, 64)

    @staticmethod
    def _number(dice: random.Random, image: bytearray | mmap.mmap, length: int) -> bytes:
        """A number that is likely to hurt: plain, near a position, or any."""
        choice = dice.random()
        if choice < 0.4:
            value = dice.choice(_PLAIN)
        elif choice < 0.8:
            position = int.from_bytes(image[0x100:0x108], "little")
            value = position + dice.choice((-4104, -4096, -4088, -16, -8, -1, 1, 8, 16, 4088, 4096, 4104))
        else:
            value = dice.getrandbits(64)
        return (value % (1 << (8 * length))).to_bytes(length, "little")

    def _disturb(self) -> None:
        """Between two calls somebody writes into the segment, or cuts it short."""
        if self._memory is None:
            return
        dice = self._dice
        if dice.random() < 0.3:
            offset, data = self._harm(dice, self._memory)
            self._memory[offset : offset + len(data)] = data
        elif self._may_resize and dice.random() < 0.05:
            self._memory = None  # or this very process would step on it
            os.ftruncate(self._fd, dice.choice((0, 100, 4096, 5000)))

    def _tries(self, *calls: Callable[[], object]) -> None:
        """Make each call, whatever the one before has met: an error of ours must leave an end sane."""
        for call in calls:
            self._disturb()
            with contextlib.suppress(ShmringError):
                call()

    def _consume(self) -> None:
        dice = self._dice
        with Consumer.attach(
            self._name, poison=dice.random() < 0.5, takeover=dice.random() < 0.3
        ) as consumer:
            self._words[_Board.ATTACHED] += 1
            calls: list[Callable[[], object]] = [
                lambda: self._drain(consumer),
                lambda: self._drain(consumer),
                consumer.release,
                consumer.rewind,
                consumer.try_pop,
                lambda: consumer.pop_many(dice.choice((1, 5, 1000))),
                consumer.beat,
                lambda: consumer.pop(timeout_s=0),
                lambda: consumer.wait_until_readable(0),
                lambda: consumer.pop(timeout_s=1e-6),
                consumer.backlog_bytes,
                consumer.is_readable,
                consumer.snapshot_tail,
                consumer.peer_state,
                consumer.statistics,
            ]
            dice.shuffle(calls)
            self._tries(*calls)

    def _drain(self, consumer: Consumer) -> None:
        records = consumer.drain(self._dice.choice((1, 3, 64)))
        for record in records:
            assert len(record) <= _CAPACITY - 8, "a record is longer than its ring"
            self._disturb()
            bytes(record.payload)
            with contextlib.suppress(ShmringError):
                frame = SCHEMA.read(record)
                self._disturb()
                for name in SCHEMA.names:
                    frame[name].tobytes()
        if self._dice.random() < 0.7 and records:
            consumer.release()

    def _produce(self) -> None:
        dice = self._dice
        with Producer.attach(self._name, takeover=dice.random() < 0.3) as producer:
            self._words[_Board.ATTACHED] += 1
            ids = np.arange(3, dtype=np.uint64)
            counts = np.array([2, 0, 1], np.uint32)
            tokens = np.arange(3, dtype=np.int32)
            calls: list[Callable[[], object]] = [
                lambda: producer.try_push(b"p" * dice.randrange(600)),
                lambda: producer.push(b"p" * dice.randrange(600), timeout_s=0),
                lambda: producer.push(b"p" * 4000, timeout_s=1e-6),
                lambda: producer.try_append(b"q" * dice.randrange(60)),
                producer.publish,
                lambda: producer.push_many([b"m" * dice.randrange(200) for _ in range(dice.randrange(9))]),
                lambda: self._claim(producer),
                lambda: SCHEMA.push(producer, 3, ids, counts, tokens, None),
                lambda: producer.wait_until_writable(dice.randrange(4088), 0),
                producer.free_bytes,
                producer.discard,
                producer.peer_state,
                producer.statistics,
            ]
            dice.shuffle(calls)
            self._tries(*calls)

    def _claim(self, producer: Producer) -> None:
        length = self._dice.randrange(2000)
        claim = producer.try_claim(length)
        if claim is not None:
            self._disturb()
            claim.payload[:] = bytes(length)
            claim.commit(self._dice.randint(0, length))

    def _look(self) -> None:
        """From outside: statistics, the listing, the command, the life cycle by name."""
        dice, name = self._dice, self._name
        self._tries(
            lambda: read_statistics(name).as_dict(),
            self._read_blob,
        )
        if dice.random() < 0.02:
            list_rings()
            words = dice.choice((["ls"], ["ls", "--json"], ["stat", name], ["stat", "--json", name]))
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                command.main(words)
        if dice.random() < 0.02:
            self._tries(lambda: unlink(name), lambda: create(name, _CAPACITY).close())

    def _read_blob(self) -> None:
        mapping = read_blob(self._name)
        self._disturb()
        with contextlib.closing(mapping.handle):
            bytes(mapping.payload)
