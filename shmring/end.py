"""What both ends of a ring do alike: taking the role, telling of the peer, closing."""

from __future__ import annotations

import enum
import os
import weakref
from typing import TYPE_CHECKING, Any

from shmring._native import ffi, lib
from shmring.errors import Answer, LayoutMismatchError, RingClosedError
from shmring.layout import Kind, Role
from shmring.segment import take_role

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmring.segment import Mapping


class PeerState(enum.Enum):
    """What is known of the process at the other end."""

    NEVER = "never"
    """Nobody has taken that end yet."""
    ATTACHED = "attached"
    """A living process holds it. It may be stopped: that is not dead."""
    FINISHED = "finished"
    """It closed in good order."""
    LOST = "lost"
    """It died while it held the end."""


_STATES = {
    Answer.NOT_NOW: PeerState.NEVER,
    Answer.DONE: PeerState.ATTACHED,
    Answer.PEER_FINISHED: PeerState.FINISHED,
    Answer.PEER_LOST: PeerState.LOST,
    Answer.CORRUPT: PeerState.LOST,
}

#: Every open end of this process, so that a forked child can be told that they are not its own.
_cores: weakref.WeakSet[Any] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for core in list(_cores):
        core._disable()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Attachment:
    """The lock and the mapping behind one end, dropped when the end is closed or forgotten."""

    def __init__(self, core: Any, mapping: Mapping, role: Role, open_core: Callable[[Mapping], None]) -> None:
        try:
            if mapping.kind != Kind.RING:
                raise LayoutMismatchError(  # noqa: TRY301 -- undone below
                    f"segment is no ring: name={mapping.handle.name}, kind={mapping.kind.name.lower()}",
                    expected=Kind.RING,
                    found=mapping.kind,
                )
            take_role(mapping, role)
            open_core(mapping)
        except BaseException:
            mapping.handle.close()
            raise
        self.mapping = mapping
        # an end that is forgotten without close() drops its lock, and so counts as lost
        self._finalizer = weakref.finalize(core, mapping.handle.close)
        _cores.add(core)

    @property
    def name(self) -> str:
        """The ring's name."""
        return self.mapping.handle.name

    def close(self) -> None:
        """Drop the role's lock. The core has said that it is closed by now. Twice is once."""
        self._finalizer()


def producer_state(address: int) -> PeerState:
    """The producer as the consumer at `address` sees it. One system call."""
    return _state(lib.shr_producer_state(ffi.cast("shr_consumer *", address)))


def consumer_state(address: int) -> PeerState:
    """The consumer as the producer at `address` sees it. One system call."""
    return _state(lib.shr_consumer_state(ffi.cast("shr_producer *", address)))


def _state(answer: int) -> PeerState:
    if answer == Answer.UNUSABLE:
        raise RingClosedError("this end is closed, or belongs to the process that forked us")
    return _STATES[Answer(answer)]
