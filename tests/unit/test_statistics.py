"""The counters: what an operator reads is what happened."""

from __future__ import annotations

import gc
import json
import threading

import pytest

import shmring
from shmring import testing


@pytest.fixture
def ring(ring_name):
    with shmring.create(ring_name, 4096) as ring:
        yield ring


def test_a_fresh_ring_has_counted_nothing(ring):
    """Zeros, not leftovers of whatever was in that memory."""
    s = ring.statistics()
    assert (s.name, s.capacity_bytes, s.used_bytes, s.high_water_bytes, s.fill) == (
        ring.name,
        4096,
        0,
        0,
        0.0,
    )
    assert (s.owner_state, s.is_retired) == ("attached", False)
    for end in (s.producer, s.consumer):
        assert (end.state, end.attaches, end.position, end.records, end.bytes) == ("never", 0, 0, 0, 0)
        assert (end.batches, end.stalls, end.parks, end.parked_ns, end.wakes_sent) == (0, 0, 0, 0, 0)
        assert (end.idle_ns, end.waiting_ns) == (None, None)
    assert s.waits_log2_ns == (0,) * 64


def test_records_bytes_and_batches_are_counted_on_each_side(ring):
    """Rates come from these; a lost record shows as a difference."""
    with ring.producer() as producer, ring.consumer() as consumer:
        producer.try_push(b"x")
        for _ in range(3):
            producer.try_append(b"12345678")
        producer.publish()
        consumer.drain(2)
        consumer.release()
        s = ring.statistics()
        assert (s.producer.records, s.producer.bytes, s.producer.batches) == (4, 16 * 4, 2)
        assert (s.consumer.records, s.consumer.bytes, s.consumer.batches) == (2, 32, 1)
        assert (s.producer.position, s.consumer.position, s.used_bytes) == (64, 32, 32)
        assert s.fill == 32 / 4096
        assert s.producer.idle_ns is not None
        assert sum(s.waits_log2_ns) == 1, "the first publication is timed"


def test_what_was_never_published_is_not_counted(ring):
    """Discarded work is not traffic."""
    with ring.producer() as producer:
        producer.try_append(b"x")
        producer.discard()
        with producer.try_claim(8) as claim:
            claim.abort()
        assert ring.statistics().producer.records == 0


def test_full_and_empty_are_counted_as_stalls(ring):
    """The producer's stalls say the consumer is slow, and the other way round."""
    with ring.producer() as producer, ring.consumer() as consumer:
        assert consumer.try_pop() is None
        testing.fill(producer)
        s = ring.statistics()
        assert (s.producer.stalls, s.consumer.stalls) == (1, 1)


def test_the_high_water_mark_is_what_was_in_use_and_not_what_went_through(ring):
    """One that rises with every round says "full" of a ring that was never half full."""
    with ring.producer() as producer, ring.consumer() as consumer:
        for _ in range(1000):
            producer.try_push(b"x" * 100)
            consumer.try_pop()
        assert ring.statistics().high_water_bytes == 112
        for _ in range(9):
            producer.try_push(b"x" * 100)
        while consumer.try_pop():
            pass
        assert abs(ring.statistics().high_water_bytes - 9 * 112) <= 4096 // 64
        testing.fill(producer)
        assert ring.statistics().high_water_bytes == 4096 // 72 * 72


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_the_state_of_an_end_is_told_through_every_mapping(side, ring):
    """An operator sees who is there; so does the owner, and so does the end itself."""

    def states(*own: shmring.RingStatistics) -> set[str]:
        seen = (ring.statistics(), shmring.read_statistics(ring.name), *own)
        return {getattr(s, side).state for s in seen}

    assert states() == {"never"}
    end = getattr(ring, side)()
    assert states(end.statistics()) == {"attached"}
    end.close()
    assert states() == {"finished"}
    end = getattr(ring, side)()
    del end
    gc.collect()
    assert states() == {"lost"}
    with getattr(ring, side)() as end:
        assert states(end.statistics()) == {"attached"}
        assert getattr(end.statistics(), side).attaches == 3


def test_a_damaged_state_is_unknown_and_no_crash(ring):
    """The tool that shows a damaged ring must survive it."""
    testing.damage(ring, 0x180, (77).to_bytes(4, "little"))
    assert ring.statistics().producer.state == "unknown"


def test_a_damaged_position_shows_as_more_than_the_ring_holds(ring):
    """And is not hidden by rounding it into range."""
    testing.damage(ring, 0x100, (1 << 40).to_bytes(8, "little"))
    assert ring.statistics().used_bytes == 1 << 40
    assert ring.statistics().fill > 1


def wait_in_thread(ring: shmring.Ring, side: str, timeout_s: float) -> tuple[threading.Thread, object]:
    end = getattr(ring, side)()
    wait = {"consumer": lambda: end.pop(timeout_s), "producer": lambda: end.push(b"x" * 57, timeout_s)}[side]
    thread = threading.Thread(target=wait)
    thread.start()
    return thread, end


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_long_wait_is_told_from_its_beginning(side, ring):
    """ "Since when" is the question at night; a wait cut into slices is still one wait."""
    if side == "producer":
        with ring.producer() as filler:
            testing.fill(filler)
    thread, end = wait_in_thread(ring, side, 0.8)
    longest, parked = 0, False
    while thread.is_alive():
        s = getattr(ring.statistics(), side)
        longest = max(longest, s.waiting_ns or 0)
        parked = parked or s.parks > 0
    thread.join()
    assert longest > 500_000_000, "a slice is a quarter of a second"
    s = getattr(ring.statistics(), side)
    assert s.waiting_ns is None, "given up is not waiting"
    assert s.parks >= 2
    assert s.parked_ns > 500_000_000
    end.close()


def test_a_wait_that_is_over_is_not_told_any_more(ring):
    """Ends that wait with others, and those that got what they waited for."""
    with ring.producer() as producer, ring.consumer() as consumer:
        assert not shmring.wait_any([consumer], 0.01)
        assert ring.statistics().consumer.waiting_ns is None
        timer = threading.Timer(0.05, lambda: producer.try_push(b"x"))
        timer.start()
        assert shmring.wait_any([consumer], 60)
        timer.join()
        s = ring.statistics()
        assert (s.consumer.waiting_ns, s.producer.wakes_sent) == (None, 1)


def test_a_successor_goes_on_with_the_counters(ring):
    """Totals are the ring's, not the process's."""
    for n in range(3):
        with ring.producer() as producer:
            producer.try_push(b"x")
        assert (ring.statistics().producer.records, ring.statistics().producer.attaches) == (n + 1, n + 1)


def test_statistics_are_plain_data_for_json(ring):
    """Monitoring reads them as JSON, and computes fill from them."""
    with ring.producer() as producer:
        producer.try_push(b"x" * 1000)
        data = json.loads(json.dumps(ring.statistics().as_dict()))
    assert data["used_bytes"] == 1008
    assert data["fill"] == 1008 / 4096
    assert data["producer"]["records"] == 1


def test_a_closed_end_or_ring_does_not_call_everybody_lost(ring_name):
    """Without its descriptor nobody can be asked; saying so beats raising a false alarm."""
    ring = shmring.create(ring_name, 4096)
    producer = ring.producer()
    producer.close()
    ring.close()
    for thing in (ring, producer):
        with pytest.raises(shmring.RingClosedError, match=ring_name):
            thing.statistics()


def test_one_publication_in_sixty_four_is_timed(ring):
    """How long records lie is told without a clock call for each."""
    with ring.producer() as producer, ring.consumer() as consumer:
        for _ in range(64 * 5):
            producer.try_push(b"")
            consumer.try_pop()
        assert sum(ring.statistics().waits_log2_ns) == 5


def test_the_high_water_mark_is_never_below_what_is_in_use(ring_name):
    """An operator who sees less than the present fill believes neither figure."""
    with shmring.create(ring_name, 1 << 16) as ring, ring.producer() as producer:
        for _ in range(10):
            producer.push(bytes(8))
            found = ring.statistics()
            assert found.high_water_bytes >= found.used_bytes > 0
