"""Parts of a simulated deployment: watched, interrupted, killed; and frames that nobody can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scripted_engine import KilledError

from manager import TokenizerManager, messages
from manager.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable

    import shmring
    from manager.errors import ManagerError
    from manager.finish import FinishReason
    from manager.shard import DetokShard


class WatchedManager(TokenizerManager):
    """The manager, and a look at what its workers tell it: no request ends twice or goes on after it."""

    problems: list[str]
    told_ends: set[int]
    spoilt: set[int]
    """Requests of which a worker told in a frame that nobody can read; it goes on with them."""

    def on_text(
        self, request_id: int, text: str, token_ids: list[int], count: int, reason: FinishReason | None
    ) -> None:
        if request_id in self.told_ends:
            self.problems.append(f"a worker speaks of a request that it has ended: {text!r}, {reason}")
        if reason is not None:
            self.told_ends.add(request_id)
        super().on_text(request_id, text, token_ids, count, reason)

    def on_fail(self, request_id: int, error: ManagerError) -> None:
        if request_id not in self.spoilt:
            if request_id in self.told_ends:
                self.problems.append(f"a worker ends a request twice: {error!r}")
            self.told_ends.add(request_id)
        super().on_fail(request_id, error)


class InterruptedOutbox(Outbox):
    """The manager's way out; other processes do not wait until it has written to all its rings."""

    let_others_work: Callable[[], None]

    def _push_request(self, dispatch: Any) -> bool:
        self.let_others_work()
        return super()._push_request(dispatch)

    def deregister(self, request_id: int) -> None:
        self.let_others_work()
        super().deregister(request_id)


class InterruptedConsumer:
    """An egress ring's end in a worker: the others go on while it works, and it may die in the midst."""

    def __init__(
        self, consumer: shmring.Consumer, dies_now: Callable[[], bool], let_others_work: Callable[[int], None]
    ) -> None:
        self._consumer = consumer
        self._dies_now = dies_now
        self._let_others_work = let_others_work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def snapshot_tail(self) -> int:
        # before and behind: new requests and their first output may come between any two looks
        self._let_others_work(16)
        tail = self._consumer.snapshot_tail()
        self._let_others_work(16)
        return tail

    def release(self) -> None:
        self._let_others_work(4)
        if self._dies_now():
            raise KilledError
        self._consumer.release()


@dataclass
class Worker:
    """A detok worker's process."""

    stage: DetokShard
    ends: list[Any]


def drop(ends: list[Any]) -> None:
    """End them as the kernel does for a killed process: the locks go, nothing is said."""
    for end in ends:
        end._attachment.mapping.handle.close()


def malformed(request_ids: list[int]) -> bytes:
    """A frame of a schema that nobody knows, of which only the ids can be read."""
    header, entry = messages._FRAME_HEADER, messages._COLUMN_ENTRY
    start = header.size + entry.size
    ids = np.array(request_ids, np.uint64).tobytes()
    return header.pack(1, 1, len(request_ids), 2**63) + entry.pack(start, len(ids)) + ids
