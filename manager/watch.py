"""What the manager knows of the life of its parts: the scheduler and the workers.

Told from the roles that the kernel holds for them, at an interval. A part that is replaced
between two looks is noticed by the count of its attaches.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from shmring import PeerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmring import Consumer, EndStatistics, Producer

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


class PartWatch:
    """The parts by their labels: "scheduler", "worker 0", ..."""

    def __init__(self, ingress: Producer, replies: Sequence[Consumer]) -> None:
        """Watch the scheduler through the ingress ring, each worker through its reply ring."""
        self._ingress = ingress
        self._replies = tuple(replies)
        labels = (SCHEDULER, *map(worker_label, range(len(replies))))
        self._states = dict.fromkeys(labels, PartState.WAITING)
        self._attaches = dict.fromkeys(labels, 0)

    def look(self) -> list[str]:
        """Look at all parts; returns the labels of those that were ready and have gone."""
        lost = [
            worker_label(shard)
            for shard, reply in enumerate(self._replies)
            if self._note(worker_label(shard), reply.statistics().producer)
        ]
        if self._note(SCHEDULER, self._ingress.statistics().consumer):
            lost.append(SCHEDULER)
        return lost

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
