"""The bytes that two processes share are where the documents, the C and the Python say."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import numpy as np
import pytest

import shmring
from shmring import columns, errors, layout, producer, statistics, waiter
from shmring._native import ffi, lib

ROOT = Path(__file__).parents[2]
LAYOUT_H = ROOT / "native" / "include" / "shmring" / "layout.h"

OFFSETS = {
    "magic": 0x000,
    "layout_version": 0x008,
    "header_length": 0x00C,
    "kind": 0x010,
    "owner_pid": 0x014,
    "capacity": 0x018,
    "segment_id": 0x020,
    "created_ns": 0x028,
    "payload_length": 0x030,
    "ready": 0x080,
    "retired": 0x084,
    "tail": 0x100,
    "producer": 0x180,
    "producer_statistics": 0x200,
    "head": 0x280,
    "consumer": 0x300,
    "consumer_statistics": 0x380,
    "producer_parked": 0x400,
    "consumer_parked": 0x480,
}


def segment_of(ring_name: str) -> bytes:
    return Path(f"/dev/shm/shmring.{ring_name}").read_bytes()


@pytest.mark.parametrize("name", dir(lib))
def test_every_name_of_the_helper_can_be_touched(name):
    """cffi checks a declaration against the compiler on first use, which might be in production."""
    assert getattr(lib, name) is not None


@pytest.mark.parametrize(("field", "offset"), OFFSETS.items())
def test_a_header_field_lies_where_it_always_lay(field, offset):
    """A process of last month's build is attached to the same segment."""
    assert ffi.offsetof("struct shr_header", field) == offset


def test_the_fields_of_an_end_lie_where_they_always_lay():
    """Operators' tools read them without asking the processes."""
    at = {f: ffi.offsetof("struct shr_end_state", f) for f in ("state", "generation", "pid", "attached_ns")}
    assert at == {"state": 0, "generation": 4, "pid": 8, "attached_ns": 16}
    assert ffi.offsetof("struct shr_end_statistics", "records") == 0
    assert ffi.offsetof("struct shr_end_statistics", "bytes") == 8


def test_a_record_header_is_eight_bytes():
    """The consumer walks from record to record by it."""
    at = {f: ffi.offsetof("struct shr_record_header", f) for f in ("length", "type", "flags", "reserved")}
    assert at == {"length": 0, "type": 4, "flags": 5, "reserved": 6}
    assert ffi.sizeof("struct shr_record_header") == lib.SHR_RECORD_HEADER_LENGTH == 8


def test_words_of_different_writers_never_share_a_pair_of_lines():
    """Two processors would pull one line back and forth, and the ring would run at a tenth."""
    starts = [offset for name, offset in OFFSETS.items() if offset >= 0x080 and name != "retired"]
    assert all(offset % lib.SHR_LINE_PAIR == 0 for offset in starts)
    assert all(b - a >= lib.SHR_LINE_PAIR for a, b in itertools.pairwise(starts))


def test_the_table_in_the_header_file_says_the_same():
    """It is what people read first, and what they write other readers from."""
    table = LAYOUT_H.read_text().split("*/")[0]
    rows = dict(re.findall(r"^ \*   (0x[0-9a-f]+)\S*\s+\w+\s+(.+)$", table, re.MULTILINE))
    assert {int(k, 16) for k in rows} == {
        *(o for n, o in OFFSETS.items() if o % 0x80 == 0 and n != "retired"),
        0x500,
        0x1000,
    }
    assert rows["0x100"].startswith("tail")
    assert rows["0x280"].startswith("head")
    assert rows["0x400"].startswith("producer_parked")
    assert rows["0x480"].startswith("consumer_parked")


@pytest.mark.parametrize(("prefix", "python"), [("SHR_ROLE_", layout.Role), ("SHR_KIND_", layout.Kind)])
def test_an_enum_of_python_is_the_one_of_c(prefix, python):
    """The wrong byte locked is a role that two processes hold."""
    of_c = {name.removeprefix(prefix): getattr(lib, name) for name in dir(lib) if name.startswith(prefix)}
    assert of_c == {member.name: member.value for member in python}


def test_the_answers_of_c_are_those_of_python():
    """An answer taken for another becomes the wrong error, or none."""
    for answer in errors.Answer:
        assert getattr(lib, f"SHR_{answer.name}") == answer
    header = (ROOT / "native/include/shmring/ring.h").read_text()
    of_c = dict(re.findall(r"^#define SHR_(\w+) \(?(-?\d+)\)?", header, re.MULTILINE))
    assert {name: int(value) for name, value in of_c.items()} == {a.name: int(a) for a in errors.Answer}


def test_the_numbers_of_python_are_those_of_c():
    """Each is written twice so that each side can be read alone."""
    assert layout.HEADER_LENGTH == lib.SHR_HEADER_LENGTH == 4096
    assert layout.CAPACITY_MAX == lib.SHR_CAPACITY_MAX
    assert waiter.WAIT_MAX == lib.SHR_WAIT_MAX
    assert waiter.CHECK_INTERVAL_S * 1e9 == lib.SHR_CHECK_INTERVAL_NS
    assert columns.FRAME_HEADER_LENGTH == lib.SHR_FRAME_HEADER_LENGTH == 16
    assert columns.COLUMN_ENTRY_LENGTH == lib.SHR_COLUMN_ENTRY_LENGTH == 8
    assert lib.SHR_LAYOUT_VERSION == 1
    assert lib.SHR_RECORD_ALIGNMENT == 8
    assert (
        set(statistics._STATES) == {lib.SHR_END_NEVER, lib.SHR_END_ATTACHED, lib.SHR_END_CLOSED} == {0, 1, 2}
    )


@pytest.mark.parametrize("capacity", [4096, 1 << 20, 1 << 31, 1 << 32, 1 << 33, 1 << 40])
def test_both_sides_agree_on_the_largest_payload(capacity):
    """Beyond four gigabytes it is the record's u32 that limits, not the ring."""
    length_max = producer.payload_length_max_of(capacity)
    assert length_max == lib.shr_payload_length_max(capacity)
    assert length_max + 8 <= 0xFFFFFFF0


def test_a_fresh_ring_is_these_bytes_and_no_others(ring_name):
    """What a reader in another language will be written against."""
    with shmring.create(ring_name, 8192):
        segment = segment_of(ring_name)
    assert len(segment) == 4096 + 8192
    assert segment[:0x20].hex(" ", 4) == (
        "aa53484d 52494e47 01000000 00100000 01000000 "
        + os.getpid().to_bytes(4, "little").hex()
        + " 00200000 00000000"
    )
    segment_id, created_ns = segment[0x20:0x28], int.from_bytes(segment[0x28:0x30], "little")
    assert any(segment_id)
    assert created_ns > 1_600_000_000_000_000_000
    assert segment[0x30:0x80] == bytes(0x50)
    assert segment[0x80:0x88].hex(" ", 4) == "01000000 00000000", "ready, not retired"
    assert segment[0x88:] == bytes(len(segment) - 0x88)


def test_a_record_is_these_bytes(ring_name):
    """Length with its header, type, flags, zero; payload; room up to the next multiple of eight."""
    with shmring.create(ring_name, 4096) as ring, ring.producer() as producer:
        producer.try_push(b"abc", 0x11, 0x22)
        producer.try_push(b"", 0x33)
        segment = segment_of(ring_name)
        assert segment[0x1000:0x1018].hex(" ", 4) == "0b000000 11220000 61626300 00000000 08000000 33000000"
        assert segment[0x100:0x108].hex() == "1800000000000000", "tail"
        assert (
            segment[0x180:0x18C].hex(" ", 4) == "01000000 01000000 " + os.getpid().to_bytes(4, "little").hex()
        )
        assert segment[0x200:0x218].hex(" ", 8) == "0200000000000000 1800000000000000 0200000000000000"


def test_a_frame_is_these_bytes(ring_name):
    """Version, columns, rows, fingerprint; a place for each column; the columns."""
    schema = shmring.Schema(
        "golden",
        5,
        [
            shmring.Column("ids", np.uint64),
            shmring.Column("counts", np.uint32),
            shmring.Column("tokens", np.int32, shmring.Shape.RAGGED, "counts"),
            shmring.Column("extra", np.float32, is_optional=True),
        ],
    )
    assert schema.fingerprint == 0x834226C0BCD67EFA
    with shmring.create(ring_name, 4096) as ring, ring.producer() as producer, ring.consumer() as consumer:
        ids, counts = np.array([1, 2], np.uint64), np.array([1, 2], np.uint32)
        assert schema.push(producer, 2, ids, counts, np.array([-1, 7, 8], np.int32), None, flags=6)
        (record,) = consumer.drain(1)
        assert (record.type, record.flags) == (5, 6)
        assert bytes(record).hex(" ", 4).split() == [
            *("01000400", "02000000", "fa7ed6bc", "c0264283"),  # version, columns, rows, fingerprint
            *("30000000", "10000000", "40000000", "08000000", "48000000", "0c000000", "00000000", "00000000"),
            *("01000000", "00000000", "02000000", "00000000"),
            *("01000000", "02000000"),
            *("ffffffff", "07000000", "08000000", "00000000"),
        ]
        consumer.release()


def test_old_bytes_are_still_read(ring_name):
    """A ring written by an earlier build is emptied by this one after an upgrade."""
    with shmring.create(ring_name, 4096) as ring:
        path = Path(f"/dev/shm/shmring.{ring_name}")
        with path.open("r+b") as file:
            file.seek(0x1000)
            file.write(bytes.fromhex("0b000000 11220000 6162630000000000 08000000 33000000"))
            file.seek(0x100)
            file.write((24).to_bytes(8, "little"))
        with ring.consumer() as consumer:
            assert [(bytes(r), r.type, r.flags) for r in consumer.drain(9)] == [
                (b"abc", 0x11, 0x22),
                (b"", 0x33, 0),
            ]
            consumer.release()
