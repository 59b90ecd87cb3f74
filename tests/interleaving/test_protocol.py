"""Every order of the shared accesses of a tiny ring ends in an allowed way.

A model of the protocol, one shared access a step, all schedules tried. It shows that the
protocol is right if every access is seen by the other side in the order it was made; that the
machine does so is the business of the memory orders, which the sanitizers and the litmus test check.

Each side is a generator: what it yields is where the other side, or death, may come in between.
A sleeper is woken by a wake alone, as if its slices never ended; only a death may need them.
Schedules that meet in one state are followed once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    Side = Generator[str, None, str]

CAPACITY = 2
"""Records, each of one unit."""


@dataclass
class Shared:
    """What both see. A slot holds a record, or what was left there."""

    tail: int = 0
    head: int = 0
    slots: list[str] = field(default_factory=lambda: ["garbage"] * CAPACITY)
    parked: dict[str, int] = field(default_factory=lambda: {"producer": 0, "consumer": 0})
    state: dict[str, str] = field(default_factory=lambda: {"producer": "attached", "consumer": "attached"})
    lock: dict[str, bool] = field(default_factory=lambda: {"producer": True, "consumer": True})
    asleep: set[str] = field(default_factory=set)
    read: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Variant:
    """The protocol, or one of the mistakes that it avoids."""

    name: str = "as it is"
    looks_again_after_announcing: bool = True
    publishes_before_looking_at_parked: bool = True
    writes_before_publishing: bool = True
    reads_tail_again_after_the_end: bool = True
    frees_after_reading: bool = True
    closes_before_dropping_the_lock: bool = True
    producer_closes: bool = True
    """Not a mistake: it just stays, and no wake of its close mends a wake that was lost before."""


def wake(shared: Shared, who: str) -> Side:
    """The waker's exchange, then the system call."""
    yield f"look whether the {who} is parked"
    if shared.parked[who]:
        shared.parked[who] = 0
        yield f"wake the {who}"
        shared.asleep.discard(who)
    return "done"


def park(shared: Shared, who: str, variant: Variant, is_up: Callable[[], bool]) -> Side:
    """Announce, look again, sleep if the word still says so."""
    peer = "consumer" if who == "producer" else "producer"
    yield "announce"
    shared.parked[who] = 1
    if variant.looks_again_after_announcing:
        yield "look again"
        up = is_up()
        yield "look whether the peer has closed"
        if up or shared.state[peer] == "closed":
            shared.parked[who] = 0
            return "done"
    yield "sleep, unless the word has changed"
    if shared.parked[who]:
        shared.asleep.add(who)
        yield "asleep"
    shared.parked[who] = 0
    return "done"


def ask_for(shared: Shared, peer: str) -> Side:
    """Is it worth waiting for the peer? Empty: yes."""
    yield f"look whether the {peer} has closed"
    if shared.state[peer] == "closed":
        return "told of the end"
    yield f"ask the kernel for the {peer}'s lock"
    if shared.lock[peer]:
        return ""
    yield f"look whether the {peer} has closed after all"
    return "told of the end" if shared.state[peer] == "closed" else "told of the death"


def produce(shared: Shared, records: list[str], variant: Variant) -> Side:
    for tail, record in enumerate(records):

        def has_room(tail: int = tail) -> bool:
            return tail - shared.head < CAPACITY

        while True:
            yield "look at head"
            if has_room():
                break
            if end := (yield from ask_for(shared, "consumer")):
                yield "look at head once more"
                if not has_room():
                    return end
                break
            yield from park(shared, "producer", variant, has_room)
        yield from publish(shared, tail, record, variant)
    if not variant.producer_closes:
        return "still there"
    return (yield from close(shared, "producer", "consumer", variant))


def publish(shared: Shared, tail: int, record: str, variant: Variant) -> Side:
    saw_parked = 0
    if not variant.publishes_before_looking_at_parked:
        yield "look whether the consumer is parked"
        saw_parked = shared.parked["consumer"]
    for what in ("record", "tail") if variant.writes_before_publishing else ("tail", "record"):
        yield f"store the {what}"
        if what == "record":
            shared.slots[tail % CAPACITY] = record
        else:
            shared.tail = tail + 1
    if variant.publishes_before_looking_at_parked:
        return (yield from wake(shared, "consumer"))
    if saw_parked:
        shared.parked["consumer"] = 0
        yield "wake the consumer"
        shared.asleep.discard("consumer")
    return "done"


def close(shared: Shared, who: str, other: str, variant: Variant) -> Side:
    def drop() -> None:
        shared.lock[who] = False

    def say() -> None:
        shared.state[who] = "closed"

    first, second = (say, drop) if variant.closes_before_dropping_the_lock else (drop, say)
    yield "store"
    first()
    if variant.closes_before_dropping_the_lock:
        yield from wake(shared, other)
    yield "store"
    second()
    if not variant.closes_before_dropping_the_lock:
        yield from wake(shared, other)
    return "finished"


def consume(shared: Shared, stop_after: int | None, variant: Variant) -> Side:
    head = 0
    while stop_after is None or head < stop_after:

        def has_record(head: int = head) -> bool:
            return shared.tail != head

        yield "look at tail"
        if shared.tail == head:
            if end := (yield from ask_for(shared, "producer")):
                yield "look at tail once more"
                if not variant.reads_tail_again_after_the_end or shared.tail == head:
                    return end
                continue
            yield from park(shared, "consumer", variant, has_record)
            continue
        if not variant.frees_after_reading:
            yield "store"
            shared.head = head + 1
        yield "read the record"
        shared.read.append(shared.slots[head % CAPACITY])
        if variant.frees_after_reading:
            yield "store"
            shared.head = head + 1
        yield from wake(shared, "producer")
        head += 1
    return (yield from close(shared, "consumer", "producer", variant))


class Run:
    """One schedule, step by step."""

    def __init__(self, records: list[str], stop_after: int | None, variant: Variant) -> None:
        self.records = records
        self.shared = Shared()
        self.sides = {
            "producer": produce(self.shared, records, variant),
            "consumer": consume(self.shared, stop_after, variant),
        }
        self.ends: dict[str, str] = {}

    def possible(self, may_die: frozenset[str]) -> list[str]:
        living = [side for side in self.sides if side not in self.ends]
        moves = [side for side in living if side not in self.shared.asleep]
        if not moves and living and "died" in self.ends.values():
            self.shared.asleep.clear()  # no wake comes from the dead: the slice ends
            moves = living
        return moves + [f"{side} dies" for side in living if side in may_die and moves]

    def step(self, move: str) -> None:
        side, _, dies = move.partition(" ")
        if dies:
            self.ends[side] = "died"
            self.shared.lock[side] = False
            self.shared.asleep.discard(side)
            return
        try:
            next(self.sides[side])
        except StopIteration as stop:
            self.ends[side] = stop.value

    def outcome(self) -> str:
        if self.shared.asleep:
            return f"asleep for ever: {', '.join(sorted(self.shared.asleep))}"
        expected = self.records[: len(self.shared.read)]
        if self.shared.read != expected:
            return f"read {self.shared.read} where {expected} was sent"
        count = "all" if self.shared.read == self.records else "not all"
        return f"{count} read; producer {self.ends['producer']}; consumer {self.ends['consumer']}"

    def state(self) -> object:
        """Everything that what comes may depend on: the shared words, and where each side stands."""
        places = []
        for side, walk in self.sides.items():
            place: list[object] = [self.ends.get(side)]
            at: object = walk
            while at is not None and getattr(at, "gi_frame", None) is not None:
                plain = {k: v for k, v in at.gi_frame.f_locals.items() if isinstance(v, (int, str, bool))}
                place += [at.gi_frame.f_lasti, tuple(sorted(plain.items()))]
                at = at.gi_yieldfrom
            places.append(tuple(place))
        return (repr(self.shared), *places)


def every_outcome(
    records: int,
    stop_after: int | None = None,
    variant: Variant | None = None,
    *,
    may_die: tuple[str, ...] = (),
) -> set[str]:
    """Outcomes of all schedules. A path is walked again from the start; paths that meet are cut."""
    names = [chr(ord("a") + n) for n in range(records)]
    outcomes: set[str] = set()
    seen: set[object] = set()
    open_paths: list[list[str]] = [[]]
    while open_paths:
        path = open_paths.pop()
        run = Run(names, stop_after, variant or Variant())
        for move in path:
            run.possible(frozenset(may_die))
            run.step(move)
        state = run.state()
        if state in seen:
            continue
        seen.add(state)
        moves = run.possible(frozenset(may_die))
        if not moves:
            outcomes.add(run.outcome())
        open_paths += [[*path, move] for move in moves]
    assert len(seen) > 20, "there was something to try"
    return outcomes


@pytest.mark.parametrize("records", [0, 1, 2, 3, 4])
def test_everything_sent_is_read_in_order_and_nobody_sleeps_for_ever(records):
    """Two processes that both run to their end, whatever the scheduler does to them."""
    assert every_outcome(records) == {"all read; producer finished; consumer told of the end"}


@pytest.mark.parametrize(("records", "stop_after"), [(4, 0), (4, 1), (5, 2)])
def test_a_consumer_that_leaves_early_is_told_to_a_producer_on_a_full_ring(records, stop_after):
    """And what was read was read right."""
    assert every_outcome(records, stop_after) == {"not all read; producer told of the end; consumer finished"}


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_a_consumer_that_leaves_early_may_go_unnoticed_while_there_is_room(stop_after):
    """The producer asks only when it finds no room: pushing costs nothing extra."""
    outcomes = every_outcome(2, stop_after)
    assert outcomes == {
        f"{'all' if stop_after == 2 else 'not all'} read; producer finished; consumer finished"
    }


def test_the_producers_death_at_any_step_is_told_and_loses_nothing_that_was_published():
    """Before, in the middle of and after every access, asleep or awake."""
    outcomes = every_outcome(3, may_die=("producer",))
    assert outcomes == {
        "all read; producer finished; consumer told of the end",
        "all read; producer died; consumer told of the end",  # between its close and its exit
        "all read; producer died; consumer told of the death",
        "not all read; producer died; consumer told of the death",
    }


def test_the_consumers_death_at_any_step_is_told_to_a_producer_that_needs_room():
    """Two of four records fit; for the others somebody must read."""
    outcomes = every_outcome(4, may_die=("consumer",))
    assert outcomes == {
        "all read; producer finished; consumer told of the end",
        "all read; producer finished; consumer died",
        "not all read; producer finished; consumer died",  # the last ones fitted
        "not all read; producer told of the death; consumer died",
    }


def test_if_both_die_no_record_is_read_wrong():
    """Whoever comes after them finds a ring that makes sense."""
    outcomes = every_outcome(3, may_die=("producer", "consumer"))
    assert not [o for o in outcomes if "where" in o or "for ever" in o]
    assert "not all read; producer died; consumer died" in outcomes


@pytest.mark.parametrize("records", [1, 2, 3, 5])
def test_every_record_wakes_its_reader_without_the_help_of_a_close(records):
    """A stream that pauses must not pause with a record unread."""
    outcomes = every_outcome(records, records, Variant(producer_closes=False))
    assert outcomes == {"all read; producer still there; consumer finished"}


MISTAKES = [
    (Variant("sleeps without looking again", looks_again_after_announcing=False), "asleep for ever"),
    (Variant("looks at parked, then publishes", publishes_before_looking_at_parked=False), "asleep for ever"),
    (Variant("publishes before it has written", writes_before_publishing=False), "read ['garbage'"),
    (Variant("ends without a last look", reads_tail_again_after_the_end=False), "not all read"),
    (Variant("frees before it has read", frees_after_reading=False), "where"),
]


@pytest.mark.parametrize(("variant", "sign"), MISTAKES, ids=[v.name for v, _ in MISTAKES])
def test_every_rule_of_the_protocol_is_needed(variant, sign):
    """A model that finds nothing wrong with a mistake proves nothing about the rest."""
    outcomes = every_outcome(4, variant=variant)
    outcomes |= every_outcome(3, 3, replace(variant, producer_closes=False))
    assert [o for o in outcomes if sign in o], outcomes


def test_dropping_the_lock_before_saying_closed_would_look_like_a_death():
    """Why close() writes its word first: an orderly end must never raise an alarm."""
    variant = Variant("drops the lock first", closes_before_dropping_the_lock=False)
    assert any(
        "producer finished; consumer told of the death" in o for o in every_outcome(1, variant=variant)
    )
    assert not any("told of the death" in o for o in every_outcome(1))
