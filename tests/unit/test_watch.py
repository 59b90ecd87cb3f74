"""What the manager says of its parts, told from their roles and counters."""

from __future__ import annotations

import pytest

import shmring
from manager.watch import SCHEDULER, PartState, PartWatch, worker_label

STALLED_AFTER_S = 4.0


class World:
    """The rings of a deployment with one worker, its parts played by the test, and a clock of its own."""

    def __init__(self, name: str) -> None:
        self.now_s = 100.0
        self.rings = {kind: shmring.create(f"{name}.{kind}", 4096) for kind in ("ingress", "egress", "reply")}
        self.ingress = self.rings["ingress"].producer(takeover=True)
        self.reply = self.rings["reply"].consumer(takeover=True)
        self.watch = PartWatch(
            self.ingress,
            [self.reply],
            [self.rings["egress"]],
            stalled_after_s=STALLED_AFTER_S,
            clock=lambda: self.now_s,
        )

    def pass_time(self, seconds: float) -> list[str]:
        self.now_s += seconds
        return self.watch.look()

    def close(self) -> None:
        self.ingress.close()
        self.reply.close()
        for ring in self.rings.values():
            ring.close()


@pytest.fixture
def world(ring_name: str):
    world = World(ring_name)
    yield world
    world.close()


def test_a_part_that_never_came_is_waited_for(world: World):
    """A start that takes a while would be reported as a death."""
    assert world.watch.look() == []
    assert world.watch.missing() == [SCHEDULER, worker_label(0)]
    assert world.watch.health()[SCHEDULER].state is PartState.WAITING
    assert not world.watch.health()[SCHEDULER].is_healthy


def test_a_scheduler_without_output_is_healthy_while_its_pulse_goes(world: World):
    """A long queue or a long prefill would make an orchestrator restart a healthy server."""
    with world.rings["ingress"].consumer() as scheduler:
        for _ in range(30):
            scheduler.drain(1)  # it asks for work, and there is none
            assert world.pass_time(2.0) == []
            assert world.watch.health()[SCHEDULER].is_healthy
        for _ in range(30):
            scheduler.beat()  # in the midst of a long step
            assert world.pass_time(2.0) == []
            assert world.watch.health()[SCHEDULER].is_healthy


def test_a_part_without_a_pulse_is_unhealthy_and_not_lost(world: World):
    """A hung scheduler would look well for ever, or its requests would be ended though it only pauses."""
    with world.rings["ingress"].consumer() as scheduler:
        scheduler.drain(1)
        world.watch.look()
        assert world.pass_time(STALLED_AFTER_S + 0.5) == []
        health = world.watch.health()[SCHEDULER]
        assert (health.state, health.is_healthy) == (PartState.READY, False)
        assert health.pulse_age_s == pytest.approx(STALLED_AFTER_S + 0.5)
        scheduler.drain(1)
        world.pass_time(0.1)
        assert world.watch.health()[SCHEDULER].is_healthy


def test_a_part_that_leaves_is_told_once_and_can_come_again(world: World):
    """Requests would wait for somebody who is not there, or be ended twice."""
    for _ in range(2):
        scheduler = world.rings["ingress"].consumer()
        assert world.watch.look() == []
        assert world.watch.is_ready(SCHEDULER)
        scheduler.close()
        assert world.watch.look() == [SCHEDULER]
        assert world.watch.look() == []
        assert not world.watch.is_ready(SCHEDULER)


def test_a_part_that_was_replaced_between_two_looks_is_lost_all_the_same(world: World):
    """The new process knows nothing of the old one's requests: they would hang."""
    for _ in range(2):
        with world.rings["reply"].producer():
            world.watch.look()
        with world.rings["reply"].producer():
            assert world.watch.look() == [worker_label(0)]
            assert world.watch.is_ready(worker_label(0))
