"""Numbers for the texts in work: given out, taken back, bounded.

A number that is in use is never given out again, and no text is ever pushed out by a new
one: when all are in use the new one is refused.
"""

from __future__ import annotations

from manager.errors import DetokenizeError, UnavailableError

_FIRST_CAPACITY = 64


class SlotTable:
    """Hands out slot numbers below `slots_max`, low ones first.

    `capacity` says how many slots a table beside this one must have room for. It doubles.
    """

    def __init__(self, slots_max: int) -> None:
        if slots_max < 1:
            raise ValueError(f"no slots: slots_max={slots_max}")
        self.slots_max = slots_max
        self.capacity = min(_FIRST_CAPACITY, slots_max)
        self._in_use: set[int] = set()
        self._free: list[int] = list(range(self.capacity - 1, -1, -1))

    def take(self) -> int:
        """A free slot; UnavailableError if `slots_max` are in use."""
        if not self._free:
            if self.capacity == self.slots_max:
                raise UnavailableError(f"no decoder slot is free: slots_max={self.slots_max}")
            grown = min(2 * self.capacity, self.slots_max)
            self._free.extend(range(grown - 1, self.capacity - 1, -1))
            self.capacity = grown
        slot = self._free.pop()
        self._in_use.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Frees a slot that is in use."""
        self.check(slot)
        self._in_use.remove(slot)
        self._free.append(slot)

    def check(self, slot: int) -> None:
        """DetokenizeError unless the slot is in use."""
        if slot not in self._in_use:
            raise DetokenizeError(f"decoder slot is not open: slot={slot}")
