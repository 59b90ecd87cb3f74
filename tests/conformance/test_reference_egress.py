"""What SGLang's server promises about frames of output, row by row; others are kept as bytes.

See test_golden_egress_frames.py for those of one frame each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from output_path import OutputPath

import shmring
from manager import messages
from manager.deployment import egress_name
from shmring import Column, Schema

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def path(ring_name: str, request: pytest.FixtureRequest) -> Iterator[OutputPath]:
    made = OutputPath(ring_name, shards=getattr(request, "param", 1))
    yield made
    made.close()


@pytest.mark.parametrize("more", [0, 3, 15, 16, 63])
def test_rid_recovery_works_at_every_header_arity(path: OutputPath, more: int) -> None:
    """The ordinary cause of a rejected frame is a newer scheduler with a column more."""
    columns = [Column("request_ids", np.uint64), *(Column(f"column_{i}", np.uint8) for i in range(more))]
    newer = Schema("newer", messages.EgressType.BATCH, columns)
    path.register(1, 2)
    producer = path.port._egress[0]
    rest = [np.array([120, 121], np.uint8)] * more
    assert newer.push(producer, 2, np.array([1, 2], np.uint64), *rest)
    path.work()
    assert {request_id: error.status for request_id, error in path.failed.items()} == {1: 500, 2: 500}
    assert path.aborts == [1, 2]
    assert path.texts == {}
    assert path.shards[0].counters.batches == 0


@pytest.mark.parametrize("path", [1, 3, 8], indirect=True)
def test_one_record_a_shard_and_step(ring_name: str, path: OutputPath) -> None:
    """One for each request would cost several times as much, and its worker as many wakes."""
    ids = list(range(1, 201))
    path.register(*ids)
    path.push(ids, [[97]] * len(ids), None)
    for shard in range(len(path.shards)):
        assert shmring.read_statistics(egress_name(ring_name, shard)).producer.records == 1
    path.push([1], [[98]], None)
    path.work()
    assert [shard.counters.batches for shard in path.shards] == [
        1 + (shard == 1 % len(path.shards)) for shard in range(len(path.shards))
    ]
    assert path.texts == dict.fromkeys(ids, "a") | {1: "ab"}


@pytest.mark.parametrize("path", [1, 3], indirect=True)
def test_an_error_reaches_its_request_and_only_the_worker_that_owns_it(path: OutputPath) -> None:
    """The number says where a request is, for errors as for output."""
    path.register(1, 2, 3)
    path.port.push_error(2, "invalid request: bad field")
    path.push([1, 3], [[97], [98]], None)
    path.work()
    assert {request_id: str(error) for request_id, error in path.failed.items()} == {
        2: "invalid request: bad field"
    }
    assert path.failed[2].status == 400
    assert path.texts == {1: "a", 3: "b"}
    assert path.aborts == []
