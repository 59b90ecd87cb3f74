"""Frames: what goes in as columns comes out as the same columns, or not at all."""

from __future__ import annotations

import ctypes
import struct
import sys

import numpy as np
import pytest

import shmring
from shmring import Column, Schema, Shape

BATCH = Schema(
    "batch",
    7,
    [
        Column("ids", np.uint64),
        Column("counts", np.uint32),
        Column("tokens", np.int32, Shape.RAGGED, "counts"),
        Column("scores", np.float32, Shape.RAGGED, "counts", is_optional=True),
        Column("blob", np.uint8, Shape.FREE, is_optional=True),
    ],
)

PLAIN = Schema("plain", 8, [Column("a", np.uint64)])


@pytest.fixture
def ends(ring_name):
    with (
        shmring.create(ring_name, 1 << 16) as ring,
        ring.producer() as producer,
        ring.consumer() as consumer,
    ):
        yield producer, consumer


def columns(rows: int = 3) -> list[np.ndarray | None]:
    counts = np.arange(rows, dtype=np.uint32)
    total = int(counts.sum())
    return [
        np.arange(rows, dtype=np.uint64) + 2**63,
        counts,
        np.arange(total, dtype=np.int32) - 1,
        np.linspace(0, 1, total, dtype=np.float32),
        np.frombuffer(b"odd", np.uint8),
    ]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 100])
def test_columns_come_out_as_they_went_in(rows, ends):
    """A token that moves to the next request is another user's text."""
    producer, consumer = ends
    sent = columns(rows)
    for _ in range(30):
        assert BATCH.push(producer, rows, *sent, flags=3)
        (record,) = consumer.drain(1)
        frame = BATCH.read(record)
        assert (record.type, record.flags, frame.rows) == (7, 3, rows)
        for column, was, got in zip(BATCH.columns, sent, frame.columns(), strict=True):
            assert got.dtype == column.dtype
            assert got.tolist() == was.tolist()
            assert not got.flags.writeable or got.size == 0
        consumer.release()


def test_an_optional_column_may_be_absent(ends):
    """The plain decode step does not pay for what nobody asked for."""
    producer, consumer = ends
    ids, counts, tokens, _, _ = columns()
    assert BATCH.push(producer, 3, ids, counts, tokens, None, None)
    frame = BATCH.read(consumer.drain(1)[0])
    assert "tokens" in frame
    assert "scores" not in frame
    assert frame["scores"].tolist() == []
    assert frame["scores"].dtype == np.float32


def test_a_column_that_is_there_and_empty_is_not_absent(ends):
    """No candidates and no wish for candidates are two answers."""
    producer, consumer = ends
    ids, counts, tokens, _, _ = columns()
    assert BATCH.push(producer, 3, ids, counts, tokens, None, np.empty(0, np.uint8))
    frame = BATCH.read(consumer.drain(1)[0])
    assert "blob" in frame
    assert frame["blob"].size == 0


def test_a_column_that_the_schema_does_not_have_is_a_key_error(ends):
    """As with every mapping; and asking whether it is there is no error at all."""
    producer, consumer = ends
    BATCH.push(producer, 3, *columns())
    frame = BATCH.read(consumer.drain(1)[0])
    assert "nonsense" not in frame
    with pytest.raises(KeyError):
        frame["nonsense"]


def change(index: int, value: object) -> list[object]:
    changed: list[object] = list(columns())
    changed[index] = value
    return changed


@pytest.mark.parametrize(
    ("index", "value", "text"),
    [
        (0, None, "missing"),
        (1, None, "missing"),
        (0, np.arange(4, dtype=np.uint64), "one item a row: column=ids, items=4, rows=3"),
        (0, np.arange(2, dtype=np.uint64), "one item a row"),
        (0, np.arange(3, dtype=np.int64), "another dtype .*column=ids, dtype=int64, wanted=uint64"),
        (0, np.arange(6, dtype=np.uint32), "another dtype"),
        (0, np.arange(3, dtype=np.float64), "another dtype"),
        (0, np.arange(3, dtype=">u8"), "another dtype .* dtype=>u8"),
        (0, bytes(24), "another dtype .* format=B, wanted=uint64"),
        (0, np.arange(6, dtype=np.uint64)[::2], "C-contiguous"),
        (0, [1, 2, 3], "column is no buffer: pass a numpy array: column=ids$"),
        (0, "abc", "no buffer"),
        (1, np.zeros(3, np.uint32), "as many items as its counts say"),
        (1, np.array([2**32 - 1, 1, 3], np.uint32), "as many items as its counts say"),
        (2, np.arange(2, dtype=np.int32), "as many items as its counts say"),
        (
            2,
            np.arange(4, dtype=np.int32),
            "as many items as its counts say: column=tokens, items=4, counts_sum=3",
        ),
        (3, np.arange(2, dtype=np.float32), "as many items as its counts say"),
        (4, np.arange(2, dtype=np.int8), "another dtype"),
        (4, np.array([True]), "another dtype"),
    ],
)
def test_a_column_that_does_not_fit_is_named_and_nothing_is_sent(index, value, text, ends):
    """One wrong length shifts every request behind it; the frame is refused whole."""
    producer, consumer = ends
    with pytest.raises(shmring.ColumnError, match=text) as caught:
        BATCH.push(producer, 3, *change(index, value))
    assert caught.value.column in {BATCH.names[index], "tokens"}
    assert producer.unpublished_bytes == 0
    assert consumer.try_pop() is None
    assert BATCH.push(producer, 3, *columns())


@pytest.mark.parametrize("rows", [-1, 2**32, 2**70, 2.0, None])
def test_rows_are_a_count(rows, ends):
    """It is a u32 on the wire."""
    with pytest.raises((ValueError, TypeError, OverflowError)):
        BATCH.push(ends[0], rows, *columns())


@pytest.mark.parametrize("count", [0, 4, 6])
def test_the_number_of_columns_is_the_schemas(count, ends):
    """A forgotten None would shift the optional ones."""
    with pytest.raises(ValueError, match=f"columns={count}, schema_columns=5"):
        BATCH.push(ends[0], 3, *(columns() * 2)[:count])


@pytest.mark.parametrize("flags", [-1, 256])
def test_flags_are_a_byte(flags, ends):
    """Cut to eight bits they would be other flags."""
    with pytest.raises(ValueError, match="flags is one byte"):
        BATCH.push(ends[0], 3, *columns(), flags=flags)


def test_a_frame_that_can_never_fit_is_an_error_and_one_that_does_not_now_is_an_answer(ends):
    """The caller waits for the second and gives up on the first."""
    producer, _ = ends
    big = np.zeros(1 << 16, np.uint8)
    ids, counts, tokens, scores, _ = columns()
    with pytest.raises(shmring.RecordTooLargeError):
        BATCH.push(producer, 3, ids, counts, tokens, scores, big)
    half = big[: 1 << 15]
    assert BATCH.push(producer, 3, ids, counts, tokens, scores, half) is True
    assert BATCH.push(producer, 3, ids, counts, tokens, scores, half) is False


def test_the_payload_length_is_the_one_that_is_written(ends):
    """Room is waited for by this number; one byte less would be a wait without end."""
    producer, consumer = ends
    for rows in (0, 1, 3, 8):
        for sent in (columns(rows), [*columns(rows)[:3], None, None]):
            BATCH.push(producer, rows, *sent)
            assert len(consumer.drain(1)[0]) == BATCH.payload_length(*sent)
            consumer.release()


def test_frames_join_a_batch(ends):
    """A step's frames become visible together."""
    producer, consumer = ends
    BATCH.push(producer, 3, *columns(), publish=False)
    BATCH.push(producer, 0, *columns(0), publish=False)
    assert consumer.drain(9) == []
    producer.publish()
    assert [BATCH.read(r).rows for r in consumer.drain(9)] == [3, 0]


# What comes from the ring is not believed


def payload_of(ends: tuple, rows: int = 3) -> bytearray:
    producer, consumer = ends
    BATCH.push(producer, rows, *columns(rows))
    return bytearray(consumer.try_pop())


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 55, 56, 57, 100])
def test_a_frame_cut_short_is_refused(cut, ends):
    """Reading the rest would be reading the next record."""
    with pytest.raises(shmring.CorruptFrameError):
        BATCH.read(bytes(payload_of(ends)[:cut]))


def test_a_frame_with_bytes_to_spare_is_refused(ends):
    """Whoever wrote it had another idea of the columns."""
    with pytest.raises(shmring.CorruptFrameError, match="does not add up"):
        BATCH.read(bytes(payload_of(ends)) + bytes(8))


@pytest.mark.parametrize(
    ("offset", "value", "text"),
    [
        (0, struct.pack("<H", 2), "another version"),
        (2, struct.pack("<H", 4), "another number of columns"),
        (2, struct.pack("<H", 65535), "another number of columns"),
        (8, struct.pack("<Q", 1), "another schema"),
        (16, struct.pack("<II", 64, 24), "does not add up"),
        (16, struct.pack("<II", 56, 2**32 - 1), "does not add up"),
        (16, struct.pack("<II", 2**32 - 8, 24), "does not add up"),
        (16, struct.pack("<II", 0, 24), "does not add up"),
        (24, struct.pack("<II", 56, 12), "does not add up"),
        (48, struct.pack("<II", 0, 0), "does not add up"),
    ],
)
def test_a_directory_that_does_not_add_up_is_refused(offset, value, text, ends):
    """Columns that overlap or point outside would read another request's bytes, or crash."""
    payload = payload_of(ends)
    payload[offset : offset + len(value)] = value
    with pytest.raises(shmring.CorruptFrameError, match=text):
        BATCH.read(bytes(payload))


@pytest.mark.parametrize(
    ("offset", "value", "column"),
    [
        (4, struct.pack("<I", 2), "ids"),
        (4, struct.pack("<I", 2**32 - 1), "ids"),
        (80, struct.pack("<I", 7), "tokens"),
    ],
)
def test_lengths_that_disagree_are_refused_with_the_column(offset, value, column, ends):
    """Rows and counts are checked on the way out as on the way in."""
    payload = payload_of(ends)
    payload[offset : offset + len(value)] = value
    with pytest.raises(shmring.ColumnError) as caught:
        BATCH.read(bytes(payload))
    assert caught.value.column == column


def test_any_single_byte_changed_is_refused_or_read_within_bounds(ends):
    """Damage gives an error or wrong numbers, never a crash and never another size."""
    payload = payload_of(ends, 5)
    for at in range(len(payload)):
        for value in (0, 1, 0x7F, 0xFF, payload[at] ^ 0x80):
            changed = bytearray(payload)
            changed[at] = value
            try:
                frame = BATCH.read(bytes(changed))
            except (shmring.CorruptFrameError, shmring.ColumnError):
                continue
            assert frame.rows == 5
            *sizes, free = [c.size for c in frame.columns()]
            assert sizes == [5, 5, 10, 10]
            assert free <= 8, "whatever its length says, it stays inside its padding"


def test_a_reader_with_another_schema_is_told_so(ends):
    """After half an upgrade, shifted columns would be text that nobody wrote."""
    producer, consumer = ends
    BATCH.push(producer, 3, *columns())
    other = Schema("batch", 7, [Column(c.name, c.dtype) for c in BATCH.columns])
    (record,) = consumer.drain(1)
    with pytest.raises(shmring.CorruptFrameError, match="another schema"):
        other.read(record)


def test_a_released_frame_is_refused_and_a_view_taken_before_stays_mapped(ends):
    """Its bytes may be the next step's by now."""
    producer, consumer = ends
    BATCH.push(producer, 3, *columns())
    frame = BATCH.read(consumer.drain(1)[0])
    ids = frame["ids"]
    consumer.release()
    with pytest.raises(ValueError, match="released"):
        frame["ids"]
    assert ids.sum() >= 0


# Schemas


def test_the_fingerprint_covers_whatever_a_reader_relies_on():
    """And nothing else: a name of the schema may change."""
    base = [Column("a", np.int32), Column("n", np.uint32), Column("v", np.int32, Shape.RAGGED, "n")]
    variants = [
        [Column("b", np.int32), *base[1:]],
        [Column("a", np.uint32), *base[1:]],
        [Column("a", np.int32, is_optional=True), *base[1:]],
        [Column("a", np.int32, Shape.FREE), *base[1:]],
        [base[1], base[0], base[2]],
        base[:2],
    ]
    prints = [Schema("s", 1, v).fingerprint for v in [base, *variants]]
    assert len(set(prints)) == len(prints)
    assert Schema("other", 9, base).fingerprint == prints[0]
    assert Schema("s", 1, [Column("a", "<i4"), *base[1:]]).fingerprint == prints[0]


@pytest.mark.parametrize(
    "dtype",
    [
        object,
        "U5",
        "S5",
        np.complex64,
        "M8[s]",
        np.longdouble,
        np.dtype("V8"),
        np.dtype((np.int32, 3)),
        np.dtype([("id", "<u8"), ("what", object)]),
        np.dtype([("pair", [("what", object)])]),
    ],
)
def test_a_dtype_that_has_no_fixed_bytes_is_refused_at_once(dtype):
    """Not at the first push, hours later."""
    with pytest.raises(ValueError, match="dtype cannot be a column"):
        Schema("s", 1, [Column("a", dtype)])


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64, np.float16, np.float64, np.bool_, ">i4"])
def test_a_plain_dtype_goes_through(dtype, ends):
    """Big-endian ones are stored little-endian, and said to be so."""
    producer, consumer = ends
    schema = Schema("s", 1, [Column("a", dtype)])
    values = np.array([0, 1, 1], schema.dtypes[0])
    assert schema.push(producer, 3, values)
    got = schema.read(consumer.drain(1)[0])["a"]
    assert got.tolist() == values.tolist()
    assert got.dtype == np.dtype(dtype).newbyteorder("<")


def test_structures_are_told_apart_by_their_fields(ends):
    """Two of one size would swap their fields without a word."""
    producer, consumer = ends
    point = np.dtype([("id", "<u4"), ("score", "<f4")])
    schema = Schema("s", 1, [Column("a", point)])
    values = np.array([(1, 0.5), (2, 1.5)], point)
    assert schema.push(producer, 2, values)
    assert schema.read(consumer.drain(1)[0])["a"].tolist() == values.tolist()
    consumer.release()
    for same in (schema.dtypes[0], point.newbyteorder("="), np.dtype(point, align=True)):
        assert schema.push(producer, 2, values.astype(same))
    for other in (
        [("score", "<f4"), ("id", "<u4")],
        [("id", "<i4"), ("score", "<f4")],
        [("x", "<u8")],
        [("id", ">u4"), ("score", "<f4")],
    ):
        with pytest.raises(shmring.ColumnError, match="another dtype"):
            schema.push(producer, 2, np.zeros(2, other))


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ([Column("a", "u4"), Column("a", "u4")], "repeat"),
        ([Column("v", "i4", Shape.RAGGED, "n"), Column("n", "u4")], "counts come before"),
        ([Column("v", "i4", Shape.RAGGED)], "counts come before"),
        ([Column("n", "i4"), Column("v", "i4", Shape.RAGGED, "n")], "counts are uint32"),
        ([Column("n", "u8"), Column("v", "i4", Shape.RAGGED, "n")], "counts are uint32"),
        ([Column("n", "u4", Shape.FREE), Column("v", "i4", Shape.RAGGED, "n")], "counts are uint32"),
        (
            [
                Column("n", "u4"),
                Column("m", "i4", Shape.RAGGED, "n"),
                Column("v", "i4", Shape.RAGGED, "m"),
            ],
            "counts are uint32",
        ),
        ([Column(f"c{i}", "u4") for i in range(65)], "too many columns"),
        ([Column("a", None)], "no dtype: schema=s, column=a"),
        ([Column("a", "u1", "ragged")], "shape is none: schema=s, column=a, shape='ragged'"),
        ([Column("a", "u1", 3)], "shape is none"),
    ],
)
def test_a_schema_that_cannot_work_is_refused_when_it_is_made(columns, text):
    """At import, where its author sees it."""
    with pytest.raises(ValueError, match=text):
        Schema("s", 1, columns)


def test_columns_are_columns():
    with pytest.raises(TypeError, match="columns are of type Column: schema=s, type=tuple"):
        Schema("s", 1, [("a", "u1")])


NESTED = Schema(
    "nested",
    8,
    [
        Column("ids", np.uint64),
        Column("counts", np.uint32, is_optional=True),
        Column("lengths", np.uint32, Shape.RAGGED, "counts", is_optional=True),
        Column("values", np.float32, Shape.RAGGED, "lengths", is_optional=True),
    ],
)


def nested(counts: list[int], lengths: list[int], values: int) -> list[np.ndarray]:
    return [
        np.arange(len(counts), dtype=np.uint64),
        np.array(counts, np.uint32),
        np.array(lengths, np.uint32),
        np.arange(values, dtype=np.float32),
    ]


@pytest.mark.parametrize(
    ("counts", "lengths", "values"), [([], [], 0), ([0, 0], [], 0), ([2, 0, 1], [3, 0, 4], 7)]
)
def test_rows_of_rows_come_out_as_they_went_in(counts, lengths, values, ends):
    """A row of positions, each with several values: none of them may move to the next."""
    producer, consumer = ends
    sent = nested(counts, lengths, values)
    assert NESTED.push(producer, len(counts), *sent)
    frame = NESTED.read(consumer.drain(1)[0])
    assert [column.tolist() for column in frame.columns()] == [column.tolist() for column in sent]


@pytest.mark.parametrize(
    ("counts", "lengths", "values", "column"),
    [
        ([2, 1], [1, 1], 2, "lengths"),
        ([2, 0], [1, 1, 1], 3, "lengths"),
        ([2, 1], [1, 1, 1], 2, "values"),
        ([2, 1], [1, 1, 1], 4, "values"),
        ([1], [2**32 - 1], 1, "values"),
    ],
)
def test_rows_of_rows_have_exactly_the_lengths_they_say(counts, lengths, values, column, ends):
    """One too many or too few shifts everything behind it, to the end of the column."""
    producer, consumer = ends
    with pytest.raises(shmring.ColumnError, match="as many items") as refused:
        NESTED.push(producer, len(counts), *nested(counts, lengths, values))
    assert refused.value.column == column
    assert consumer.drain(1) == []


def test_rows_of_rows_need_each_level_of_counts(ends):
    """Values without the lengths that part them are nobody's."""
    producer, _ = ends
    ids, counts, _, values = nested([1], [2], 2)
    with pytest.raises(shmring.ColumnError, match="its counts are not"):
        NESTED.push(producer, 1, ids, counts, None, values)
    assert NESTED.push(producer, 1, ids, None, None, None)


@pytest.mark.parametrize("record_type", [-1, 256])
def test_the_record_type_is_a_byte(record_type):
    """It travels in the record's header."""
    with pytest.raises(ValueError, match="record_type"):
        Schema("s", record_type, [])


def test_a_schema_without_columns_carries_rows_alone(ends):
    """Odd, and no reason to fail."""
    producer, consumer = ends
    schema = Schema("s", 1, [])
    assert schema.push(producer, 5)
    assert schema.read(consumer.drain(1)[0]).rows == 5


def test_sixty_four_columns_are_allowed(ends):
    """The stated limit is one to rely on."""
    producer, consumer = ends
    schema = Schema("s", 1, [Column(f"c{i}", "u4") for i in range(64)])
    assert schema.push(producer, 1, *(np.array([i], "u4") for i in range(64)))
    frame = schema.read(consumer.drain(1)[0])
    assert [int(c[0]) for c in frame.columns()] == list(range(64))


@pytest.mark.parametrize("flags", [256, -1, "1", 1 << 80])
def test_bad_flags_are_refused_before_another_producer_is_asked(flags):
    """What wraps a producer sees no call, and the error is that of the flags."""
    asked = []

    class Wrapper:
        def push_frame(self, *arguments):
            asked.append(arguments)

    with pytest.raises((ValueError, TypeError, OverflowError)):
        PLAIN.push(Wrapper(), 1, np.zeros(1, np.uint64), flags=flags)
    assert asked == []


@pytest.mark.parametrize("waiting", [{}, {"timeout_s": 1}])
def test_a_push_to_what_is_no_producer_keeps_no_column(waiting):
    """A column that stays referenced is memory that never comes back."""
    column = np.zeros(1, np.uint64)
    before = sys.getrefcount(column)
    for _ in range(5):
        with pytest.raises(AttributeError):
            PLAIN.push(None, 1, column, **waiting)
    assert sys.getrefcount(column) == before


def test_rows_may_be_any_integer(ends):
    """A sum of numpy's is one."""
    producer, _ = ends
    assert PLAIN.push(producer, np.int64(2), np.zeros(2, np.uint64))


@pytest.mark.parametrize("rows", [-1, np.int32(-1), 1 << 32, 1 << 70, 2.0, "2", None])
def test_bad_rows_are_named(rows, ends):
    producer, _ = ends
    with pytest.raises((ValueError, TypeError), match="rows"):
        PLAIN.push(producer, rows, np.zeros(2, np.uint64))
    assert producer.free_bytes() == producer.capacity_bytes


def test_an_array_of_times_is_told_its_dtype(ends):
    """It is one block of memory, and numpy has no buffer format for it."""
    producer, _ = ends
    with pytest.raises(shmring.ColumnError, match=r"another dtype.*datetime64"):
        PLAIN.push(producer, 1, np.zeros(1, "M8[s]"))


def test_a_frame_that_no_ring_can_hold_is_told_its_length(ends):
    """Five GiB in one column, which nobody looks at: there is no such memory."""
    producer, _ = ends
    schema = Schema("s", 1, [Column("a", np.uint8, Shape.FREE)])
    column = (ctypes.c_uint8 * (5 << 30)).from_address(ctypes.addressof(ctypes.c_uint64(0)))
    with pytest.raises(shmring.RecordTooLargeError) as caught:
        schema.push(producer, 0, column, timeout_s=1)
    assert caught.value.length == schema.payload_length(column)
