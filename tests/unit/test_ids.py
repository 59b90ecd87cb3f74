"""Request ids never repeat, every process agrees on their shard, and a client's rid stays as sent."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.errors import ValidationError
from manager.ids import (
    HEALTH_RID_PREFIX,
    RID_LENGTH_MAX,
    RequestIds,
    check_rid,
    mint_health_rid,
    mint_rid,
    shard_of,
    shards_of,
)

U64 = st.integers(0, 2**64 - 1)


def test_ids_begin_at_one():
    """0 marks an empty slot: a request of that id would be taken for nothing."""
    ids = RequestIds()
    assert [ids.take() for _ in range(3)] == [1, 2, 3]


def test_ids_can_go_on_where_others_stopped():
    """A manager that takes over must not name two requests alike."""
    assert RequestIds(2**40 + 1).take() == 2**40 + 1


def test_zero_cannot_be_the_first_id():
    """It is reserved."""
    with pytest.raises(AssertionError):
        RequestIds(0)


def test_threads_never_get_the_same_id():
    """Two requests of one id would get each other's text."""
    ids = RequestIds()
    taken: list[list[int]] = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=lambda mine=mine: mine.extend(ids.take() for _ in range(2500)))
        for mine in taken
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(number for mine in taken for number in mine) == list(range(1, 10_001))


@given(U64, st.integers(1, 64))
def test_a_shard_is_a_pure_function_of_the_id(request_id, shards):
    """Manager and scheduler compute it apart: if they differ, the text goes to nobody."""
    assert shard_of(request_id, shards) == request_id % shards
    assert 0 <= shard_of(request_id, shards) < shards


@given(st.lists(U64, max_size=50), st.integers(1, 64))
def test_a_column_of_ids_gets_the_shards_of_its_ids(request_ids, shards):
    """Also above 2**53, where a detour through floats would lose the low bits."""
    column = np.array(request_ids, dtype=np.uint64)
    computed = shards_of(column, shards)
    assert computed.dtype == np.intp
    assert computed.tolist() == [shard_of(request_id, shards) for request_id in request_ids]


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8])
def test_consecutive_ids_spread_evenly(shards):
    """One shard with all the work makes everybody as slow as itself."""
    counts = np.bincount(shards_of(np.arange(1, 64 * shards + 1, dtype=np.uint64), shards))
    assert counts.tolist() == [64] * shards


def test_a_minted_rid_is_32_lowercase_hex_digits_of_the_given_source():
    """Clients parse it as they parse a uuid."""
    assert mint_rid(lambda count: bytes(range(0xF0, 0xF0 + count))) == "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"


def test_minted_rids_differ():
    """Two clients with one rid would abort each other."""
    assert len({mint_rid() for _ in range(100)}) == 100


def test_a_health_rid_is_known_by_its_prefix():
    """Engines skip probes when they are busy, and tell them by it."""
    rid = mint_health_rid()
    assert rid.startswith(HEALTH_RID_PREFIX)
    assert len(rid) == 13 + 32


@pytest.mark.parametrize(
    "rid",
    [
        "r",
        "",
        "x_0",
        "0123456789abcdef" * 2,
        "abc#0123456789abcdef",
        "#0123456789abcdef",
        "réq-π-🎉",
        "x" * 128,
        "\0",
    ],
)
def test_a_rid_is_kept_as_it_was_sent(rid):
    """The client finds its request again by it."""
    assert check_rid(rid) == rid


@pytest.mark.parametrize("rid", ["x" * 129, "é" * 65, "\ud800", 5, None, b"r", ["r"], True])
def test_what_is_no_rid_is_refused(rid):
    """It goes into logs, records and answers, each with a bound and an encoding."""
    with pytest.raises(ValidationError) as error:
        check_rid(rid)
    assert error.value.field == "rid"
    str(error.value).encode()


def test_the_bound_of_a_rid_is_in_bytes():
    """It is bytes that travel."""
    assert len(check_rid("é" * (RID_LENGTH_MAX // 2)).encode()) == RID_LENGTH_MAX
