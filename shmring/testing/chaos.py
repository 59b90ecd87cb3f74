"""Kills the ends of a ring at random moments and starts them again, and checks what comes through.

One process owns the ring, decides and judges; producer and consumer are forked from it, again and
again. Every record carries its number and a checksum, and its size follows from its number; so a
position tells which record must lie there, and a new process knows from the ring alone where the
dead one stopped. What each end is about to do and has done stands in a board of shared words, so
that the next one can tell a lost record from one that was never sent.

Decisions follow from the seed; the moments of the kills are the machine's.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import mmap
import os
import random
import secrets
import signal
import struct
import time
import traceback
import zlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn

from shmring.consumer import Consumer
from shmring.end import PeerState
from shmring.errors import EndOfRing, PeerLostError
from shmring.producer import Producer
from shmring.testing.states import ring_at
from shmring.waiter import WaitPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmring.ring import Ring
    from shmring.statistics import EndStatistics, RingStatistics

#: What must happen at once, or within two seconds, has happened by then on the slowest machine.
PATIENCE_S = 20.0
BATCH_MAX = 8
_PERIOD = 997
_HEAD = struct.Struct("<QI")
_WRAP = 1 << 64


class Word(IntEnum):
    """Places of the board; each is written by one process at a time."""

    PUBLISHING = 0
    """The producer is about to publish up to here (bytes since the start)."""
    PUBLISHED = 1
    RELEASING = 2
    RELEASED = 3
    DELIVERED = 4
    """Records that came and were checked; each counts once."""
    AGAIN = 5
    """Records that came once more, because nobody had released them."""
    PRODUCER_TOLD = 6
    """Times that a producer was told of a dead consumer."""
    CONSUMER_TOLD = 7
    STOPPING = 8
    """The owner wants the producer to finish."""
    FINISHED = 9
    """Set by the consumer that saw the end: records in all."""
    COMPLAINT = 10
    """Length of what a process says went wrong."""


class Board:
    """Words that outlive every process but the owner."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        self._words = (ctypes.c_uint64 * len(Word)).from_buffer(self._memory)

    def complain(self, text: str) -> None:
        """Leave word of what went wrong, before anything else happens: the owner may kill at any time."""
        data = text.encode(errors="replace")[-mmap.PAGESIZE :]
        self._memory[mmap.PAGESIZE : mmap.PAGESIZE + len(data)] = data
        self[Word.COMPLAINT] = len(data)

    def complaint(self) -> str:
        """What a process left word of, or nothing."""
        length = self[Word.COMPLAINT]
        return self._memory[mmap.PAGESIZE : mmap.PAGESIZE + length].decode(errors="replace")

    def __getitem__(self, word: Word) -> int:
        return int(self._words[word])

    def __setitem__(self, word: Word, value: int) -> None:
        self._words[word] = value  # eight aligned bytes: one store, never half of it


class Records:
    """The records of a run: what record n holds and where it lies."""

    def __init__(self, seed: int, capacity: int) -> None:
        dice = random.Random(seed)  # noqa: S311 -- a seed that replays - replayable is what it must be
        small, large = _HEAD.size + 200, capacity - 8
        self._lengths = [
            dice.randint(large // 3, large) if dice.random() < 0.02 else dice.randint(_HEAD.size, small)
            for _ in range(_PERIOD)
        ]
        self._ends = list(itertools.accumulate((length + 15) & ~7 for length in self._lengths))
        self._noise = dice.randbytes(capacity * 2)

    def payload(self, number: int) -> bytes:
        """What record `number` holds: its number, a checksum, and noise."""
        length = self._lengths[number % _PERIOD] - _HEAD.size
        start = number * 7919 % (len(self._noise) // 2)
        noise = self._noise[start : start + length]
        return _HEAD.pack(number, zlib.crc32(noise, number & 0xFFFFFFFF)) + noise

    def end(self, number: int) -> int:
        """Bytes of the records up to and with `number`."""
        cycles, index = divmod(number, _PERIOD)
        return cycles * self._ends[-1] + self._ends[index]

    def at(self, position: int) -> int:
        """Which record starts at `position`; fails if none does."""
        cycles, rest = divmod(position, self._ends[-1])
        index = bisect.bisect_right(self._ends, rest)
        start = self._ends[index - 1] if index else 0
        if start != rest:
            raise Broken(f"no record starts where an end stands: position={position}, nearest={start}")
        return cycles * _PERIOD + index

    def check(self, number: int, payload: bytes | memoryview) -> None:
        """Fail unless it is record `number`, whole."""
        if len(payload) < _HEAD.size:
            raise Broken(f"record is torn: number={number}, length={len(payload)}")
        said, checksum = _HEAD.unpack_from(payload)
        if said != number:
            raise Broken(f"another record than expected: expected={number}, found={said}")
        if zlib.crc32(payload[_HEAD.size :], number & 0xFFFFFFFF) != checksum or payload != self.payload(
            number
        ):
            raise Broken(f"record is torn: number={number}, length={len(payload)}")


class Broken(Exception):  # noqa: N818 - what it is
    """A promise was not kept."""


@dataclass
class Report:
    """What a run did and found."""

    seed: int
    kills: int = 0
    producer_kills: int = 0
    stops: int = 0
    absences: int = 0
    """Kills after which the other side had to be told before a successor came."""
    told_s_max: float = 0.0
    records: int = 0
    again: int = 0
    """Records that came again, because their consumer died with them in hand."""
    duration_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def text(self) -> str:
        """All of it, for people."""
        consumers = self.kills - self.producer_kills
        lines = [
            f"kills={self.kills} (producer {self.producer_kills}, consumer {consumers}), stops={self.stops}",
            f"records={self.records}, delivered again={self.again}, time={self.duration_s:.1f} s",
            f"a dead peer was told {self.absences} times, after at most {self.told_s_max:.3f} s",
        ]
        lines += [f"FAILED: {failure}" for failure in self.failures]
        lines.append(f"to repeat: --seed {self.seed}" if self.failures else "nothing lost, torn or doubled")
        return "\n".join(lines)


def run(
    kills: int, seed: int, *, duration_s: float | None = None, progress: Callable[[str], None] | None = None
) -> Report:
    """Kill the ends `kills` times (or for `duration_s`), then let both finish, and report.

    Forks: call it in a process with one thread.
    """
    report = Report(seed)
    dice = random.Random(seed)  # noqa: S311 -- a seed that replays
    capacity = dice.choice([4096, 8192, 65536])
    start = dice.choice([0, 2**32 - 8 * dice.randrange(1000), 2**64 - 8 * dice.randrange(1, 100_000)])
    began = time.monotonic()
    name = f"chaos-{os.getpid()}-{secrets.token_hex(4)}"
    with ring_at(name, capacity, start) as ring:
        match = _Match(ring, start, Records(seed, capacity), dice, report)
        try:
            while report.kills < kills and (duration_s is None or time.monotonic() - began < duration_s):
                match.round()
                if progress is not None and report.kills % 500 == 0 and report.kills:
                    progress(f"{report.kills} kills, {match.board[Word.DELIVERED]} records delivered")
            match.finish()
            if match.board[Word.COMPLAINT]:
                raise Broken("an end failed")  # noqa: TRY301 -- told below
        except Broken as broken:
            report.failures.append(f"{broken}; {match.story()}")
        finally:
            match.end()
    report.duration_s = time.monotonic() - began
    return report


class _Match:
    """The owner's side: who is alive, and what must be true."""

    def __init__(self, ring: Ring, start: int, records: Records, dice: random.Random, report: Report) -> None:
        self.board = Board()
        self._ring = ring
        self._start = start
        self._records = records
        self._dice = dice
        self._report = report
        self._lives = 0
        self._pids = dict.fromkeys(("producer", "consumer"), 0)
        self._takes_over = dict.fromkeys(("producer", "consumer"), False)
        self._last: RingStatistics | None = None
        for role in self._pids:
            self._begin(role)

    def _begin(self, role: str) -> None:
        self._lives += 1
        takeover = self._dice.random() < 0.25
        self._takes_over[role] = takeover
        life = _Life(
            self._ring.name, self._start, self._records, self.board, self._dice.getrandbits(32), takeover
        )
        pid = os.fork()
        if pid == 0:
            life.live(role)
        self._pids[role] = pid

    def round(self) -> None:
        """Let both run for a moment, then do one of them harm."""
        dice, report = self._dice, self._report
        time.sleep(min(dice.expovariate(1 / 0.004), 0.03))
        self._see_that_both_live()
        victim = dice.choice(("producer", "consumer"))
        what = dice.random()
        if what < 0.05:
            self._stop(victim)
        elif what < 0.15:
            self._kill("producer")
            self._kill("consumer")
            self._begin("consumer")
            self._begin("producer")
        else:
            self._kill(victim)
            if what < 0.5:
                self._see_that_it_is_told(victim)
            elif what < 0.75:
                time.sleep(dice.random() * 0.003)
            self._begin(victim)
        self._check_statistics()
        if report.kills % 25 == 0:
            delivered = self.board[Word.DELIVERED]
            self._wait(lambda: self.board[Word.DELIVERED] > delivered, "records go on coming")

    def _kill(self, role: str) -> None:
        pid = self._pids[role]
        os.kill(pid, signal.SIGKILL)
        self._judge(role, os.waitpid(pid, 0)[1])
        self._report.kills += 1
        self._report.producer_kills += role == "producer"

    def _judge(self, role: str, status: int) -> None:
        self._pids[role] = 0
        if os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
            raise Broken(f"the {role} ended by itself: code={os.waitstatus_to_exitcode(status)}")

    def _stop(self, role: str) -> None:
        """A process that is stopped is not dead: nobody may be told that it is."""
        other = "consumer" if role == "producer" else "producer"
        word = _told(other)
        # first both must be at it, so that what is told is not told of the last one's death
        self._wait(lambda: _end(self._ring.statistics(), role).state == "attached", f"the {role} attaches")
        sent, delivered = self.board[Word.PUBLISHED], self.board[Word.DELIVERED]
        self._wait(
            lambda: self.board[Word.PUBLISHED] > sent and self.board[Word.DELIVERED] > delivered,
            "records go on coming",
        )
        told = self.board[word]
        os.kill(self._pids[role], signal.SIGSTOP)
        time.sleep(0.3)  # its peer asks ten times a second once it is out of work
        self._report.stops += 1
        wrong = self.board[word] != told
        os.kill(self._pids[role], signal.SIGCONT)
        if wrong:
            raise Broken(f"the {other} took a stopped {role} for dead")

    def _see_that_it_is_told(self, victim: str) -> None:
        other = "consumer" if victim == "producer" else "producer"
        if self._takes_over[other]:
            return
        word = _told(other)
        told, began = self.board[word], time.monotonic()
        self._wait(lambda: self.board[word] > told, f"the {other} is told of the {victim}'s death")
        self._report.absences += 1
        self._report.told_s_max = max(self._report.told_s_max, time.monotonic() - began)

    def _see_that_both_live(self) -> None:
        if self.board[Word.COMPLAINT]:
            raise Broken("an end failed")
        for role, pid in self._pids.items():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._judge(role, status)
                raise Broken(f"the {role} ended by itself")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        patience = time.monotonic() + PATIENCE_S
        while not condition():
            if self.board[Word.COMPLAINT]:
                raise Broken("an end failed")
            if time.monotonic() > patience:
                raise Broken(f"waited in vain: what={what}")
            for role, pid in self._pids.items():
                done, status = os.waitpid(pid, os.WNOHANG) if pid else (0, 0)
                if done:
                    self._judge(role, status)
                    if not self.board[Word.STOPPING]:
                        raise Broken(f"the {role} ended by itself")
            time.sleep(0.0005)

    def _check_statistics(self) -> None:
        now, last = self._ring.statistics(), self._last
        ends = (("producer", now.producer), ("consumer", now.consumer))
        kills, capacity = self._report.kills, now.capacity_bytes
        if now.used_bytes > capacity or now.high_water_bytes > capacity:
            raise Broken(f"more in use than there is: {now}")
        if now.owner_state != "attached" or now.is_retired:
            raise Broken(f"the owner is said to be gone: {now}")
        for role, end in ends:
            done = (end.position - self._start) % _WRAP
            # a process that dies between counting and publishing has counted one batch too many
            if not done <= end.bytes <= done + kills * capacity:
                raise Broken(f"bytes do not fit the position: role={role}, position={done}, {end}")
            if not end.attaches <= self._lives or end.state not in ("never", "attached", "lost"):
                raise Broken(f"an end's state cannot be: role={role}, lives={self._lives}, {end}")
        if last is not None:
            for (role, new), (_, old) in zip(
                ends, (("producer", last.producer), ("consumer", last.consumer)), strict=True
            ):
                for what in ("records", "bytes", "batches", "stalls", "parks", "parked_ns", "wakes_sent"):
                    if getattr(new, what) < getattr(old, what):
                        raise Broken(f"a counter went back: role={role}, what={what}, {old}, {new}")
        self._last = now

    def finish(self) -> None:
        """Let the producer close and the consumer see the end; then everything must have arrived."""
        self.board[Word.STOPPING] = 1
        self._wait(lambda: not any(self._pids.values()), "both ends finish")
        sent = self._records.at(self.board[Word.PUBLISHED])
        self._report.records = sent
        self._report.again = self.board[Word.AGAIN]
        if self.board[Word.FINISHED] != sent:
            raise Broken(f"lost at the end: sent={sent}, received={self.board[Word.FINISHED]}")
        now = self._ring.statistics()
        if now.used_bytes or (now.producer.state, now.consumer.state) != ("finished", "finished"):
            raise Broken(f"the ring is not as both left it: {now}")

    def story(self) -> str:
        """Where everything stood, for a failure."""
        words = ", ".join(f"{word.name.lower()}={self.board[word]}" for word in Word)
        complaint = self.board.complaint()
        return f"{words}, lives={self._lives}" + (f"\n{complaint}" if complaint else "")

    def end(self) -> None:
        """Leave no process behind."""
        for role, pid in self._pids.items():
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._pids[role] = 0


def _end(statistics: RingStatistics, role: str) -> EndStatistics:
    return statistics.producer if role == "producer" else statistics.consumer


def _told(role: str) -> Word:
    return Word.PRODUCER_TOLD if role == "producer" else Word.CONSUMER_TOLD


class _Life:
    """One life of one end, in a process of its own."""

    def __init__(
        self, name: str, start: int, records: Records, board: Board, seed: int, takeover: bool
    ) -> None:
        self._name = name
        self._start = start
        self._records = records
        self._board = board
        self._dice = random.Random(seed)  # noqa: S311 -- a seed that replays
        self._takeover = takeover

    def live(self, role: str) -> NoReturn:
        """Play the part until killed or done."""
        code = 1
        try:
            policy = self._dice.choice(list(WaitPolicy))
            if role == "producer":
                producer = Producer.attach(self._name, policy=policy, takeover=self._takeover)
                self._produce(producer)
                producer.close()
            else:
                poison = self._dice.random() < 0.5
                consumer = Consumer.attach(self._name, policy=policy, takeover=self._takeover, poison=poison)
                self._consume(consumer)
                consumer.close()
            code = 0
        except BaseException:  # noqa: BLE001 - the owner tells people
            self._board.complain(f"{role}: {traceback.format_exc()}")
        finally:
            os._exit(code)

    def _take_up(self, position: int, done: Word, doing: Word) -> int:
        """Which record comes next, after a look that the last process left things as it said."""
        here = (position - self._start) % _WRAP
        if not self._board[done] <= here <= self._board[doing]:
            raise Broken(
                f"the ring does not stand where it was left: position={here}, "
                f"{done.name.lower()}={self._board[done]}, {doing.name.lower()}={self._board[doing]}"
            )
        return self._records.at(here)

    def _produce(self, producer: Producer) -> None:
        board, dice = self._board, self._dice
        number = self._take_up(producer.position, Word.PUBLISHED, Word.PUBLISHING)
        ways = (self._push, self._push_batch, self._push_many, self._push_claim)
        while not board[Word.STOPPING]:
            try:
                number = dice.choice(ways)(producer, number)
            except PeerLostError:
                board[Word.PRODUCER_TOLD] += 1
                producer.discard()
                time.sleep(0.001)
        if self._records.at((producer.position - self._start) % _WRAP) != number:
            raise Broken(f"the producer does not stand where it should: number={number}")

    def _push(self, producer: Producer, number: int) -> int:
        end = self._records.end(number)
        self._board[Word.PUBLISHING] = end
        if not producer.push(self._records.payload(number), timeout_s=0.05):
            return number
        self._board[Word.PUBLISHED] = end
        return number + 1

    def _push_batch(self, producer: Producer, number: int) -> int:
        count = 0
        while count < self._dice.randint(1, BATCH_MAX) and producer.try_append(
            self._records.payload(number + count)
        ):
            count += 1
        if count == 0:
            return self._push(producer, number)
        end = self._records.end(number + count - 1)
        self._board[Word.PUBLISHING] = end
        producer.publish()
        self._board[Word.PUBLISHED] = end
        return number + count

    def _push_many(self, producer: Producer, number: int) -> int:
        count = self._dice.randint(1, BATCH_MAX)
        self._board[Word.PUBLISHING] = self._records.end(number + count - 1)
        sent = producer.push_many([self._records.payload(number + i) for i in range(count)])
        if sent == 0:
            return self._push(producer, number)
        self._board[Word.PUBLISHED] = self._records.end(number + sent - 1)
        return number + sent

    def _push_claim(self, producer: Producer, number: int) -> int:
        payload, end = self._records.payload(number), self._records.end(number)
        spare = self._dice.randint(0, producer.payload_length_max - len(payload)) % 300
        claim = producer.claim(len(payload) + spare, timeout_s=0.05)
        if claim is None:
            return number
        if self._dice.random() < 0.1:
            claim.payload[:] = b"\xee" * len(claim.payload)
            claim.abort()
            return number
        half = len(payload) // 2
        claim.payload[:half] = payload[:half]
        claim.payload[half : len(payload)] = payload[half:]
        self._board[Word.PUBLISHING] = end
        claim.commit(len(payload))
        self._board[Word.PUBLISHED] = end
        return number + 1

    def _consume(self, consumer: Consumer) -> None:
        board, dice = self._board, self._dice
        number = self._take_up(consumer.position, Word.RELEASED, Word.RELEASING)
        ways = (self._pop, self._pop_many, self._drain)
        while True:
            try:
                number = dice.choice(ways)(consumer, number)
            except PeerLostError:
                board[Word.CONSUMER_TOLD] += 1
                time.sleep(0.001)
            except EndOfRing:
                board[Word.FINISHED] = number
                return
            if board[Word.STOPPING] and consumer.peer_state() is PeerState.FINISHED:
                # who expects a successor is not told of an end: nothing that comes now is missed
                self._take_the_rest(consumer, number)
                return

    def _take_the_rest(self, consumer: Consumer, number: int) -> None:
        with contextlib.suppress(EndOfRing):
            while (record := consumer.try_pop()) is not None:
                self._saw(number, record)
                number += 1
        self._board[Word.FINISHED] = number

    def _saw(self, number: int, payload: bytes | memoryview) -> None:
        self._records.check(number, payload)
        if number < self._board[Word.DELIVERED]:
            self._board[Word.AGAIN] += 1
        else:
            self._board[Word.DELIVERED] = number + 1

    def _pop(self, consumer: Consumer, number: int) -> int:
        end = self._records.end(number)
        self._board[Word.RELEASING] = max(end, self._board[Word.RELEASING])
        record = consumer.pop(timeout_s=0.05)
        if record is None:
            return number
        self._board[Word.RELEASED] = end
        self._saw(number, record)
        return number + 1

    def _pop_many(self, consumer: Consumer, number: int) -> int:
        count = self._dice.randint(1, BATCH_MAX)
        upto = self._records.end(number + count - 1)
        self._board[Word.RELEASING] = max(upto, self._board[Word.RELEASING])
        payloads = consumer.pop_many(count)
        if not payloads:
            return self._pop(consumer, number)
        self._board[Word.RELEASED] = self._records.end(number + len(payloads) - 1)
        for index, payload in enumerate(payloads):
            self._saw(number + index, payload)
        return number + len(payloads)

    def _drain(self, consumer: Consumer, number: int) -> int:
        drained = consumer.drain_wait(self._dice.randint(1, BATCH_MAX), timeout_s=0.05)
        if not drained:
            return number
        for index, record in enumerate(drained):
            self._saw(number + index, record.payload)
        if self._dice.random() < 0.1:
            consumer.rewind()
            return number
        end = self._records.end(number + len(drained) - 1)
        if end > self._board[Word.PUBLISHING]:
            raise Broken(f"more was received than was sent: number={number + len(drained)}")
        self._board[Word.RELEASING] = max(end, self._board[Word.RELEASING])
        consumer.release()
        self._board[Word.RELEASED] = end
        return number + len(drained)
