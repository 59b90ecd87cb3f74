"""Names, rings and the manifest of a deployment: all of it or nothing, and nothing left."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import shmring
from manager import deployment as module
from manager.config import Settings
from manager.deployment import (
    MANIFEST_VERSION,
    Deployment,
    Facts,
    Manifest,
    egress_name,
    read_manifest,
    remove_leftovers,
    ring_names,
)
from manager.errors import ConfigError, DeploymentEndedError
from manager.messages import protocol_fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator

FACTS = Facts(vocab_size=100, eos_token_ids=(2, 3), tokenizer=None)


def settings(name: str, workers: int = 2) -> Settings:
    return Settings(
        name=name,
        workers=workers,
        context_length=100,
        ingress_capacity_bytes=8192,
        egress_capacity_bytes=4096,
        register_capacity_bytes=4096,
        reply_capacity_bytes=4096,
    )


def names_of(name: str) -> list[str]:
    return [info.name for info in shmring.list_rings() if info.name.startswith(name)]


def die(deployment: Deployment) -> None:
    """Drop its locks, as SIGKILL does; its names stay."""
    for segment in (*deployment._rings.values(), deployment._manifest):
        assert segment is not None
        segment._segment._handle.close()


@pytest.fixture
def deployment(ring_name: str) -> Iterator[Deployment]:
    made = Deployment(settings(ring_name), FACTS)
    yield made
    made.close()


def test_a_name_is_enough_to_find_everything(ring_name: str, deployment: Deployment) -> None:
    """Whoever attaches is given one word."""
    manifest = read_manifest(ring_name)
    assert manifest.shards == 2
    assert manifest.vocab_size == 100
    assert manifest.context_length == 100
    assert manifest.eos_token_ids == [2, 3]
    assert manifest.manager_pid == os.getpid()
    assert sorted(names_of(ring_name)) == sorted([ring_name, *ring_names(ring_name, 2)])
    assert deployment.ring(egress_name(ring_name, 1)).capacity_bytes == 4096


def test_closing_takes_every_name_away(ring_name: str, deployment: Deployment) -> None:
    """What stays in shared memory stays until somebody notices that it is full."""
    deployment.close()
    assert names_of(ring_name) == []
    deployment.close()


def test_a_living_deployments_name_is_refused_and_it_is_unharmed(
    ring_name: str, deployment: Deployment
) -> None:
    """A second manager must leave no trace in the first one's deployment."""
    before = names_of(ring_name)
    for workers in (1, 2, 5):
        with pytest.raises(ConfigError, match=f"owner_pid={os.getpid()}") as caught:
            Deployment(settings(ring_name, workers), FACTS)
        assert caught.value.setting == "name"
        assert names_of(ring_name) == before
    assert read_manifest(ring_name).shards == 2
    assert deployment.ring(egress_name(ring_name, 0)).is_open


def test_a_name_that_one_ring_cannot_have_leaves_no_other(ring_name: str) -> None:
    """Half a deployment is one that parts attach to and wait in."""
    with shmring.create(f"{ring_name}.reply.1", 4096), pytest.raises(ConfigError, match="in use"):
        Deployment(settings(ring_name), FACTS)
    assert names_of(ring_name) == []


def test_too_little_room_is_told_before_anything_is_made(
    ring_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found out later it is a SIGBUS in the middle of somebody's request."""

    class Full:
        f_bavail = 10
        f_frsize = 4096

    monkeypatch.setattr(module.os, "statvfs", lambda _: Full)
    with pytest.raises(shmring.NoSharedMemoryError, match="free=40960") as caught:
        Deployment(settings(ring_name), FACTS)
    assert caught.value.free_bytes == 40960
    assert caught.value.needed_bytes > 8192 + 6 * 4096
    assert names_of(ring_name) == []


@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 3), (3, 1)])
def test_a_dead_deployment_makes_way_for_the_next_with_all_of_its_names(
    ring_name: str, before: int, after: int
) -> None:
    """With fewer workers than before, the names of the others would stay for ever."""
    die(Deployment(settings(ring_name, before), FACTS))
    successor = Deployment(settings(ring_name, after), FACTS)
    try:
        assert sorted(names_of(ring_name)) == sorted([ring_name, *ring_names(ring_name, after)])
        assert read_manifest(ring_name).shards == after
    finally:
        successor.close()
    assert names_of(ring_name) == []


def test_a_dead_deployment_is_none_to_attach_to(ring_name: str) -> None:
    """A scheduler that attached to a leftover would wait there for ever."""
    dead = Deployment(settings(ring_name), FACTS)
    manifest = read_manifest(ring_name)
    die(dead)
    with pytest.raises(DeploymentEndedError) as caught:
        read_manifest(ring_name)
    assert not caught.value.orderly
    assert sorted(remove_leftovers(manifest)) == sorted([ring_name, *ring_names(ring_name, 2)])
    assert remove_leftovers(manifest) == []


def test_what_lives_is_no_leftover(ring_name: str, deployment: Deployment) -> None:
    """A part that believes its manager dead must not take a living one's names away."""
    assert remove_leftovers(read_manifest(ring_name)) == []
    assert len(names_of(ring_name)) == 8
    assert deployment.ring(egress_name(ring_name, 0)).is_open


def manifest_bytes(name: str, **changes: Any) -> bytes:
    fields = {
        "version": MANIFEST_VERSION,
        "protocol": protocol_fingerprint(),
        "name": name,
        "shards": 1,
        "vocab_size": 10,
        "context_length": 10,
        "eos_token_ids": [],
        "tokenizer": None,
        "decoder": None,
        "decoder_reason": "",
        "manager_pid": 1,
        "deployment_id": 7,
    }
    assert set(fields) == set(Manifest.__struct_fields__)
    return msgspec.msgpack.encode({**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"version": MANIFEST_VERSION + 1},
        {"protocol": 1},
        {"shards": 0},
        {"shards": 65},
        {"shards": "1"},
        {"eos_token_ids": ["a"]},
        {"unknown": 1},
    ],
)
def test_a_manifest_of_another_version_is_refused(ring_name: str, changes: dict[str, Any]) -> None:
    """An old worker beside a new manager would read shifted columns."""
    blob = shmring.publish_blob(ring_name, manifest_bytes(ring_name, **changes))
    try:
        with pytest.raises(shmring.LayoutMismatchError, match=ring_name):
            read_manifest(ring_name)
    finally:
        blob.close()


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x00", b"\x93\x01\x02", b"x" * 5000])
def test_what_is_no_manifest_is_refused(ring_name: str, payload: bytes) -> None:
    """Another program's segment of that name is not ours to read."""
    blob = shmring.publish_blob(ring_name, payload)
    try:
        with pytest.raises(shmring.LayoutMismatchError):
            read_manifest(ring_name)
    finally:
        blob.close()
    with shmring.create(ring_name, 4096), pytest.raises(shmring.LayoutMismatchError):
        read_manifest(ring_name)


def test_no_deployment_is_told_at_once(ring_name: str) -> None:
    """And a name that cannot be is told as that."""
    with pytest.raises(shmring.SegmentNotFoundError, match=f"no deployment .* name={ring_name}"):
        read_manifest(ring_name)
    with pytest.raises(ConfigError):
        read_manifest("a/b")
