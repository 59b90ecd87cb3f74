"""What the manager knows of the life of its parts: the scheduler and the workers.

Told from the roles that the kernel holds for them, at an interval. A part that is replaced
between two looks is noticed by the count of its attaches.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from shmring import PeerState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmring import Consumer, EndStatistics, Producer, Ring

SCHEDULER: Final = "scheduler"


def worker_label(shard: int) -> str:
    """What a worker is called in messages."""
    return f"worker {shard}"


class PartState(Enum):
    """What is known of a worker or the scheduler."""

    WAITING = "waiting"
    """Not there yet."""
    READY = "ready"
    LOST = "lost"
    """Died, or left; it may come again."""


@dataclass(frozen=True)
class PartHealth:
    """One part at one moment."""

    state: PartState
    pulse_age_s: float | None
    """Since it last did anything at its ring, waiting included; None: it is not there."""
    is_healthy: bool
    """It is there, and its pulse is young enough. Busy is healthy: output does not count, a pulse does."""


class PartWatch:
    """The parts by their labels: "scheduler", "worker 0", ..."""

    def __init__(
        self,
        ingress: Producer,
        replies: Sequence[Consumer],
        egress: Sequence[Ring],
        *,
        stalled_after_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Watch the scheduler at the ingress ring, each worker at its reply and egress rings.

        `clock` gives seconds that only grow.
        """
        self._ingress = ingress
        self._replies = tuple(replies)
        self._egress = tuple(egress)
        self._stalled_after_s = stalled_after_s
        self._clock = clock
        labels = (SCHEDULER, *map(worker_label, range(len(replies))))
        self._states = dict.fromkeys(labels, PartState.WAITING)
        self._attaches = dict.fromkeys(labels, 0)
        self._pulses: dict[str, tuple[int, float]] = dict.fromkeys(labels, (-1, 0.0))

    def look(self) -> list[str]:
        """Look at all parts; returns the labels of those that were ready and have gone."""
        lost = []
        for shard, reply in enumerate(self._replies):
            label = worker_label(shard)
            # a worker attaches to its reply ring last, and sleeps at its egress ring
            self._note_pulse(label, self._egress[shard].statistics().consumer.pulse)
            if self._note(label, reply.statistics().producer):
                lost.append(label)
        scheduler = self._ingress.statistics().consumer
        self._note_pulse(SCHEDULER, scheduler.pulse)
        if self._note(SCHEDULER, scheduler):
            lost.append(SCHEDULER)
        return lost

    def _note_pulse(self, label: str, pulse: int) -> None:
        if pulse != self._pulses[label][0]:
            self._pulses[label] = (pulse, self._clock())

    def health(self) -> dict[str, PartHealth]:
        """What the last look showed of each part."""
        now = self._clock()
        health = {}
        for label, state in self._states.items():
            is_there = state is PartState.READY
            age_s = now - self._pulses[label][1] if is_there else None
            is_healthy = age_s is not None and age_s <= self._stalled_after_s
            health[label] = PartHealth(state, age_s, is_healthy)
        return health

    def _note(self, label: str, end: EndStatistics) -> bool:
        """Remember a part's state; True if it was ready and is not, or is another process by now."""
        before, attached_before = self._states[label], self._attaches[label]
        is_there = end.state == PeerState.ATTACHED.value
        if is_there:
            self._states[label] = PartState.READY
        elif end.attaches:
            self._states[label] = PartState.LOST
        self._attaches[label] = end.attaches
        return before is PartState.READY and (not is_there or end.attaches != attached_before)

    def is_ready(self, label: str) -> bool:
        """Tell whether the part was there at the last look."""
        return self._states[label] is PartState.READY

    def attaches(self, label: str) -> int:
        """How many processes have been this part so far."""
        return self._attaches[label]

    def missing(self) -> list[str]:
        """The parts that were not there at the last look."""
        return [label for label, state in self._states.items() if state is not PartState.READY]
