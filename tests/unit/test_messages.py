"""Helpers of the frames: byte columns, the protocol's number, and ids out of a damaged frame."""

from __future__ import annotations

import numpy as np
import pytest

import shmring
from manager import messages


@pytest.mark.parametrize("items", [[], [b""], [b"a", b"", b"bcd"], [bytes(range(256))] * 3, [b"x" * 100_000]])
def test_byte_columns_come_back_as_they_were(items: list[bytes]) -> None:
    """Texts cut at another place are two wrong texts."""
    lengths, data = messages.pack_bytes(items)
    assert lengths.dtype == np.uint32
    assert messages.unpack_bytes(lengths, data) == items


@pytest.mark.parametrize("strings", [(), ("a",), ("é", "世界", "\n")])
@pytest.mark.parametrize("regexes", [(), ("a+b",)])
def test_stops_travel(strings: tuple[str, ...], regexes: tuple[str, ...]) -> None:
    """A stop string that is lost on the way never stops."""
    packed = messages.pack_stops(strings, regexes)
    assert messages.unpack_stops(packed) == (strings, regexes)
    assert bool(packed) is bool(strings or regexes)


def test_every_frame_has_a_number_of_its_own() -> None:
    """Two frames of one fingerprint could be read for each other."""
    fingerprints = [schema.fingerprint for schema in messages.ALL]
    # alike by design: only ids, ids and bytes, batches
    assert len(set(fingerprints)) >= len(messages.ALL) - 5
    by_ring = [messages.IngressType, messages.EgressType, messages.RegisterType, messages.ReplyType]
    for types in by_ring:
        assert 0 not in list(types)
    assert messages.protocol_fingerprint() == messages.protocol_fingerprint()


def frame(name: str, ids: list[int]) -> bytes:
    """The bytes of an ABORT frame."""
    with (
        shmring.create(name, 1 << 14) as ring,
        ring.producer() as producer,
        ring.consumer() as consumer,
    ):
        assert messages.ABORT.push(producer, len(ids), np.array(ids, np.uint64))
        record = consumer.try_pop()
    assert record is not None
    return record


@pytest.mark.parametrize("ids", [[], [1], [2**64 - 1, 0, 7], list(range(500))])
def test_ids_are_found_in_a_frame_of_another_schema(ring_name: str, ids: list[int]) -> None:
    """The requests of a frame that nobody can read must still be ended."""
    data = bytearray(frame(ring_name, ids))
    assert messages.recover_request_ids(data) == ids
    data[8:16] = b"\xff" * 8
    assert messages.recover_request_ids(bytes(data)) == ids


def test_no_ids_are_found_where_none_are(ring_name: str) -> None:
    """Ids made up of other bytes would end strangers' requests."""
    data = frame(ring_name, [1, 2, 3])
    for length in range(len(data)):
        found = messages.recover_request_ids(data[:length])
        assert found == [], length
    for junk in (b"", b"\0" * 100, b"\xff" * 100, bytes(range(256))):
        assert messages.recover_request_ids(junk) == []
    for index in range(16, 24):  # where the first column lies, and how long it is
        spoilt = bytearray(data)
        spoilt[index] ^= 0x55
        assert messages.recover_request_ids(spoilt) == [], index
