"""The two ends of a ring: what the calls that never wait promise."""

from __future__ import annotations

import gc
import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

import shmring
from shmring import testing

if TYPE_CHECKING:
    from collections.abc import Callable

CAPACITY = 4096


@pytest.fixture
def ring(ring_name):
    with shmring.create(ring_name, CAPACITY) as ring:
        yield ring


@pytest.fixture
def producer(ring):
    with ring.producer() as producer:
        yield producer


@pytest.fixture
def consumer(ring):
    with ring.consumer() as consumer:
        yield consumer


def take_all(consumer: shmring.Consumer) -> list[bytes]:
    records = []
    while (record := consumer.try_pop()) is not None:
        records.append(record)
    return records


# Records


def test_what_is_pushed_comes_out_once_in_order_and_unchanged(producer, consumer):
    """The one promise that everything else is built on."""
    sent = [bytes([n]) * n for n in (1, 0, 7, 8, 9, 63, 64, 65, 255)]
    for payload in sent:
        assert producer.try_push(payload)
    assert take_all(consumer) == sent
    assert consumer.try_pop() is None


@pytest.mark.parametrize(
    "payload",
    [
        b"abc",
        bytearray(b"abc"),
        memoryview(b"xabcx")[1:4],
        np.frombuffer(b"abc", np.uint8),
        np.array([[1, 2], [3, 4]], np.int16),
        np.empty(0, np.float64),
        np.zeros((0, 5)),
    ],
)
def test_any_block_of_bytes_can_be_pushed(payload, producer, consumer):
    """Users have arrays and views in hand, and should not copy them to bytes first."""
    assert producer.try_push(payload)
    assert consumer.try_pop() == bytes(memoryview(payload).tobytes())


@pytest.mark.parametrize("payload", ["text", None, 5, [1], object()])
def test_what_is_no_block_of_bytes_is_refused(payload, producer, consumer):
    """A str has no bytes until somebody chooses an encoding."""
    with pytest.raises(TypeError):
        producer.try_push(payload)
    assert consumer.try_pop() is None


def test_a_view_with_gaps_is_refused(producer, consumer):
    """Copying around the gaps would send other bytes than numpy shows."""
    with pytest.raises((BufferError, ValueError)):
        producer.try_push(np.arange(20)[::2])
    with pytest.raises(BufferError):
        producer.try_push(memoryview(b"abcdef")[::2])
    assert consumer.try_pop() is None


def test_type_and_flags_travel_with_the_record(producer, consumer):
    """They tell the reader what it has before it looks inside."""
    producer.try_push(b"a", 255, 1)
    producer.try_append(b"b", 0, 255)
    claim = producer.try_claim(9)
    claim.append(type=7, flags=8)
    claim = producer.try_claim(9)
    claim.commit(0, type=9, flags=10)
    assert [(r.type, r.flags, len(r)) for r in consumer.drain(9)] == [
        (255, 1, 1),
        (0, 255, 1),
        (7, 8, 9),
        (9, 10, 0),
    ]
    consumer.release()


@pytest.mark.parametrize("tags", [(256,), (-1,), (0, 256), (0, -1), (2**70,)])
def test_a_type_that_is_no_byte_is_refused(tags, producer, consumer):
    """Cut to eight bits it would be another type."""
    for push in (producer.try_push, producer.try_append):
        with pytest.raises((ValueError, OverflowError)):
            push(b"x", *tags)
    assert producer.unpublished_bytes == 0
    assert consumer.try_pop() is None


def test_an_empty_record_is_a_record(producer, consumer):
    """Nothing there and nothing in it are two different things to a protocol."""
    for _ in range(2000):  # several times around
        for payload in (b"", b"x", b""):
            assert producer.try_push(payload)
        records = consumer.drain(4)
        assert [bytes(r) for r in records] == [b"", b"x", b""]
        assert len(records[0].payload) == 0
        consumer.release()
        assert consumer.drain(4) == []
        assert consumer.try_pop() is None


@pytest.mark.parametrize(
    "length", [CAPACITY - 7, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY, 1 << 20]
)
def test_a_record_that_can_never_fit_is_an_error_at_once(length, producer, consumer):
    """Waiting for room that cannot come would hang the engine with one long request."""
    payload = b"x" * length
    uses = [
        lambda: producer.try_push(payload),
        lambda: producer.push(payload),
        lambda: producer.try_append(payload),
        lambda: producer.try_claim(length),
        lambda: producer.claim(length),
        lambda: producer.wait_until_writable(length),
        lambda: shmring.wait_any([], producers=[(producer, length)]),
    ]
    for use in uses:
        with pytest.raises(shmring.RecordTooLargeError, match=f"length={length}, max=4088") as caught:
            use()
        assert (caught.value.length, caught.value.length_max) == (length, 4088)
    assert producer.try_push(b"the ring goes on")
    assert consumer.try_pop() == b"the ring goes on"


def test_the_largest_record_fits_at_every_offset(producer, consumer):
    """The stated limit is one to rely on, wherever the ring happens to stand."""
    assert producer.payload_length_max == CAPACITY - 8
    large = bytes(range(256)) * 16
    for length in (4088, 4087, 4081):
        for _ in range(CAPACITY // 8):
            assert producer.try_push(large[:length])
            assert producer.free_bytes() == (0 if length > 4080 else 8)
            assert not producer.try_push(b"")
            assert consumer.try_pop() == large[:length]
            producer.try_push(b"")  # one step of the alignment on
            consumer.try_pop()
    assert producer.position // CAPACITY > 1000


@pytest.mark.parametrize("length", [0, 1, 8, 57, 120, 1016, 2040])
def test_full_and_empty_are_told_apart_at_every_offset(length, producer, consumer):
    """Taking one for the other overwrites what nobody has read."""
    record = (length + 15) & ~7
    fits = CAPACITY // record
    for turn in range(CAPACITY // 8 + 1):
        payload = bytes([turn % 251]) * length
        assert testing.fill(producer, payload) == fits
        assert producer.free_bytes() == CAPACITY - fits * record
        assert consumer.backlog_bytes() == fits * record
        assert take_all(consumer) == [payload] * fits
        assert producer.free_bytes() == CAPACITY
        producer.try_push(b"")
        consumer.try_pop()


def test_a_push_that_does_not_fit_changes_nothing(producer, consumer):
    """Refused means refused whole: nothing is evicted, nothing is cut, nothing overtakes."""
    first, second = b"a" * 1800, b"b" * 1800
    producer.try_push(first)
    producer.try_push(second)
    assert consumer.try_pop() == first
    # there is room for 2288 in all: 480 before the end of the data, the rest at its start
    assert not producer.try_push(b"c" * 2300)
    assert consumer.try_pop() == second
    assert producer.try_push(b"c" * 2300)
    assert consumer.try_pop() == b"c" * 2300


def test_every_triple_of_sizes_matches_a_plain_list(producer, consumer):
    """The arithmetic at the edges is where rings of this kind have lost records."""
    sizes = (0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 400, 500, 1500, 4000)
    model: list[bytes] = []

    def push(size: int, tag: int) -> None:
        payload = bytes([tag]) * size
        used = sum((len(p) + 15) & ~7 for p in model)
        fits = used + ((size + 15) & ~7) <= CAPACITY
        assert producer.try_push(payload) is fits
        if fits:
            model.append(payload)

    def pop() -> None:
        assert consumer.try_pop() == (model.pop(0) if model else None)

    for a, b, c in itertools.product(sizes, repeat=3):
        push(a, 1)
        push(b, 2)
        pop()
        push(c, 3)
        pop()
        pop()
        assert not model


# Claims


def test_a_claim_is_unseen_until_it_is_committed(producer, consumer):
    """A half-written record in a reader's hands is a wrong answer to a user."""
    claim = producer.try_claim(5)
    claim.payload[:] = b"hello"
    assert consumer.try_pop() is None
    claim.commit()
    assert consumer.try_pop() == b"hello"


def test_abort_gives_back_all_of_the_claim(producer, consumer):
    """A failed encode must not leak space, or the ring fills up over days."""
    before = producer.free_bytes()
    claim = producer.try_claim(100)
    assert producer.free_bytes() == before - 112
    claim.abort()
    assert producer.free_bytes() == before
    assert producer.position == 0
    assert consumer.try_pop() is None


@pytest.mark.parametrize("length", [0, 1, 9, 499, 500])
def test_a_commit_may_be_shorter_than_its_claim(length, producer, consumer):
    """The length is often known only when the bytes are written; the reader sees what was committed."""
    for turn in range(CAPACITY // 8):
        claim = producer.try_claim(500)
        claim.payload[:length] = bytes([turn % 256]) * length
        claim.commit(length)
        producer.try_push(b"next")
        assert take_all(consumer) == [bytes([turn % 256]) * length, b"next"]


@pytest.mark.parametrize("length", [-1, 101, 2**64 - 8, 2**70])
def test_a_commit_longer_than_its_claim_is_refused_and_the_claim_stays(length, producer, consumer):
    """It would publish bytes that belong to no record."""
    claim = producer.try_claim(100)
    with pytest.raises(shmring.RecordTooLargeError):
        claim.commit(length)
    claim.commit(3)
    assert len(consumer.try_pop()) == 3


@pytest.mark.parametrize("length", [True, 1.0, "1"])
def test_the_length_of_a_claim_is_an_int(length, producer):
    """A float that is nearly right is a record that is nearly right."""
    with pytest.raises(TypeError):
        producer.try_claim(length)
    with producer.try_claim(8) as claim, pytest.raises(TypeError):
        claim.commit(length)


def test_a_negative_claim_is_refused(producer):
    """Unsigned in C, it would be an enormous one."""
    for use in (producer.try_claim, producer.claim, producer.wait_until_writable):
        with pytest.raises(ValueError, match="length=-1"):
            use(-1)


def test_a_block_that_ends_well_commits_and_one_that_raises_aborts(producer, consumer):
    """An exception in the middle of an encode must not send half of it."""
    with producer.try_claim(3) as claim:
        claim.payload[:] = b"abc"

    def fail_half_way() -> None:
        with producer.try_claim(3) as claim:
            claim.payload[:] = b"xyz"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    with producer.try_claim(3) as claim:
        claim.payload[0] = ord("q")
        claim.commit(1)  # and nothing more at the end of the block
    with producer.try_claim(3) as claim:
        claim.abort()
    assert take_all(consumer) == [b"abc", b"q"]


def test_an_error_in_the_block_is_not_hidden_by_the_abort(producer):
    """The cause is what a developer needs, not that the claim had gone by then."""

    def fail_after(act: Callable[[], None]) -> None:
        with producer.try_claim(3):
            act()
            raise ZeroDivisionError

    for act in (producer.discard, producer.close):
        with pytest.raises(ZeroDivisionError):
            fail_after(act)


def test_only_one_claim_is_open_at_a_time(producer, consumer):
    """The second would overlap the first."""
    claim = producer.try_claim(8)
    uses = [
        lambda: producer.try_claim(8),
        lambda: producer.try_push(b"x"),
        lambda: producer.try_append(b"x"),
        producer.publish,
    ]
    for use in uses:
        with pytest.raises(shmring.ClaimError, match="claim is open"):
            use()
    claim.payload[:] = b"12345678"
    claim.commit()
    assert take_all(consumer) == [b"12345678"]


@pytest.mark.parametrize("end", ["commit", "abort", "append"])
def test_a_claim_that_was_given_back_cannot_be_used_again(end, producer):
    """Committing it twice would publish whatever is in the ring by now."""
    claim = producer.try_claim(8)
    getattr(claim, end)()
    for use in (claim.commit, claim.abort, claim.append):
        with pytest.raises(shmring.ClaimError):
            use()
    with pytest.raises(ValueError, match="released"):
        claim.payload[0] = 1


def test_a_discarded_claim_does_not_commit_the_one_that_came_after_it(producer, consumer):
    """The bytes of the second are not written yet when the first is committed by mistake."""
    stale = producer.try_claim(8)
    producer.discard()
    with pytest.raises(shmring.ClaimError):
        stale.commit()
    fresh = producer.try_claim(8)
    with pytest.raises(shmring.ClaimError):
        stale.commit()
    with pytest.raises(shmring.ClaimError):
        stale.abort()
    fresh.payload[:] = b"87654321"
    fresh.commit()
    assert take_all(consumer) == [b"87654321"]


def test_an_array_over_a_claim_does_not_keep_it_from_being_committed(producer, consumer):
    """numpy users write through an array, and arrays live until the next collection."""
    claim = producer.try_claim(16)
    array = np.frombuffer(claim.payload, np.int64)
    array[:] = (1, 2)
    claim.commit()
    assert np.frombuffer(consumer.try_pop(), np.int64).tolist() == [1, 2]


def test_no_room_for_a_claim_is_an_answer(producer):
    """The caller decides whether to wait, refuse or abort."""
    testing.fill(producer)
    assert producer.try_claim(200) is None
    assert producer.claim(200, timeout_s=0) is None


# Batches


def test_a_batch_is_seen_whole_when_it_is_published(producer, consumer):
    """A decode step of 256 requests must not arrive as a half and a half."""
    for n in range(20):
        assert producer.try_append(bytes([n]) * n)
        assert consumer.try_pop() is None
    assert producer.unpublished_bytes == sum((n + 15) & ~7 for n in range(20))
    assert producer.publish() is True
    assert producer.unpublished_bytes == 0
    assert take_all(consumer) == [bytes([n]) * n for n in range(20)]


def test_publishing_nothing_is_no_error(producer, consumer):
    """A step without output still ends with publish()."""
    assert producer.publish() is False
    assert consumer.try_pop() is None


def test_discard_gives_back_the_whole_batch(producer, consumer):
    """If the third request cannot be encoded, the first two of its batch must not go out alone."""
    producer.try_push(b"before")
    producer.try_append(b"one")
    producer.try_append(b"two")
    producer.try_claim(3)
    producer.discard()
    assert producer.unpublished_bytes == 0
    assert producer.publish() is False
    producer.try_push(b"after")
    assert take_all(consumer) == [b"before", b"after"]


def test_a_push_publishes_what_was_appended_before_it(producer, consumer):
    """Order is order: a later record never overtakes an earlier one."""
    producer.try_append(b"first")
    producer.try_push(b"second")
    assert take_all(consumer) == [b"first", b"second"]


def test_waiting_for_room_that_our_own_batch_takes_is_refused(producer, consumer):
    """The consumer cannot free what it cannot see: the wait would never end."""
    while producer.try_append(b"x" * 57):
        pass
    for use in (
        lambda: producer.push(b"x" * 57),
        lambda: producer.claim(57),
        lambda: producer.wait_until_writable(57),
        lambda: shmring.wait_any([], producers=[(producer, 57)]),
    ):
        with pytest.raises(shmring.ClaimError, match="unpublished=4032, capacity=4096"):
            use()
    assert producer.push(b"x" * 57, timeout_s=0) is False
    producer.publish()
    consumer.try_pop()
    assert producer.push(b"y" * 57)


# Reading


def test_drained_records_stay_until_they_are_released(producer, consumer):
    """Reading in place is only worth something if the place stays."""
    for n in range(5):
        producer.try_push(bytes([n]) * 500)
    records = consumer.drain(3)
    views = [r.payload for r in records]
    free = producer.free_bytes()
    assert len(consumer.drain(9)) == 2
    assert producer.free_bytes() == free
    assert [bytes(v) for v in views] == [bytes([n]) * 500 for n in range(3)]
    assert consumer.position == 0
    assert consumer.read_position == 5 * 512
    consumer.release()
    assert consumer.position == 5 * 512
    assert producer.free_bytes() == CAPACITY


def test_a_released_record_is_refused(producer, consumer):
    """Its bytes may be another request's by now."""
    producer.try_push(b"abc")
    (record,) = consumer.drain(1)
    assert record.is_released is False
    assert bytes(record) == b"abc"
    consumer.release()
    assert record.is_released is True
    for use in (lambda: record.payload, lambda: bytes(record), lambda: np.frombuffer(record, np.uint8)):
        with pytest.raises(ValueError, match="released"):
            use()
    assert len(record) == 3, "its facts stay"


def test_rewind_hands_out_again_what_was_not_released(producer, consumer):
    """A handler that failed half way starts again from the first record it did not finish."""
    for n in range(4):
        producer.try_push(bytes([n]))
    first = consumer.drain(3)
    consumer.rewind()
    assert all(r.is_released for r in first), "so that nobody keeps records of two rounds apart by luck"
    assert [bytes(r) for r in consumer.drain(9)] == [b"\0", b"\1", b"\2", b"\3"]
    consumer.release()
    consumer.rewind()
    assert consumer.drain(9) == []


def test_releasing_twice_is_an_error_and_changes_nothing(producer, consumer):
    """It would free records that nobody has read."""
    producer.try_push(b"a")
    consumer.drain(1)
    consumer.release()
    producer.try_push(b"b")
    with pytest.raises(shmring.NothingDrainedError):
        consumer.release()
    assert take_all(consumer) == [b"b"]
    with pytest.raises(shmring.NothingDrainedError):
        consumer.release()
    producer.try_push(b"c")
    assert take_all(consumer) == [b"c"]


def test_popping_while_records_are_in_hand_is_refused(producer, consumer):
    """try_pop releases, and would release those as well."""
    producer.try_push(b"a")
    producer.try_push(b"b")
    (record,) = consumer.drain(1)
    for pop in (consumer.try_pop, consumer.pop):
        with pytest.raises(shmring.ClaimError, match="not released"):
            pop()
    assert bytes(record) == b"a"
    consumer.release()
    assert consumer.try_pop() == b"b"


@pytest.mark.parametrize("count", [0, -1, True])
def test_drain_takes_a_count(count, consumer):
    """Zero would look like an empty ring for ever."""
    with pytest.raises(ValueError, match="max_records"):
        consumer.drain(count)


def test_a_handler_that_raises_loses_one_record_at_most(producer, consumer):
    """A bad request must not stop the ring, nor come back for ever."""
    sent = [bytes([n]) * 900 for n in range(10)]
    waiting = list(sent)
    seen = []
    while waiting or consumer.backlog_bytes():
        while waiting and producer.try_push(waiting[0]):
            waiting.pop(0)
        try:
            try:
                (record,) = consumer.drain(1)
                if record.payload[0] == 5:
                    raise ZeroDivisionError
                seen.append(bytes(record))
            finally:
                consumer.release()
        except ZeroDivisionError:
            pass
    assert seen == [s for s in sent if s[0] != 5]


def test_the_tail_can_be_noted_and_worked_up_to(producer, consumer):
    """Two rings are kept in causal order by draining one up to where it stood before the other."""
    producer.try_push(b"a")
    noted = consumer.snapshot_tail()
    producer.try_push(b"b")
    assert noted == producer.position - 16
    consumer.drain(1)
    assert consumer.read_position == noted


def test_backlog_counts_what_was_not_drained(producer, consumer):
    """The depth that a scheduler steers by."""
    assert consumer.backlog_bytes() == 0
    assert consumer.is_readable() is False
    producer.try_push(b"123456789")
    assert consumer.backlog_bytes() == 24
    assert consumer.is_readable() is True
    consumer.drain(1)
    assert consumer.backlog_bytes() == 0
    assert consumer.is_readable() is False


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_environment_turns_poison_on_for_every_consumer(ring, producer, monkeypatch, value, is_on):
    """To look for a use after release in a whole deployment nobody wants to change its code."""
    monkeypatch.setenv("SHMRING_POISON", value)
    with ring.consumer() as consumer:
        producer.push(b"secret")
        view = consumer.drain(1)[0].payload
        consumer.release()
        assert bytes(view) == (b"\xdb" * 6 if is_on else b"secret")


def test_poison_overwrites_what_was_released_and_nothing_else(ring, producer):
    """A use after release must show in the test run, not in production."""
    with ring.consumer(poison=True) as consumer:
        for turn in range(CAPACITY // 8 + 3):
            keep = bytes([turn % 200]) * 1000
            producer.try_push(b"a" * 1001)
            producer.try_push(keep)
            (record,) = consumer.drain(1)
            view = record.payload
            consumer.release()
            assert bytes(view) == b"\xdb" * 1001
            assert consumer.try_pop() == keep


def test_a_consumer_can_be_iterated_until_the_end(producer, consumer):
    """The plainest program: for record in consumer."""
    for n in range(5):
        producer.try_push(bytes([n]))
    producer.close()
    assert list(consumer) == [bytes([n]) for n in range(5)]


# Views and lifetimes


def test_views_outlive_the_consumer_the_ring_and_the_name(ring_name):
    """An array over unmapped memory is a crash somewhere else, later."""
    ring = shmring.create(ring_name, CAPACITY)
    producer, consumer = ring.producer(), ring.consumer()
    producer.try_push(bytes(range(80)))
    (record,) = consumer.drain(1)
    view, array = record.payload, np.frombuffer(record, np.int64)
    consumer.close()
    producer.close()
    ring.close()
    del ring, producer, consumer, record
    gc.collect()
    assert bytes(view) == bytes(range(80))
    assert array.sum() == np.frombuffer(bytes(range(80)), np.int64).sum()


def test_a_claim_outlives_the_producer_and_the_ring(ring_name):
    """Writing through an array of it goes nowhere, and does not crash."""
    ring = shmring.create(ring_name, CAPACITY)
    producer = ring.producer()
    claim = producer.try_claim(8)
    array = np.frombuffer(claim.payload, np.uint8)
    producer.close()
    ring.close()
    del ring, producer
    gc.collect()
    array[:] = 7
    with pytest.raises(shmring.RingClosedError):
        claim.commit()


def test_a_record_after_close_is_refused(producer, ring):
    """The bytes are there, but whose they are nobody knows any more."""
    producer.try_push(b"abc")
    consumer = ring.consumer()
    (record,) = consumer.drain(1)
    consumer.close()
    assert record.is_released
    with pytest.raises(ValueError, match="released"):
        bytes(record)


def test_views_are_read_only(producer, consumer):
    """A reader that scribbles in the ring changes what a successor would be handed."""
    producer.try_push(b"abcdefgh")
    (record,) = consumer.drain(1)
    assert record.payload.readonly
    with pytest.raises(TypeError):
        record.payload[0] = 1
    with pytest.raises(ValueError):
        np.frombuffer(record, np.uint8)[0] = 1
    consumer.release()


# Ends


def test_after_close_every_call_says_closed(ring):
    """A use after close is a bug to be shown, not a hang or a crash."""
    producer, consumer = ring.producer(), ring.consumer()
    producer.close()
    producer.close()
    consumer.close()
    consumer.close()
    for use in (
        lambda: producer.try_push(b""),
        lambda: producer.push(b""),
        lambda: producer.try_append(b""),
        lambda: producer.try_claim(1),
        lambda: producer.claim(1),
        lambda: producer.wait_until_writable(1),
        producer.publish,
        producer.free_bytes,
        producer.peer_state,
        producer.statistics,
        lambda: shmring.wait_any([], producers=[(producer, 1)]),
        consumer.try_pop,
        consumer.pop,
        lambda: consumer.drain(1),
        lambda: consumer.drain_wait(1),
        consumer.release,
        consumer.is_readable,
        consumer.wait_until_readable,
        consumer.backlog_bytes,
        consumer.snapshot_tail,
        consumer.peer_state,
        consumer.statistics,
        lambda: shmring.wait_any([consumer]),
    ):
        with pytest.raises(shmring.RingClosedError, match="closed"):
            use()
    producer.discard()
    consumer.rewind()
    assert not producer.is_open
    assert not consumer.is_open


def test_an_end_is_held_by_one_only(ring, producer):
    """Two producers on one ring overwrite each other."""
    with pytest.raises(shmring.RoleTakenError, match="holder_pid") as caught:
        ring.producer()
    assert caught.value.role == "producer"
    with pytest.raises(shmring.RoleTakenError):
        shmring.Producer.attach(ring.name)
    with ring.consumer(), pytest.raises(shmring.RoleTakenError) as caught:
        shmring.Consumer.attach(ring.name)
    assert caught.value.role == "consumer"
    assert producer.try_push(b"unharmed")


def test_the_consumer_gets_everything_before_the_end(producer, consumer):
    """The last tokens of a stream are as good as the first."""
    producer.try_push(b"a")
    producer.try_push(b"b")
    producer.try_append(b"never published")
    producer.close()
    assert consumer.is_readable()
    assert take_two(consumer) == [b"a", b"b"]
    for use in (consumer.try_pop, consumer.pop, lambda: consumer.drain(1), lambda: consumer.drain_wait(1)):
        with pytest.raises(shmring.EndOfRing):
            use()
    assert consumer.wait_until_readable() is True, "the end is there to be seen"
    assert isinstance(shmring.EndOfRing("x"), EOFError)


def take_two(consumer: shmring.Consumer) -> list[bytes | None]:
    return [consumer.try_pop(), consumer.try_pop()]


def test_what_was_drained_before_the_end_is_handed_out_first(producer, consumer):
    """An error in the middle of a batch must not swallow the batch."""
    producer.try_push(b"a")
    producer.close()
    assert [bytes(r) for r in consumer.drain(10)] == [b"a"]
    consumer.release()
    with pytest.raises(shmring.EndOfRing):
        consumer.drain(10)


def test_a_producer_learns_of_the_consumers_end_when_it_is_full(ring, producer):
    """Filling a ring that nobody empties must end in a sentence, not in a wait."""
    with ring.consumer():
        pass
    with pytest.raises(shmring.EndOfRing):
        testing.fill(producer)
    with pytest.raises(shmring.EndOfRing):
        producer.push(b"x" * 57)
    with pytest.raises(shmring.EndOfRing):
        producer.claim(57)
    with pytest.raises(shmring.EndOfRing):
        producer.wait_until_writable(57)
    assert shmring.wait_any([], producers=[(producer, 57)]) == [producer]


def test_an_end_dropped_without_close_counts_as_lost(ring, producer):
    """A thread that died with its consumer is a death to the other side, not a good end."""
    consumer = ring.consumer()
    assert producer.peer_state() is shmring.PeerState.ATTACHED
    del consumer
    gc.collect()
    assert producer.peer_state() is shmring.PeerState.LOST
    with pytest.raises(shmring.PeerLostError) as caught:
        testing.fill(producer)
    assert caught.value.pid != 0
    assert isinstance(caught.value, ConnectionError)


def test_the_state_of_the_peer_follows_its_life(ring, producer):
    """Health checks ask this."""
    assert producer.peer_state() is shmring.PeerState.NEVER
    consumer = ring.consumer()
    assert producer.peer_state() is shmring.PeerState.ATTACHED
    assert consumer.peer_state() is shmring.PeerState.ATTACHED
    consumer.close()
    assert producer.peer_state() is shmring.PeerState.FINISHED
    with ring.consumer() as second:
        assert producer.peer_state() is shmring.PeerState.ATTACHED
        assert second.try_pop() is None


def test_the_next_consumer_gets_what_was_not_released(ring, producer):
    """Its predecessor died in the middle of its work; the work is not done."""
    for n in range(4):
        producer.try_push(bytes([n]))
    first = ring.consumer()
    assert first.try_pop() == b"\0"
    first.drain(2)
    first.close()
    with ring.consumer() as second:
        assert take_all(second) == [b"\1", b"\2", b"\3"]


def test_the_next_producer_goes_on_where_the_last_one_published(ring, consumer):
    """What its predecessor had not published was never there."""
    first = ring.producer()
    first.try_push(b"a")
    first.try_append(b"unpublished")
    first.try_claim(40).payload[:] = b"x" * 40
    first.close()
    with ring.producer() as second:
        second.try_push(b"b")
        assert take_all(consumer) == [b"a", b"b"]


def test_an_end_that_expects_a_successor_is_not_told_of_an_end(ring, producer):
    """While a worker is restarted its rings stay as they are."""
    with ring.consumer(takeover=True) as consumer:
        producer.close()
        assert consumer.try_pop() is None
        assert not consumer.wait_until_readable(timeout_s=0)
        with ring.producer(takeover=True) as second:
            second.try_push(b"x")
            assert consumer.try_pop() == b"x"
        ring.close()
        with pytest.raises(shmring.EndOfRing):
            consumer.try_pop()


def test_nobody_will_come_once_the_name_is_gone(ring_name):
    """A wait for a peer that can no longer find the ring would be for ever."""
    ring = shmring.create(ring_name, CAPACITY)
    with ring.consumer() as consumer, ring.producer() as producer:
        consumer.close()
        producer.close()
    with ring.consumer() as consumer:
        ring.close()
        with pytest.raises(shmring.EndOfRing):
            consumer.pop()


# Damage


@pytest.mark.parametrize("length", [0, 1, 7, 25, 4097, 2**31, 2**32 - 1])
def test_a_record_length_that_cannot_be_is_an_error_with_its_position(length, ring, producer, consumer):
    """Believing it would read beyond what was written, or beyond the mapping."""
    producer.try_push(b"good")
    producer.try_push(b"0123456789")
    testing.damage(ring, 4096 + 16, length.to_bytes(4, "little"))
    assert [bytes(r) for r in consumer.drain(9)] == [b"good"]
    consumer.release()
    for _ in range(2):
        with pytest.raises(shmring.CorruptRingError) as caught:
            consumer.drain(9)
        assert (caught.value.position, caught.value.found) == (16, length)


@pytest.mark.parametrize("tail", [8, 0, 17, 24 + 4096, 2**63, 2**64 - 8])
def test_a_tail_that_cannot_be_is_an_error_everywhere(tail, ring, producer, consumer):
    """The consumer has released 24 bytes: a tail before that, unaligned or too far on is a lie."""
    producer.try_push(b"0123456789")
    assert consumer.try_pop() == b"0123456789"
    testing.damage(ring, 0x100, tail.to_bytes(8, "little"))
    uses = (
        consumer.try_pop,
        lambda: consumer.drain(1),
        consumer.is_readable,
        consumer.backlog_bytes,
        consumer.snapshot_tail,
        consumer.pop,
        consumer.wait_until_readable,
        lambda: shmring.wait_any([consumer]),
    )
    for use in uses:
        if tail == 24 + 4096:
            continue  # exactly full: it could be
        with pytest.raises(shmring.CorruptRingError) as caught:
            use()
        assert (caught.value.position, caught.value.found) == (24, tail)


@pytest.mark.parametrize("head", [8, 3, 1 << 20, 2**63, 2**64 - 8])
def test_a_head_that_cannot_be_is_an_error_everywhere(head, ring, producer, consumer):
    """The producer would write over what is being read."""
    for _ in range(3):
        producer.try_push(b"0123456789")
    consumer.try_pop()
    assert producer.free_bytes() == CAPACITY - 48
    testing.damage(ring, 0x280, head.to_bytes(8, "little"))
    uses = (
        lambda: testing.fill(producer),
        producer.free_bytes,
        lambda: producer.push(b"x" * 4000),
        lambda: producer.wait_until_writable(4088),
        lambda: shmring.wait_any([], producers=[(producer, 4088)]),
    )
    for use in uses:
        with pytest.raises(shmring.CorruptRingError) as caught:
            use()
        assert caught.value.found == head


# Positions near the ends of their range


@pytest.mark.parametrize("start", [2**32 - 8, 2**32, 2**63 - 8, 2**64 - 8, 2**64 - 4096, 2**64 - 48])
def test_positions_may_pass_every_power_of_two(start, ring_name):
    """A server that runs for years must not fail on the day its counter wraps."""
    with testing.ring_at(ring_name, CAPACITY, start) as ring, ring.producer() as producer:
        with ring.consumer() as consumer:
            sent: list[bytes] = []
            for n in range(400):
                payload = bytes([n % 256]) * (n % 40)
                assert producer.try_push(payload)
                sent.append(payload)
                assert consumer.backlog_bytes() == sum((len(p) + 15) & ~7 for p in sent)
                if len(sent) > 3:
                    assert consumer.try_pop() == sent.pop(0)
            assert take_all(consumer) == sent
            assert testing.fill(producer) == CAPACITY // 72
            assert ring.statistics().used_bytes == CAPACITY // 72 * 72
        with ring.consumer() as consumer:
            assert len(take_all(consumer)) == CAPACITY // 72


@pytest.mark.parametrize("start", [-8, 4, 2**64])
def test_a_start_position_is_one_that_could_be(start, ring_name):
    """The test tool refuses what would make a ring that cannot be."""
    with pytest.raises(ValueError, match="start_position"):
        testing.ring_at(ring_name, CAPACITY, start)


def test_closing_takes_the_payload_of_an_open_claim_away(ring_name):
    """Its bytes are the next producer's: a late write would change that one's record."""
    with shmring.create(ring_name, 4096) as ring:
        first = ring.producer()
        claim = first.claim(8)
        first.close()
        with ring.producer() as second, ring.consumer(takeover=True) as consumer:
            second.push(b"AAAAAAAA")
            with pytest.raises(ValueError, match="released"):
                claim.payload[:] = b"ZZZZZZZZ"
            assert consumer.pop(5) == b"AAAAAAAA"


def test_a_ring_is_attached_by_name_and_gives_both_ends(ring_name):
    """Whoever knows the name only would have to know which end to ask for first."""
    with shmring.create(ring_name, CAPACITY), shmring.attach(ring_name) as attached:
        assert (attached.name, attached.capacity_bytes) == (ring_name, CAPACITY)
        with attached.producer() as producer, attached.consumer() as consumer:
            producer.push(b"through")
            attached.close()  # the ends go on
            assert consumer.pop(5) == b"through"


def test_an_attached_ring_stays_the_one_that_it_was_attached_to(ring_name):
    """Two rings of one name in turn: half of the processes would talk to nobody, without a word."""
    old = shmring.create(ring_name, CAPACITY)
    with shmring.attach(ring_name) as attached, old.producer() as producer:
        assert not attached.is_retired
        old.close()
        with shmring.create(ring_name, 2 * CAPACITY) as new:
            assert attached.is_retired
            assert producer.is_retired
            assert attached.capacity_bytes == CAPACITY
            assert not new.is_retired
            with attached.consumer() as consumer:
                assert consumer.is_retired
                producer.push(b"old")
                assert consumer.pop(5) == b"old"


def test_attaching_to_what_is_no_ring_is_refused(ring_name):
    """A blob has no ends, and its bytes are not positions."""
    blob = shmring.publish_blob(ring_name, b"abc")
    try:
        with pytest.raises(shmring.LayoutMismatchError, match="no ring"):
            shmring.attach(ring_name)
        with pytest.raises(shmring.SegmentNotFoundError):
            shmring.attach(f"{ring_name}-other")
    finally:
        blob.close()
