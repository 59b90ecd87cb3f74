"""The simulation finds what it is for: each way of breaking the manager fails one of the first seeds.

A fault is a piece of the product put out of order, always or now and then. Run one by name to see how it is
found:

    pytest tests/simulation/test_faults_are_found.py -k "abort is lost" -s
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from world import World

from manager import messages
from manager.engines.loop import EngineLoop
from manager.errors import PartLostError, QueueFullError
from manager.extras import PendingExtras
from manager.inbox import Inbox
from manager.lifecycle import State
from manager.outbox import Outbox
from manager.output import _Pieces
from manager.scheduler_port import SchedulerPort
from manager.shard import DetokShard
from manager.stream import RequestStream
from manager.tokenizer_manager import TokenizerManager
from manager.watch import PartWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STEPS = 240
#: Of those of an ordinary run, the first.
SEEDS = 200


def sometimes(kind: Any, name: str, period: int, instead: Callable[..., Any]) -> dict[tuple[Any, str], Any]:
    """Do `instead` of a method, given the method itself first, at every `period`-th call."""
    right = getattr(kind, name)
    calls = itertools.count(1)

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        if next(calls) % period == 0:
            return instead(right, self, *arguments, **named)
        return right(self, *arguments, **named)

    return {(kind, name): method}


def never(_right: Any, *_arguments: Any, **_named: Any) -> None:
    """Not done at all."""


def twice(right: Any, *arguments: Any, **named: Any) -> None:
    right(*arguments, **named)
    right(*arguments, **named)


def to_another(right: Any, self: Any, request_id: int, *rest: Any) -> None:
    """Take what belongs to one request for another's."""
    others = [i for i in self._streams if i != request_id]
    right(self, others[0] if others else request_id, *rest)


class _EndTold:
    """A receiver behind the inbox that hears of an end twice, or of more behind it."""

    def __init__(self, receiver: Any, after: tuple[str, bool]) -> None:
        self._receiver, (self._text, self._is_end) = receiver, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)

    def on_text(self, request_id: int, text: str, ids: Any, count: int, reason: Any) -> None:
        self._receiver.on_text(request_id, text, ids, count, reason)
        if reason is not None:
            self._receiver.on_text(request_id, self._text, [], 0, reason if self._is_end else None)


def told_more(text: str, *, is_end: bool) -> dict[tuple[Any, str], Any]:
    def init(self: Any, reply: Any, receiver: Any) -> None:
        right(self, reply, _EndTold(receiver, (text, is_end)))

    right = Inbox.__init__
    return {(Inbox, "__init__"): init}


def without_end(
    right: Any, self: Any, request_id: int, text: str, ids: Any, count: int, _reason: Any
) -> None:
    right(self, request_id, text, ids, count, None)


def without_text(right: Any, self: Any, request_id: int, _text: str, *rest: Any) -> None:
    right(self, request_id, "", *rest)


def abort_of_what_streams(self: Any, stream: Any, error: Any) -> None:
    if stream.state is State.STREAMING:
        self._outbox.abort(stream.request_id)
        self._outbox.deregister(stream.request_id)
        self._keep_flushing()
    self._end(stream, error)


def forget_but_rid(self: Any, stream: Any) -> None:
    self._streams.pop(stream.request_id, None)


def forget_but_stream(self: Any, stream: Any) -> None:
    self._rids.pop(stream.request.rid, None)


def drop_what_does_not_fit(right: Any, self: Any) -> bool:
    is_sent: bool = right(self)
    if not is_sent:
        self._unsent.popleft()
    return is_sent


def open_first_row(right: Any, self: Any, record: Any) -> None:
    """The last record of a registration is left for another time, which does not come."""
    if record.type != messages.RegisterType.REGISTER:
        right(self, record)


def refuse_and_keep(self: Any, dispatch: Any) -> None:
    deregister, self.deregister = self.deregister, lambda _request_id: None
    try:
        _send(self, dispatch)
    finally:
        self.deregister = deregister


_send = Outbox.send


def send_first(self: Any, dispatch: Any) -> None:
    shard = dispatch.request_id % len(self._registers)
    self.flush()
    if self._aborts or self._deregistrations[shard] or not self._push_request(dispatch):
        raise QueueFullError("the other way round")
    self.let_others_work()
    if not self._register(shard, dispatch):
        self.abort(dispatch.request_id)
        raise QueueFullError("the other way round")


def look_behind(self: Any, limit: int) -> int:
    """Take registrations first, and then see how far to work."""
    if not self._send_unsent():
        return 0
    done = self._take_registrations()
    horizon = self._egress.snapshot_tail()
    for _ in range(limit):
        if self._egress.position >= horizon or self._unsent:
            break
        for record in self._egress.drain(1):
            self._take(record)
        self._send_unsent()
        self._egress.release()
        done += 1
    return int(done)


async def end_without_a_word(self: Any, label: str, _shards: Any, lost: Any, _asked: Any) -> None:
    for stream in lost:
        if not stream.is_ended:
            self._outbox.deregister(stream.request_id)
            self._end(stream, PartLostError("gone", part=label))


def without_past(right: Any, self: Any, *arguments: Any) -> None:
    self._texts.clear()
    right(self, *arguments)


def of_first_sample(right: Any, *arguments: Any) -> Any:
    return dataclasses.replace(right(*arguments), sample=0)


def queue_what_was_aborted(right: Any, self: Any, arrivals: Any, _aborted: set[int]) -> None:
    right(self, arrivals, set())


def push_or_drop(
    self: Any, shard: int, schema: Any, rows: int, columns: Any, flags: int, _t: Any, *, publish: bool = True
) -> None:
    schema.push(self._egress[shard], rows, *columns, publish=publish, flags=flags)


def end_but_texts(self: Any, request_id: int) -> None:
    self._requests.close(request_id)
    self._ended.add(request_id)


FAULTS: dict[str, Callable[[], dict[tuple[Any, str], Any]]] = {
    "an abort is lost": lambda: sometimes(Outbox, "abort", 5, never),
    "an abort of what is queued is lost": lambda: {(TokenizerManager, "_abort"): abort_of_what_streams},
    "a worker's wish to abort is lost": lambda: sometimes(TokenizerManager, "on_abort_asked", 1, never),
    "an abort does not count for what came with it": lambda: sometimes(
        EngineLoop, "_queue", 1, queue_what_was_aborted
    ),
    "a client that leaves is not noticed": lambda: sometimes(TokenizerManager, "_leave", 5, never),
    "a deregistration is lost": lambda: sometimes(Outbox, "deregister", 5, never),
    "a refused request stays registered": lambda: {(Outbox, "send"): refuse_and_keep},
    "a registration is lost": lambda: sometimes(DetokShard, "_apply", 20, open_first_row),
    "a request is sent before it is registered": lambda: {(Outbox, "send"): send_first},
    "a worker looks for registrations too early": lambda: {(DetokShard, "do_work"): look_behind},
    "an end is told twice": lambda: told_more("", is_end=True),
    "text comes behind the end": lambda: told_more("a", is_end=False),
    "an end is lost": lambda: sometimes(TokenizerManager, "on_text", 25, without_end),
    "a piece of text is lost": lambda: sometimes(TokenizerManager, "on_text", 25, without_text),
    "text goes to another request": lambda: sometimes(TokenizerManager, "on_text", 25, to_another),
    "log probabilities go to another request": lambda: sometimes(
        TokenizerManager, "on_extras", 5, to_another
    ),
    "log probabilities are told twice": lambda: sometimes(PendingExtras, "stage", 5, twice),
    "a failure is not told": lambda: sometimes(TokenizerManager, "on_fail", 3, never),
    "a damaged step fails nobody": lambda: sometimes(DetokShard, "_reject", 1, never),
    "a damaged reply fails nobody": lambda: sometimes(Inbox, "_reject", 1, never),
    "requests of a dead worker run on": lambda: {(TokenizerManager, "_end_lost"): end_without_a_word},
    "what a slow reader has not taken is lost": lambda: sometimes(RequestStream, "add", 1, without_past),
    "a sample is taken for another": lambda: sometimes(_Pieces, "_output", 5, of_first_sample),
    "the table of requests is not emptied": lambda: {(TokenizerManager, "_forget"): forget_but_stream},
    "the table of names is not emptied": lambda: {(TokenizerManager, "_forget"): forget_but_rid},
    "a worker remembers who wanted texts": lambda: {(DetokShard, "_end"): end_but_texts},
    "a full reply ring loses replies": lambda: sometimes(
        DetokShard, "_send_unsent", 1, drop_what_does_not_fit
    ),
    "a full egress ring loses steps": lambda: {(SchedulerPort, "_push_frame"): push_or_drop},
    "a death is not noticed": lambda: sometimes(PartWatch, "look", 1, lambda *_: []),
}


@pytest.fixture(autouse=True)
def _forget_worlds() -> Iterator[None]:
    """A world that failed is held by its error until it is collected, with its rings and descriptors."""
    yield
    gc.collect()


def first_failure(name: str) -> str | None:
    """Run the seeds of an ordinary run until one fails; what it says."""
    for seed in range(SEEDS):
        try:
            with World(f"{name}-{seed}", seed, is_stormy=True) as world:
                for _ in range(STEPS):
                    world.step()
                world.settle()
        except AssertionError as error:
            return f"seed {seed}: {error}"
    return None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_one_of_the_seeds(ring_name: str, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A simulation that passes whatever is done to the manager shows nothing."""
    for (kind, name), instead in FAULTS[fault]().items():
        monkeypatch.setattr(kind, name, instead)
    failure = first_failure(ring_name)
    assert failure is not None
    print(f"{fault}: {failure[:300]}")


def test_a_close_that_forgets_those_who_wait_fails_one_of_the_seeds(
    ring_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, for the schedule that ends in the midst of everything."""
    right = TokenizerManager._abort

    def abort(self: Any, stream: Any, error: Any) -> None:
        if self._state == "running" or stream.state is not State.QUEUED:
            right(self, stream, error)

    monkeypatch.setattr(TokenizerManager, "_abort", abort)

    def close_in_the_midst() -> None:
        for seed in range(SEEDS):
            with World(f"{ring_name}-{seed}", seed, is_stormy=True) as world:
                for _ in range(60):
                    world.step()
                world.close_in_the_midst()

    with pytest.raises(AssertionError, match=r"kept|waits"):
        close_in_the_midst()
