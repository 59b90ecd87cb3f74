"""One deployment in shared memory: its names, its manifest, its rings.

The manifest is a small read-only segment under the deployment's own name. It is published last,
so whoever finds it finds everything it speaks of. Whoever attaches needs the name and no more.

    NAME                 manifest
    NAME.table           manager    -> workers; where ids are decoded by a table
    NAME.ingress         manager    -> scheduler
    NAME.egress.i        scheduler  -> worker i
    NAME.register.i      manager    -> worker i
    NAME.reply.i         worker i   -> manager
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

import shmring
from manager.config import WORKERS_MAX, check_deployment_name
from manager.errors import ConfigError, DeploymentEndedError
from manager.messages import protocol_fingerprint
from shmring import LayoutMismatchError, NoSharedMemoryError, SegmentExistsError, SegmentNotFoundError

if TYPE_CHECKING:
    from pathlib import Path

    from manager.config import Settings
    from manager.detokenize import Choice

MANIFEST_VERSION: Final = 3
#: Bytes that a ring takes beside its data.
_RING_OVERHEAD: Final = 4096


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a scheduler or a worker must know of a deployment. Read by strict types, never trusted."""

    version: int
    protocol: int
    """Fingerprint of all frames: both sides speak of the same columns."""
    name: str
    shards: int
    vocab_size: int
    context_length: int
    eos_token_ids: list[int]
    tokenizer: str | None
    """Path of the tokenizer.json; None: no text, only ids."""
    decoder: str | None
    """How workers decode: "table" (it is published), "library" (each loads the tokenizer), or None:
    each worker finds out."""
    decoder_reason: str
    """For people to read."""
    manager_pid: int
    """For people to read."""
    deployment_id: int
    """Random: tells this deployment from another one of its name."""


def ingress_name(name: str) -> str:
    """Name of the ring that carries requests to the scheduler."""
    return f"{name}.ingress"


def egress_name(name: str, shard: int) -> str:
    """Name of the ring that carries one shard's output to its worker."""
    return f"{name}.egress.{shard}"


def register_name(name: str, shard: int) -> str:
    """Name of the ring that tells a worker of its requests."""
    return f"{name}.register.{shard}"


def reply_name(name: str, shard: int) -> str:
    """Name of the ring that carries text back to the manager."""
    return f"{name}.reply.{shard}"


def table_name(name: str) -> str:
    """Name of the blob that holds the decode table."""
    return f"{name}.table"


def ring_names(name: str, shards: int) -> list[str]:
    """Names of all rings of a deployment."""
    names = [ingress_name(name)]
    for shard in range(shards):
        names += [egress_name(name, shard), register_name(name, shard), reply_name(name, shard)]
    return names


@dataclass(frozen=True)
class Facts:
    """What the manager found out about its model before it made the deployment."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Path | None
    decoding: Choice | None = None
    """None: no tokenizer, or each worker finds out by itself."""


class Deployment:
    """The segments of a deployment, owned by this process. Closing removes them all."""

    def __init__(self, settings: Settings, facts: Facts) -> None:
        """Make everything, or nothing. Raises ConfigError (name in use) or NoSharedMemoryError."""
        self.name = settings.name
        self.shards = settings.workers
        self._rings: dict[str, shmring.Ring] = {}
        self._manifest: shmring.Blob | None = None
        self._table: shmring.Blob | None = None
        self.deployment_id = secrets.randbits(63)
        choice = facts.decoding
        table = b"" if choice is None else choice.table_bytes()
        # first: a dead predecessor's rings take room, and it may have had more workers than we have
        remove_dead_deployment(settings.name)
        _check_room(settings, len(table))
        try:
            self._make_rings(settings)
            if table:
                self._table = shmring.publish_blob(table_name(settings.name), table)
            self._manifest = shmring.publish_blob(settings.name, _encode(settings, facts, self.deployment_id))
        except SegmentExistsError as error:
            self.close()
            raise ConfigError(
                f"name is in use by a living deployment: name={settings.name}, owner_pid={error.owner_pid}",
                setting="name",
            ) from error
        except BaseException:
            self.close()
            raise

    def _make_rings(self, settings: Settings) -> None:
        name = settings.name
        # the ingress ring first: two managers of one name meet here and not half way
        capacities = {ingress_name(name): settings.ingress_capacity_bytes}
        for shard in range(settings.workers):
            capacities[egress_name(name, shard)] = settings.egress_capacity_bytes
            capacities[register_name(name, shard)] = settings.register_capacity_bytes
            capacities[reply_name(name, shard)] = settings.reply_capacity_bytes
        for ring_name, capacity in capacities.items():
            self._rings[ring_name] = shmring.create(ring_name, capacity)

    def ring(self, name: str) -> shmring.Ring:
        """One of the rings, by its whole name."""
        return self._rings[name]

    def truncated(self) -> dict[str, list[int]]:
        """Rings whose object somebody has cut short, by name, and the shards behind them.

        One system call a ring.
        """
        return {
            name: [int(name.rpartition(".")[2])]
            if name != ingress_name(self.name)
            else list(range(self.shards))
            for name, ring in self._rings.items()
            if not ring.is_whole
        }

    def close(self) -> None:
        """Take all names away, the manifest first. Twice is once."""
        if self._manifest is not None:
            self._manifest.close()
        if self._table is not None:
            self._table.close()
        for ring in self._rings.values():
            ring.close()


def _check_room(settings: Settings, table_length: int) -> None:
    """Find out before the first ring is made whether everything fits."""
    rings = 1 + 3 * settings.workers
    needed = settings.capacity_bytes + rings * _RING_OVERHEAD + 2 * _RING_OVERHEAD
    if table_length:
        needed += table_length + 2 * _RING_OVERHEAD
    status = os.statvfs("/dev/shm")  # noqa: S108 - the shared-memory file system
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise NoSharedMemoryError(
            f"too little shared memory for {rings} rings: needed={needed}, free={free}",
            needed_bytes=needed,
            free_bytes=free,
        )


def _encode(settings: Settings, facts: Facts, deployment_id: int) -> bytes:
    return msgspec.msgpack.encode(
        Manifest(
            version=MANIFEST_VERSION,
            protocol=protocol_fingerprint(),
            name=settings.name,
            shards=settings.workers,
            vocab_size=facts.vocab_size,
            context_length=settings.context_length,
            eos_token_ids=list(facts.eos_token_ids),
            tokenizer=None if facts.tokenizer is None else str(facts.tokenizer.resolve()),
            decoder=None if facts.decoding is None else facts.decoding.kind.value,
            decoder_reason="" if facts.decoding is None else facts.decoding.reason,
            manager_pid=os.getpid(),
            deployment_id=deployment_id,
        )
    )


def read_manifest(name: str, timeout_s: float | None = 0) -> Manifest:
    """Read a living deployment's manifest, waiting up to `timeout_s` for it (None: for ever).

    Raises SegmentNotFoundError, LayoutMismatchError (another version), ConfigError (a name that
    cannot be) or DeploymentEndedError (what is there is a dead manager's leftover).
    """
    try:
        mapping = shmring.read_blob(check_deployment_name(name), timeout_s=timeout_s)
    except SegmentNotFoundError as error:
        raise SegmentNotFoundError(
            f"no deployment of that name, start its manager: name={name}", name=name
        ) from error
    try:
        if not mapping.handle.is_held(shmring.Role.OWNER):
            raise DeploymentEndedError(f"the manager of this deployment has died: name={name}", orderly=False)
        try:
            manifest = msgspec.msgpack.decode(bytes(mapping.payload), type=Manifest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise LayoutMismatchError(
                f"segment is no manifest: name={name}, why={error}", expected="a manifest", found=name
            ) from error
    finally:
        mapping.handle.close()
    expected = (MANIFEST_VERSION, protocol_fingerprint())
    found = (manifest.version, manifest.protocol)
    if found != expected or not 1 <= manifest.shards <= WORKERS_MAX:
        raise LayoutMismatchError(
            f"deployment speaks another version: name={name}, found={found}, expected={expected}",
            expected=expected,
            found=found,
        )
    return manifest


def remove_leftovers(manifest: Manifest) -> list[str]:
    """Remove what a dead manager left: only names whose owner's lock nobody holds.

    Called by the parts that outlive their manager, so that a kill leaves nothing behind.
    """
    return _remove_dead(
        [manifest.name, table_name(manifest.name), *ring_names(manifest.name, manifest.shards)]
    )


def remove_dead_deployment(name: str) -> list[str]:
    """Remove all that a dead deployment of that name left, however many workers it had."""
    return _remove_dead(
        [name, table_name(name), *ring_names(name, WORKERS_MAX)],
        there={info.name for info in shmring.list_rings()},
    )


def _remove_dead(names: list[str], there: set[str] | None = None) -> list[str]:
    """Remove those of the names whose owners are dead; returns them. `there`: no others exist."""
    removed = []
    for name in names:
        if there is not None and name not in there:
            continue
        try:
            shmring.unlink(name)
        except (OSError, shmring.ShmringError):  # gone, alive again, or somebody else's
            continue
        removed.append(name)
    return removed
