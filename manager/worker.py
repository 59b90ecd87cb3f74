"""The process of one detok worker: attaches by name, runs its shard, ends with the manager."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import shmring
from manager.deployment import (
    egress_name,
    read_manifest,
    register_name,
    remove_leftovers,
    reply_name,
    table_name,
)
from manager.detokenize import SLOTS_MAX, DecoderKind, TableDecoder, load_decoder, table_from_bytes
from manager.errors import ConfigError
from manager.shard import DetokShard
from shmring import Consumer, Producer, WaitPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from manager.deployment import Manifest
    from manager.detokenize import BatchDecoder

log = logging.getLogger(__name__)

_RECORDS_AT_ONCE: Final = 64
#: Seconds of sleep between two looks at the manager's life and at should_stop.
_CHECK_INTERVAL_S: Final = 0.25


def run_worker(
    name: str,
    shard: int,
    *,
    timeout_s: float | None = 0,
    should_stop: Callable[[], bool] = lambda: False,
    policy: WaitPolicy = WaitPolicy.BALANCED,
) -> bool:
    """Serve one shard until the manager closes the deployment (True) or dies (False).

    Waits up to `timeout_s` for the deployment to appear. Raises what attaching raises, and
    ConfigError if the deployment has no such shard.
    """
    manifest = read_manifest(name, timeout_s)
    if not 0 <= shard < manifest.shards:
        raise ConfigError(f"no such shard: shard={shard}, shards={manifest.shards}", setting="shard")
    decoder = _load_decoder(manifest)
    with contextlib.ExitStack() as ends:
        egress = ends.enter_context(Consumer.attach(egress_name(name, shard), takeover=True))
        register = ends.enter_context(Consumer.attach(register_name(name, shard)))
        # last: the manager takes this end for the sign that the worker is ready
        reply = ends.enter_context(Producer.attach(reply_name(name, shard), takeover=True))
        stage = DetokShard(egress=egress, register=register, reply=reply, decoder=decoder)
        return _run(stage, egress, register, reply, manifest, should_stop, policy)


def _load_decoder(manifest: Manifest) -> BatchDecoder | None:
    """The deployment's decoder. One that decodes by the published table never sees the tokenizer."""
    if manifest.tokenizer is None:
        return None
    decoder: BatchDecoder
    if manifest.decoder == DecoderKind.TABLE.value:
        decoder = _map_table(manifest)
    else:
        # imported here: it costs 20 MiB and most of the start, and most workers never need it
        from manager.tokenizer import load_tokenizer  # noqa: PLC0415

        kind = DecoderKind.LIBRARY if manifest.decoder == DecoderKind.LIBRARY.value else None
        decoder = load_decoder(load_tokenizer(Path(manifest.tokenizer)).tokenizer, kind=kind)
    log.info("decoding by %s: %s", decoder.kind.value, manifest.decoder_reason or decoder.reason)
    return decoder


def _map_table(manifest: Manifest) -> TableDecoder:
    """Decode with the table where it lies. Its views keep the memory mapped; its owner never writes again."""
    mapping = shmring.read_blob(table_name(manifest.name))
    try:
        table = table_from_bytes(mapping.payload)
    finally:
        mapping.handle.close()
    return TableDecoder(table, slots_max=SLOTS_MAX, reason=manifest.decoder_reason)


def _run(
    stage: DetokShard,
    egress: Consumer,
    register: Consumer,
    reply: Producer,
    manifest: Manifest,
    should_stop: Callable[[], bool],
    policy: WaitPolicy,
) -> bool:
    checked = time.monotonic()
    while not should_stop():
        try:
            if stage.do_work(_RECORDS_AT_ONCE):
                continue
            if stage.unsent_length:
                # the manager is behind: wait for it alone, so that the scheduler feels it too
                shmring.wait_any(
                    [], _CHECK_INTERVAL_S, producers=[(reply, stage.unsent_length)], policy=policy
                )
            else:
                shmring.wait_any([egress, register], _CHECK_INTERVAL_S, policy=policy)
            if time.monotonic() - checked > _CHECK_INTERVAL_S:
                checked = time.monotonic()
                _check_manager(register)
        except shmring.EndOfRing:
            return True
        except shmring.PeerLostError:
            log.warning("the manager has died: name=%s", manifest.name)
            remove_leftovers(manifest)
            return False
    return True


def _check_manager(register: Consumer) -> None:
    """A worker that waits for room, or works without a pause, learns of the manager's end here."""
    state = register.peer_state()
    if state is shmring.PeerState.LOST:
        raise shmring.PeerLostError("the manager has died")
    if state is shmring.PeerState.FINISHED:
        raise shmring.EndOfRing("the manager has closed the deployment")
