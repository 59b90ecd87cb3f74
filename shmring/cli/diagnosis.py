"""What goes on in a ring, in words. Pure: from the counters of one moment to one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from shmring.cli.terminal import Tone
from shmring.cli.units import format_bytes, format_duration, format_ratio

if TYPE_CHECKING:
    from shmring.statistics import EndStatistics, RingStatistics

#: Nanoseconds without a batch that are worth a word: then a consumer that is awake is behind.
BEHIND_NS = 1_000_000_000
#: Nanoseconds in which a sleeper that was woken gets the processor, even on a busy machine: until then
#: it counts as asleep, and means nothing by it.
WAKING_NS = 50_000_000
#: Fill from which a ring is called nearly full: the next larger record may not fit.
NEARLY_FULL = 0.9


class Condition(Enum):
    """The one word for it. The values are stable; scripts compare them."""

    DAMAGED = "damaged"
    """The segment says what cannot be."""
    LOST = "lost"
    """A process died while it held an end, and nobody has taken over."""
    STUCK = "stuck"
    """Full, and the consumer sleeps without releasing what it was given: they wait for each other."""
    FULL = "full"
    """The producer sleeps until the consumer makes room."""
    BEHIND = "behind"
    """The consumer is awake, has something to take, and has taken nothing for a second."""
    UNPAIRED = "unpaired"
    """One end has been attached, the other never."""
    UNUSED = "unused"
    """Neither end was ever attached."""
    FINISHED = "finished"
    """At least one end closed in good order."""
    IDLE = "idle"
    """Nothing to take, or nothing more than the consumer has in hand."""
    FLOWING = "flowing"
    """Records come and go."""


_TONES = {
    Condition.DAMAGED: Tone.ALARM,
    Condition.LOST: Tone.ALARM,
    Condition.STUCK: Tone.ALARM,
    Condition.FULL: Tone.WARNING,
    Condition.BEHIND: Tone.WARNING,
    Condition.UNPAIRED: Tone.WARNING,
    Condition.FLOWING: Tone.GOOD,
}


@dataclass(frozen=True)
class Diagnosis:
    """A ring's condition at one moment."""

    condition: Condition
    sentence: str
    brief: str
    """The same in 21 characters."""

    @property
    def tone(self) -> Tone:
        """How loud to say it."""
        return _TONES.get(self.condition, Tone.PLAIN)


def diagnose(ring: RingStatistics) -> Diagnosis:
    """Say what goes on, worst first."""
    producer, consumer = ring.producer, ring.consumer
    states = {producer.state, consumer.state}
    if ring.used_bytes > ring.capacity_bytes:
        sentence = (
            f"damaged: published and released position are {ring.used_bytes} bytes apart, "
            f"in a ring of {ring.capacity_bytes}"
        )
        return Diagnosis(Condition.DAMAGED, sentence, "damaged")
    if "unknown" in states:
        return Diagnosis(Condition.DAMAGED, "damaged: the state of an end is none that exists", "damaged")
    if states == {"attached"}:
        return _both_attached(ring)
    return _end_missing(ring)


def untaken(ring: RingStatistics) -> str:
    """What is published and not released: 3 records (900 B)."""
    records = ring.producer.records - ring.consumer.records
    if ring.used_bytes == 0:
        return "nothing"
    if records <= 0:  # counted by two processes, a moment apart
        return format_bytes(ring.used_bytes)
    return f"{records} record{'s' if records > 1 else ''} ({format_bytes(ring.used_bytes)})"


def _named(role: str, end: EndStatistics) -> str:
    return f"the {role} (pid {end.pid})"


def _ago(end: EndStatistics, deed: str) -> str:
    """How long an end has done nothing: `deed` is published or taken."""
    return f"{deed} nothing " + ("yet" if end.idle_ns is None else f"for {format_duration(end.idle_ns)}")


def _both_attached(ring: RingStatistics) -> Diagnosis:
    producer, consumer = _named("producer", ring.producer), _named("consumer", ring.consumer)
    consumer_idle = _ago(ring.consumer, "taken")
    if ring.producer.waiting_ns is not None and ring.used_bytes > 0:
        waited = format_duration(ring.producer.waiting_ns)
        if min(ring.producer.waiting_ns, ring.consumer.waiting_ns or 0) >= WAKING_NS:
            sentence = (
                f"stuck: {producer} has waited {waited} for room, and {consumer} sleeps "
                f"without releasing {untaken(ring)}"
            )
            return Diagnosis(Condition.STUCK, sentence, "both wait")
        sentence = f"full: {producer} has waited {waited} for {consumer}, which has {consumer_idle}"
        is_long = ring.producer.waiting_ns >= BEHIND_NS
        return Diagnosis(
            Condition.FULL, sentence, f"producer waits {waited}" if is_long else "producer waits"
        )
    if ring.consumer.waiting_ns is not None:
        if ring.used_bytes == 0:
            what = f"sleeps, nothing to take; {producer} has {_ago(ring.producer, 'published')}"
        elif ring.producer.idle_ns is not None and ring.producer.idle_ns < WAKING_NS:
            sentence = f"flowing: {untaken(ring)} just published; {consumer} wakes"
            return Diagnosis(Condition.FLOWING, sentence, "flowing")
        else:
            what = f"sleeps and has {untaken(ring)} not yet released"
        return Diagnosis(Condition.IDLE, f"idle: {consumer} {what}", "consumer sleeps")
    if ring.used_bytes == 0:
        quiet_ns = ring.producer.idle_ns
        if quiet_ns is None or quiet_ns >= BEHIND_NS:
            sentence = f"idle: nothing to take; {producer} has {_ago(ring.producer, 'published')}"
            return Diagnosis(Condition.IDLE, sentence, "nothing to take")
        sentence = f"flowing: all is taken; the last batch was published {format_duration(quiet_ns)} ago"
        return Diagnosis(Condition.FLOWING, sentence, "flowing")
    return _awake_with_backlog(ring, consumer, consumer_idle)


def _awake_with_backlog(ring: RingStatistics, consumer: str, consumer_idle: str) -> Diagnosis:
    nearly_full = f"nearly full ({format_ratio(ring.fill)})" if ring.fill >= NEARLY_FULL else ""
    idle_ns = ring.consumer.idle_ns
    if idle_ns is None or idle_ns >= BEHIND_NS:
        condition, word = Condition.BEHIND, "behind"
        brief = word if idle_ns is None else f"behind {format_duration(idle_ns)}"
    else:
        condition, word = Condition.FLOWING, "flowing"
        brief = nearly_full or word
    start = f"{word}, {nearly_full}" if nearly_full else word
    sentence = f"{start}: {consumer} is awake and has {consumer_idle}, with {untaken(ring)} to take"
    return Diagnosis(condition, sentence, brief)


def _end_missing(ring: RingStatistics) -> Diagnosis:
    producer, consumer = ring.producer, ring.consumer
    states = (producer.state, consumer.state)
    if states == ("never", "never"):
        sentence = "never attached: nobody has taken either end yet"
        return Diagnosis(Condition.UNUSED, sentence, "never attached")
    rest = untaken(ring)
    if states == ("lost", "lost"):
        sentence = (
            f"both ends are gone: producer pid {producer.pid}, consumer pid {consumer.pid}; {rest} untaken"
        )
        return Diagnosis(Condition.LOST, sentence, "both ends gone")
    if states == ("finished", "finished"):
        sentence = f"finished: both ends have closed with {rest} untaken"
        return Diagnosis(Condition.FINISHED, sentence, "finished")
    ends = {"producer": producer, "consumer": consumer}
    # the gravest first: it names the condition
    missing = sorted(
        (role for role in ends if ends[role].state != "attached"),
        key=lambda role: ("lost", "finished", "never").index(ends[role].state),
    )
    gravest = ends[missing[0]].state
    parts = [
        _absence(missing[0], ends[missing[0]])
        + ("; " if gravest == "never" else " with ")
        + f"{rest} untaken"
    ]
    parts += [_absence(role, ends[role]) for role in missing[1:]]
    parts += [_wait(role, end) for role, end in ends.items() if end.state == "attached"]
    condition, brief = {
        "lost": (Condition.LOST, f"{missing[0]} gone"),
        "finished": (Condition.FINISHED, f"{missing[0]} finished"),
        "never": (Condition.UNPAIRED, f"no {missing[0]} yet"),
    }[gravest]
    return Diagnosis(condition, "; ".join(parts), brief)


def _absence(role: str, end: EndStatistics) -> str:
    if end.state == "never":
        return f"there has been no {role} yet"
    return f"{_named(role, end)} " + ("is gone" if end.state == "lost" else "has finished")


def _wait(role: str, end: EndStatistics) -> str:
    if end.waiting_ns is None:
        return f"{_named(role, end)} is awake"
    if role == "producer":
        return f"{_named(role, end)} has waited {format_duration(end.waiting_ns)} for room"
    return f"{_named(role, end)} sleeps"
