"""What SGLang's server promises about its two rings, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmring
from manager import SchedulerPort, Settings
from manager.deployment import Deployment, Facts, egress_name
from manager.ids import shard_of
from manager.outbox import Dispatch, Outbox
from manager.sampling import SamplingParams
from shmring import testing

if TYPE_CHECKING:
    from collections.abc import Iterator

CAPACITY = 4096


@pytest.fixture
def ends(ring_name: str) -> Iterator[tuple[shmring.Producer, shmring.Consumer]]:
    with (
        shmring.create(ring_name, CAPACITY) as ring,
        ring.producer() as producer,
        ring.consumer() as consumer,
    ):
        yield producer, consumer


def test_wait_stashes_then_drain_returns_it(ends: Any) -> None:
    """Waiting takes nothing, however often: what was seen is what the next drain brings, once."""
    producer, consumer = ends
    assert consumer.wait_until_readable(0.001) is False
    producer.push(b"a")
    assert consumer.wait_until_readable(0.2) is True
    assert consumer.wait_until_readable(0.001) is True
    assert [bytes(record) for record in consumer.drain(16)] == [b"a"]
    assert consumer.drain(16) == []


def test_drain_counts_what_a_wait_has_seen(ends: Any) -> None:
    """Of two records a drain of one brings the first, also after a wait."""
    producer, consumer = ends
    producer.push(b"a")
    assert consumer.wait_until_readable(0)
    producer.push(b"b")
    assert [bytes(record) for record in consumer.drain(1)] == [b"a"]
    assert [bytes(record) for record in consumer.drain(1)] == [b"b"]


@pytest.mark.parametrize("state", ["full", "full, consumer closed"])
def test_try_push_on_a_ring_that_cannot_take_it(ends: Any, state: str) -> None:
    """Not now is an answer; that nobody will ever take it is another, and no wait for ever."""
    producer, consumer = ends
    testing.fill(producer)
    if state == "full":
        assert producer.try_push(b"x" * 57) is False
        assert producer.push(b"x" * 57, 0) is False
        return
    consumer.close()
    with pytest.raises(shmring.EndOfRing):
        producer.try_push(b"x" * 57)
    with pytest.raises(shmring.EndOfRing):
        producer.push(b"x" * 57)


def test_a_push_that_found_the_ring_full_leaves_the_frame_with_its_owner(ends: Any) -> None:
    """The frame is tried again: it must be neither lost nor there twice."""
    producer, consumer = ends
    filled = 0
    while producer.try_push(filled.to_bytes(2, "little") * 100):
        filled += 1
    assert consumer.pop() == (0).to_bytes(2, "little") * 100
    assert producer.push(filled.to_bytes(2, "little") * 100)
    got = [consumer.pop()[:2] for _ in range(filled)]
    assert got == [number.to_bytes(2, "little") for number in range(1, filled + 1)]
    assert consumer.try_pop() is None


class Ingress:
    """A manager's outbox and a scheduler's port, and nobody between them."""

    def __init__(self, name: str) -> None:
        settings = Settings(name=name, workers=1, context_length=64, ingress_capacity_bytes=1 << 16)
        self._deployment = Deployment(settings, Facts(1000, (0,), None))
        self._ends = [
            self._deployment.ring(f"{name}.ingress").producer(takeover=True),
            self._deployment.ring(f"{name}.register.0").producer(takeover=True),
        ]
        self.outbox = Outbox(self._ends[0], [self._ends[1]])
        self.port = SchedulerPort.attach(name)
        self._sampling = SamplingParams().normalize(vocab_size=1000, has_tokenizer=True)

    def send(self, request_id: int, ids: list[int]) -> None:
        prompt = np.array(ids, np.int32)
        self.outbox.send(Dispatch(request_id, f"r{request_id}", prompt, prompt[-2:], self._sampling))

    def close(self) -> None:
        self.port.close()
        for end in self._ends:
            end.close()
        self._deployment.close()


@pytest.fixture
def ingress(ring_name: str) -> Iterator[Ingress]:
    made = Ingress(ring_name)
    yield made
    made.close()


def test_the_port_waits_and_drains_like_the_ring(ingress: Ingress) -> None:
    """An idle scheduler sleeps in a wait; nothing is lost or reordered between it and the drain."""
    assert ingress.port.wait(0.001) is False
    ingress.send(1, [5, 6, 7])
    assert ingress.port.wait(0.2) is True
    assert ingress.port.wait(0.001) is True
    ingress.send(2, [8])
    assert ingress.port.drain(0).rids == []
    assert ingress.port.drain(1).rids == ["r1"]
    assert ingress.port.drain(1).rids == ["r2"]
    assert ingress.port.wait(0.001) is False


def test_prompts_come_back_to_back_with_their_lengths(ingress: Ingress) -> None:
    """`lengths` counts ids and their sum is the data: whoever slices by them gets each its own."""
    prompts = [[5, 6, 7], [8], list(range(40))]
    for number, ids in enumerate(prompts, 1):
        ingress.send(number, ids)
    arrivals = ingress.port.drain(16)
    assert arrivals.prompt_counts.tolist() == [3, 1, 40]
    assert arrivals.prompt_ids.tolist() == [token_id for ids in prompts for token_id in ids]
    assert len(arrivals.prompt_ids) == int(arrivals.prompt_counts.sum())


@pytest.mark.parametrize("shards", [1, 3, 8, 64])
def test_uuid_rid_decodes_to_the_same_rid_and_shard(ring_name: str, shards: int) -> None:
    """A request's shard follows from its number alone; its rid, digits or not, plays no part in it."""
    settings = Settings(
        name=ring_name,
        workers=shards,
        context_length=64,
        ingress_capacity_bytes=1 << 13,
        egress_capacity_bytes=1 << 12,
        register_capacity_bytes=1 << 12,
        reply_capacity_bytes=1 << 12,
    )
    deployment = Deployment(settings, Facts(1000, (0,), None))
    number = 0x9F86D081884C7D65
    with deployment.ring(f"{ring_name}.ingress").producer() as manager:
        with SchedulerPort.attach(ring_name) as port:
            port.push_batch([number], [1], [7])
            full = [
                shard
                for shard in range(shards)
                if shmring.read_statistics(egress_name(ring_name, shard)).used_bytes
            ]
            assert full == [shard_of(number, shards)]
        manager.close()
    deployment.close()
