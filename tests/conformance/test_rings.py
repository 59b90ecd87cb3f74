"""What the two ends of a ring promise, however they were come by.

Whoever makes a ring, attaches to it, or takes its ends by name gets the same ends.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from ring_ends import take_all

import shmring
from shmring import Column, Schema, Shape, testing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CAPACITY = 4096


@contextlib.contextmanager
def _created(name: str) -> Iterator[tuple[shmring.Producer, shmring.Consumer]]:
    """Both from the ring that one process made."""
    with shmring.create(name, CAPACITY) as ring:
        yield ring.producer(), ring.consumer()


@contextlib.contextmanager
def _attached(name: str) -> Iterator[tuple[shmring.Producer, shmring.Consumer]]:
    """Both from somebody else's ring, known by its name."""
    with shmring.create(name, CAPACITY), shmring.attach(name) as ring:
        yield ring.producer(), ring.consumer()


@contextlib.contextmanager
def _by_name(name: str) -> Iterator[tuple[shmring.Producer, shmring.Consumer]]:
    """Each by the ring's name alone."""
    with shmring.create(name, CAPACITY):
        yield shmring.Producer.attach(name), shmring.Consumer.attach(name)


@contextlib.contextmanager
def _mixed(name: str) -> Iterator[tuple[shmring.Producer, shmring.Consumer]]:
    """The maker fills it; who empties it came by the name."""
    with shmring.create(name, CAPACITY) as ring:
        yield ring.producer(), shmring.Consumer.attach(name)


@contextlib.contextmanager
def _free_standing(name: str) -> Iterator[tuple[shmring.Producer, shmring.Consumer]]:
    """The ring was closed and its name is gone; the ends go on."""
    with shmring.create(name, CAPACITY) as ring:
        ends = ring.producer(), ring.consumer()
    yield ends


@contextlib.contextmanager
def _over_a_leftover(name: str) -> Iterator[tuple[shmring.Producer, shmring.Consumer]]:
    """The name was that of a ring whose owner died with records in it."""
    dead = shmring.create(name, 2 * CAPACITY)
    with dead.producer() as producer:
        producer.try_push(b"of another time")
    dead._segment.mapping.handle.close()  # what the kernel does to a killed process
    with shmring.create(name, CAPACITY) as ring:
        yield ring.producer(), ring.consumer()


def take_two(consumer: shmring.Consumer) -> list[bytes | None]:
    return [consumer.try_pop(), consumer.try_pop()]


FACTORIES = {
    "create": _created,
    "attach": _attached,
    "by name": _by_name,
    "mixed": _mixed,
    "free-standing": _free_standing,
    "over a leftover": _over_a_leftover,
}


@pytest.fixture(params=FACTORIES)
def ends(ring_name, request):
    with FACTORIES[request.param](ring_name) as (producer, consumer), producer, consumer:
        yield producer, consumer


@pytest.fixture
def producer(ends):
    return ends[0]


@pytest.fixture
def consumer(ends):
    return ends[1]


STEP = Schema(
    "step",
    7,
    [
        Column("ids", np.uint64),
        Column("counts", np.uint32),
        Column("tokens", np.int32, Shape.RAGGED, "counts"),
        Column("codes", np.uint8, is_optional=True),
    ],
)


def test_columns_and_plain_records_share_a_ring(producer, consumer):
    """A frame is a record whose payload says what is in it: either way of writing leaves the other alone."""
    ids, counts = np.array([5, 6], np.uint64), np.array([2, 1], np.uint32)
    assert producer.try_push(b"plain", 1)
    assert STEP.push(producer, 2, ids, counts, np.array([1, 2, 3], np.int32), None)
    assert producer.try_push(b"plain again", 1)
    first, frame, last = consumer.drain(9)
    assert (bytes(first), bytes(last)) == (b"plain", b"plain again")
    read = STEP.read(frame)
    assert {name: read[name].tolist() for name in ("ids", "counts", "tokens")} == {
        "ids": [5, 6],
        "counts": [2, 1],
        "tokens": [1, 2, 3],
    }
    assert "codes" not in read
    with pytest.raises(shmring.CorruptFrameError):
        STEP.read(first)
    consumer.release()


def test_an_end_tells_of_its_peer(producer, consumer):
    """Attached, and then finished: a look at it that needs no record."""
    assert producer.peer_state() is shmring.PeerState.ATTACHED
    assert consumer.peer_state() is shmring.PeerState.ATTACHED
    producer.close()
    assert consumer.peer_state() is shmring.PeerState.FINISHED


def test_each_role_is_held_by_one_only(ring_name, producer, consumer):
    """Two producers overwrite each other, whatever ways they came by."""
    held = [producer.peer_state(), consumer.peer_state()]
    for attach in (shmring.Producer.attach, shmring.Consumer.attach):
        with pytest.raises((shmring.RoleTakenError, shmring.SegmentNotFoundError)):
            attach(ring_name)
    assert [producer.peer_state(), consumer.peer_state()] == held
    assert producer.try_push(b"unharmed")
    assert consumer.try_pop() == b"unharmed"


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


def test_a_consumer_can_be_iterated_until_the_end(producer, consumer):
    """The plainest program: for record in consumer."""
    for n in range(5):
        producer.try_push(bytes([n]))
    producer.close()
    assert list(consumer) == [bytes([n]) for n in range(5)]


# Views and lifetimes


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


def test_what_was_drained_before_the_end_is_handed_out_first(producer, consumer):
    """An error in the middle of a batch must not swallow the batch."""
    producer.try_push(b"a")
    producer.close()
    assert [bytes(r) for r in consumer.drain(10)] == [b"a"]
    consumer.release()
    with pytest.raises(shmring.EndOfRing):
        consumer.drain(10)
