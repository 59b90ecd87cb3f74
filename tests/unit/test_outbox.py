"""The manager's producing ends against rings that are full at the wrong moment."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

import shmring
from manager import messages
from manager.errors import QueueFullError
from manager.outbox import Dispatch, Outbox
from manager.sampling import NormalizedSampling, SamplingParams, decode_extras

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARDS = 2


def dispatch(request_id: int, *, prompt: int = 3, rid: str = "", **params: Any) -> Dispatch:
    prompt_ids = np.arange(prompt, dtype=np.int32)
    sampling = NormalizedSampling.of(
        SamplingParams.from_mapping(params), vocab_size=1 << 20, has_tokenizer=True
    )
    return Dispatch(request_id, rid or f"rid-{request_id}", prompt_ids, prompt_ids[-16:], sampling)


class Desk:
    """An outbox and the readers of its rings."""

    def __init__(self, name: str, *, ingress_bytes: int = 4096, register_bytes: int = 4096) -> None:
        self.rings = [
            shmring.create(f"{name}.i", ingress_bytes),
            *(shmring.create(f"{name}.g{shard}", register_bytes) for shard in range(SHARDS)),
        ]
        self.outbox = Outbox(
            self.rings[0].producer(takeover=True), [ring.producer(takeover=True) for ring in self.rings[1:]]
        )
        self.scheduler = self.rings[0].consumer(takeover=True)
        self.workers = [ring.consumer(takeover=True) for ring in self.rings[1:]]

    def read_ingress(self, limit: int = 10_000) -> list[tuple[str, int]]:
        """What the scheduler finds: ("request" or "abort", id) in order."""
        found = []
        for record in self.scheduler.drain(limit):
            if record.type == messages.IngressType.REQUEST:
                kind, frame = "request", messages.REQUEST.read(record)
            else:
                kind, frame = "abort", messages.ABORT.read(record)
            found += [(kind, request_id) for request_id in frame["request_ids"].tolist()]
        if found:
            self.scheduler.release()
        return found

    def read_register(self, shard: int, limit: int = 10_000) -> list[tuple[str, int]]:
        found = []
        for record in self.workers[shard].drain(limit):
            if record.type == messages.RegisterType.REGISTER:
                kind, frame = "register", messages.REGISTER.read(record)
            else:
                kind, frame = "deregister", messages.DEREGISTER.read(record)
            found += [(kind, request_id) for request_id in frame["request_ids"].tolist()]
        if found:
            self.workers[shard].release()
        return found

    def fill_ingress(self) -> list[int]:
        """Send until the ring is full; the ids that went."""
        sent = []
        for request_id in range(2, 10_000, 2):
            try:
                self.outbox.send(dispatch(request_id))
            except QueueFullError:
                return sent
            sent.append(request_id)
            self.read_register(0)
        pytest.fail("the ring is never full")

    def close(self) -> None:
        self.outbox.close()
        for end in (self.scheduler, *self.workers):
            end.close()
        for ring in self.rings:
            ring.close()


@pytest.fixture
def desk(ring_name: str) -> Iterator[Desk]:
    desk = Desk(ring_name)
    yield desk
    desk.close()


def test_a_worker_is_told_before_the_scheduler(ring_name: str) -> None:
    """A worker that meets a chunk of a request that it does not know drops it: the stop strings first."""
    order: list[str] = []

    class Recorder:
        def __init__(self, ring: str) -> None:
            self._ring = ring

        def push_frame(self, *_: Any) -> bool:
            order.append(self._ring)
            return True

    Outbox(Recorder("ingress"), [Recorder("register")]).send(dispatch(1))  # type: ignore[arg-type, list-item]
    assert order == ["register", "ingress"]


def test_a_request_travels_whole(desk: Desk) -> None:
    """What the client asked for is what the scheduler and the worker read."""
    desk.outbox.send(
        dispatch(
            7, prompt=20, rid="ключ", stop=["a", "бв"], stop_token_ids=[5, 6], temperature=0.5,
            skip_special_tokens=False, no_stop_trim=True, min_new_tokens=2, regex="x+",
        )
    )  # fmt: skip
    request = messages.REQUEST.read(desk.scheduler.drain(1)[0])
    assert request["request_ids"].tolist() == [7]
    assert request["prompt_ids"].tolist() == list(range(20))
    assert request["stop_token_ids"].tolist() == [5, 6]
    assert request["sampling"]["temperature"].tolist() == [0.5]
    assert request["rids"].tobytes().decode() == "ключ"
    assert decode_extras(request["extras"].tobytes())["regex"] == "x+"
    desk.scheduler.release()
    registration = messages.REGISTER.read(desk.workers[1].drain(1)[0])
    assert registration["request_ids"].tolist() == [7]
    assert registration["prompt_tails"].tolist() == list(range(4, 20))
    assert registration["output"].tolist() == [(2, False, True, True, False)]
    assert msgspec.msgpack.decode(registration["stops"].tobytes()) == ["a", "бв"]
    desk.workers[1].release()
    assert desk.workers[0].drain(1) == []


def test_a_full_ingress_ring_refuses_and_takes_the_registration_back(desk: Desk) -> None:
    """A refused request must leave no state in the worker, or it is full after a day of overload."""
    sent = desk.fill_ingress()
    assert desk.outbox.kept_count == 0
    refused = sent[-1] + 2
    assert desk.read_register(0) == [("register", refused), ("deregister", refused)]
    assert desk.read_ingress() == [("request", request_id) for request_id in sent]
    desk.outbox.send(dispatch(refused + 2))


def test_a_full_register_ring_refuses_before_the_scheduler_hears_of_it(desk: Desk) -> None:
    """Without a registration there must be no request: its output would be a stranger's."""
    sent: list[int] = []

    def send_without_end() -> None:
        for request_id in range(2, 10_000, 2):
            desk.outbox.send(dispatch(request_id))
            sent.append(request_id)
            desk.read_ingress()

    with pytest.raises(QueueFullError, match="shard=0"):
        send_without_end()
    assert desk.read_ingress() == []
    # the other shard is as free as ever
    desk.outbox.send(dispatch(1))
    assert desk.read_register(0) == [("register", request_id) for request_id in sent]


def test_an_abort_that_does_not_fit_is_kept_and_goes_before_everything_new(desk: Desk) -> None:
    """An abort lost under load is an engine that works for nobody, exactly when it is needed."""
    sent = desk.fill_ingress()
    refused = sent[-1] + 2
    for request_id in sent:
        desk.outbox.abort(request_id)
    kept = desk.outbox.kept_count
    assert kept > 0
    with pytest.raises(QueueFullError, match="aborts are waiting"):
        desk.outbox.send(dispatch(refused))
    assert desk.outbox.flush() == kept
    found = []
    while desk.outbox.kept_count:
        found += desk.read_ingress(1)
        desk.outbox.flush()
    found += desk.read_ingress()
    assert found == [("request", i) for i in sent] + [("abort", i) for i in sent]
    desk.outbox.send(dispatch(refused + 2))


def test_thousands_of_aborts_go_in_order_and_none_twice(desk: Desk) -> None:
    """More than one record can hold: the cut must neither lose nor repeat one."""
    ids = list(range(1, 5001))
    found = []
    for request_id in ids:
        desk.outbox.abort(request_id)
    while True:
        found += desk.read_ingress(1)
        if not desk.outbox.flush() and desk.scheduler.is_readable() is False:
            break
    assert found == [("abort", request_id) for request_id in ids]


def test_a_registration_does_not_overtake_a_deregistration_that_waits(desk: Desk) -> None:
    """The worker would open the new one beside what should have gone, without end."""
    request_id = 0
    while desk.outbox.kept_count == 0:
        request_id += 2
        desk.outbox.deregister(request_id)
    with pytest.raises(QueueFullError):
        desk.outbox.send(dispatch(request_id + 2))
    # the other shard does not wait for this one
    desk.outbox.send(dispatch(1))
    assert desk.read_register(1) == [("register", 1)]
    assert desk.read_register(0) == [("deregister", i) for i in range(2, request_id, 2)]
    assert desk.outbox.flush() == 0
    desk.outbox.send(dispatch(request_id + 2))
    assert desk.read_register(0) == [("deregister", request_id), ("register", request_id + 2)]


def test_what_ended_while_a_worker_was_dead_is_told_to_its_successor(desk: Desk) -> None:
    """The successor finds the old one's registrations in the ring: without the other half it keeps them."""
    registered = []
    with contextlib.suppress(QueueFullError):
        for request_id in range(2, 10_000, 2):
            desk.outbox.send(dispatch(request_id))
            desk.read_ingress()
            registered.append(request_id)
    for request_id in registered:
        desk.outbox.deregister(request_id)
    assert desk.outbox.kept_count > 0
    found = desk.read_register(0)
    while desk.outbox.flush():
        found += desk.read_register(0)
    found += desk.read_register(0)
    assert [i for kind, i in found if kind == "register"] == registered
    assert [i for kind, i in found if kind == "deregister"] == registered


@pytest.mark.parametrize("what", ["prompt", "stop"])
def test_what_can_never_fit_is_told_from_what_does_not_fit_now(desk: Desk, what: str) -> None:
    """A client that is told to try again later would try for ever."""
    big = dispatch(2, prompt=2000) if what == "prompt" else dispatch(2, stop=["x" * 1000] * 8)
    with pytest.raises(shmring.RecordTooLargeError):
        desk.outbox.send(big)
    desk.outbox.deregister(2)
    assert desk.read_ingress() == []
    assert desk.read_register(0)[-1] == ("deregister", 2)


def test_the_ends_finish_in_order(desk: Desk) -> None:
    """Whoever reads takes what is there, and then sees the end."""
    desk.outbox.send(dispatch(1))
    desk.outbox.close()
    assert desk.read_ingress() == [("request", 1)]
    assert desk.scheduler.peer_state() is shmring.PeerState.FINISHED
