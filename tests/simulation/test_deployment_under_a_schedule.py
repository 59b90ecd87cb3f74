"""A whole deployment in one process: real rings and stages, and a seeded schedule that decides who works.

Rings are as small as they can be, so that everything is full now and then. Parts die between
any two pieces of work, as SIGKILL ends them, and others take their places on the same rings;
the manager notices later. Requests are aborted at any moment, known ones and unknown ones, once
and twice. After every step

- no text of a request is other than the beginning of what it must become,
- no request ends twice, or hears a word after its end,

and when all is quiet every request has ended, and nothing is kept of any of them anywhere.

A failing seed is in the test's name; see conftest.py for running it alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

import shmring
from manager.config import Settings
from manager.deployment import (
    Deployment,
    Facts,
    egress_name,
    ingress_name,
    register_name,
    reply_name,
    ring_names,
)
from manager.detokenize import load_decoder
from manager.engines.echo import EchoEngine
from manager.engines.loop import EngineLoop
from manager.errors import ManagerError, QueueFullError
from manager.inbox import Inbox
from manager.outbox import Dispatch, Outbox
from manager.sampling import NormalizedSampling, SamplingParams
from manager.scheduler_port import SchedulerPort
from manager.shard import DetokShard

if TYPE_CHECKING:
    from collections.abc import Callable

    from manager.finish import FinishReason

TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[1] / "data/detok/bytelevel_tiny.json"))
VOCAB_SIZE = 278
CONTEXT_LENGTH = 512
ALPHABET = ["a", "b", "S", "ST", "STOP", "TOP", " ", "\n", "é", "世", "工具", "😀", "👩‍💻", "\x00", "<|eos|>"]
STOPS = ["STOP", "TOP", "ab", "世", "\n\n", "😀a", "bSTOPb", "S"]
STEPS = 500
REQUESTS_MAX = 120


@dataclass
class Request:
    """What a client asked for, what it must get, and what it has got."""

    shard: int
    ids: list[int]
    """Those that will be shown."""
    text: str
    end: dict[str, Any]
    seen_text: str = ""
    seen_ids: list[int] = field(default_factory=list)
    has_ended: bool = False
    is_whole: bool = False


class WaitingPort(SchedulerPort):
    """A port that lets the others work where the real one sleeps."""

    let_others_work: Callable[[], None]

    def _wait_for_room(self, _producer: Any, _length: int, again: Callable[[], bool], _timeout: Any) -> None:
        for _ in range(100_000):
            self.let_others_work()
            if again():
                return
        raise AssertionError("an egress ring stays full for ever")


class World:
    """All parts, and what the manager knows."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.name = name
        self.shards = self.rng.choice([1, 2, 3])
        settings = Settings(
            name=name,
            workers=self.shards,
            context_length=CONTEXT_LENGTH,
            vocab_size=VOCAB_SIZE,
            ingress_capacity_bytes=8192,
            egress_capacity_bytes=4096,
            register_capacity_bytes=4096,
            reply_capacity_bytes=4096,
        )
        self.deployment = Deployment(settings, Facts(VOCAB_SIZE, (272,), None))
        ring = self.deployment.ring
        self.outbox = Outbox(
            ring(ingress_name(name)).producer(takeover=True),
            [ring(register_name(name, i)).producer(takeover=True) for i in range(self.shards)],
        )
        self.replies = [
            ring(reply_name(name, i)).consumer(takeover=True, poison=True) for i in range(self.shards)
        ]
        self.inboxes = [Inbox(reply, self) for reply in self.replies]
        self.requests: dict[int, Request] = {}
        self.next_id = 1
        self.is_calm = False
        """Nothing new comes, nobody aborts, nobody dies."""
        self.unnoticed: set[str] = set()
        self.dead_shards: set[int] = set()
        self.workers: dict[int, tuple[DetokShard, list[Any]]] = {}
        for shard in range(self.shards):
            self.start_worker(shard)
        self.start_scheduler()

    # the manager

    @property
    def open_requests(self) -> dict[int, Request]:
        return {i: request for i, request in self.requests.items() if not request.has_ended}

    def submit(self) -> None:
        rng = self.rng
        text = "".join(rng.choices(ALPHABET, k=rng.randint(1, 40)))
        ids = TOKENIZER.encode(text).ids if rng.random() < 0.3 else list(text.encode())
        params: dict[str, Any] = {"max_new_tokens": rng.choice([None, None, rng.randint(0, 60)])}
        if rng.random() < 0.4:
            params["stop"] = rng.sample(STOPS, rng.randint(1, 3))
        if rng.random() < 0.3:
            params["stop_token_ids"] = rng.sample(range(VOCAB_SIZE), 3) + rng.sample(ids, 1)
        params["no_stop_trim"] = rng.random() < 0.3
        params["skip_special_tokens"] = rng.random() < 0.5
        sampling = NormalizedSampling.of(
            SamplingParams.from_mapping(params), vocab_size=VOCAB_SIZE, has_tokenizer=True
        )
        request_id, self.next_id = self.next_id, self.next_id + 1
        prompt = np.array(ids, np.int32)
        try:
            self.outbox.send(Dispatch(request_id, f"rid-{request_id}", prompt, prompt[-16:], sampling))
        except QueueFullError:
            return
        self.requests[request_id] = expected(request_id % self.shards, ids, params)

    def abort(self, request_id: int) -> None:
        """The client's wish, as the manager carries it out."""
        request = self.requests.get(request_id)
        self.outbox.abort(request_id)
        self.outbox.deregister(request_id)
        if request is not None:
            request.has_ended = True

    def notice(self, part: str) -> None:
        """The manager learns that a part was replaced."""
        self.unnoticed.discard(part)
        shard = None if part == "scheduler" else int(part.split()[1])
        if shard is not None:
            while self.inboxes[shard].do_work(64):
                pass
        for request_id, request in self.open_requests.items():
            if shard in (None, request.shard):
                self.abort(request_id)

    def on_text(
        self, request_id: int, text: str, ids: list[int], _count: int, reason: FinishReason | None
    ) -> None:
        request = self.requests[request_id]
        if request.has_ended:
            assert not (request.is_whole and reason is not None), "a request has two ends"
            return
        request.seen_text += text
        request.seen_ids += ids
        assert request.text.startswith(request.seen_text), (request_id, request)
        assert request.ids[: len(request.seen_ids)] == request.seen_ids, (request_id, request)
        if reason is not None:
            request.has_ended = request.is_whole = True
            assert request.seen_text == request.text, (request_id, request)
            assert reason.to_mapping() == request.end, (request_id, request)

    def on_fail(self, request_id: int, error: ManagerError) -> None:
        raise AssertionError(f"nothing here fails: request_id={request_id}, error={error}")

    def on_abort_asked(self, request_id: int) -> None:
        self.outbox.abort(request_id)

    def on_result(self, control_id: int, payload: bytes) -> None:
        raise AssertionError(f"nobody asked: control_id={control_id}, payload={payload!r}")

    # the other parts

    def start_worker(self, shard: int) -> None:
        ends: list[Any] = [
            shmring.Consumer.attach(egress_name(self.name, shard), takeover=True, poison=True),
            shmring.Consumer.attach(register_name(self.name, shard), poison=True),
            shmring.Producer.attach(reply_name(self.name, shard), takeover=True),
        ]
        stage = DetokShard(
            egress=ends[0],
            register=ends[1],
            reply=ends[2],
            decoder=load_decoder_once(self.rng.random() < 0.1),
        )
        self.workers[shard] = (stage, ends)
        self.dead_shards.discard(shard)

    def kill_worker(self, shard: int) -> None:
        _, ends = self.workers.pop(shard)
        drop(ends)
        self.dead_shards.add(shard)
        self.unnoticed.add(f"worker {shard}")

    def start_scheduler(self) -> None:
        self.port = WaitingPort.attach(self.name, continues_prompt=False)
        self.port.let_others_work = lambda: self.step(without_scheduler=True)
        engine = EchoEngine(context_length=CONTEXT_LENGTH, chunk=self.rng.choice([1, 1, 2, 7, 50]))
        self.loop = EngineLoop(
            engine, self.port, running_max=self.rng.choice([2, 8, 256]), waiting_max=self.rng.choice([1, 64])
        )

    def replace_scheduler(self) -> None:
        drop([self.port._ingress, *self.port._egress])
        self.unnoticed.add("scheduler")
        self.start_scheduler()

    # the schedule

    def step(self, *, without_scheduler: bool = False) -> None:
        """Let one part do one piece of work."""
        rng = self.rng
        limit = rng.choice([1, 2, 5, 64])
        shard = rng.randrange(self.shards)
        roll = rng.random()
        if roll < 0.30:
            if shard in self.workers:
                self.workers[shard][0].do_work(limit)
            elif self.is_calm or rng.random() < 0.2:  # dead for long enough that rings fill up
                self.start_worker(shard)
        elif roll < 0.50:
            self.inboxes[shard].do_work(limit)
        elif roll < 0.60:
            self.outbox.flush()
        elif roll < 0.62:
            if self.unnoticed and not self.dead_shards:
                self.notice(rng.choice(sorted(self.unnoticed)))
        elif not without_scheduler and roll < 0.82:
            self.loop.do_work(limit)
        elif self.is_calm:
            return
        elif roll < 0.92:
            for _ in range(rng.choice([1, 1, 1, 12])):
                if len(self.requests) < REQUESTS_MAX:
                    self.submit()
        elif roll < 0.97:
            candidates = [*self.open_requests, rng.randrange(self.next_id)]
            self.abort(rng.choice(candidates))
        elif roll < 0.985:
            if shard in self.workers:
                self.kill_worker(shard)
        elif not without_scheduler:
            self.replace_scheduler()

    def settle(self) -> None:
        """No more requests and no more deaths: let all of them come to their ends."""
        self.is_calm = True
        for turn in range(200_000):
            if turn % 16 == 0 and self.is_quiet():
                return
            self.step()
        raise AssertionError(
            f"it never comes to rest: open={self.open_requests}, kept={self.outbox.kept_count}, "
            f"running={self.loop.running_count}, waiting={self.loop.waiting_count}, "
            f"workers={[worker.open_count for worker, _ in self.workers.values()]}, "
            f"used={[shmring.read_statistics(name).used_bytes for name in self.ring_names()]}"
        )

    def ring_names(self) -> list[str]:
        return ring_names(self.name, self.shards)

    def is_quiet(self) -> bool:
        return not (
            self.unnoticed
            or self.dead_shards
            or self.open_requests
            or self.outbox.kept_count
            or self.loop.running_count
            or self.loop.waiting_count
            or any(worker.open_count or worker.unsent_length for worker, _ in self.workers.values())
            or any(shmring.read_statistics(name).used_bytes for name in self.ring_names())
        )

    def close(self) -> None:
        self.port.close()
        for _, ends in self.workers.values():
            for end in ends:
                end.close()
        self.outbox.close()
        for reply in self.replies:
            reply.close()
        self.deployment.close()


def drop(ends: list[Any]) -> None:
    """End them as the kernel does for a killed process: the locks go, nothing is said."""
    for end in ends:
        end._attachment.mapping.handle.close()


def load_decoder_once(is_library: bool) -> Any:
    """A decoder of its own for each worker; now and then the other kind."""
    from manager.detokenize import DecoderKind

    return load_decoder(TOKENIZER, slots_max=256, kind=DecoderKind.LIBRARY if is_library else None)


def expected(shard: int, ids: list[int], params: dict[str, Any]) -> Request:
    """What an echo must give, worked out in the plainest way."""
    limit = CONTEXT_LENGTH - len(ids)
    if params["max_new_tokens"] is not None:
        limit = min(limit, params["max_new_tokens"])
    end: dict[str, Any] = {"type": "length", "length": limit} if limit <= len(ids) else {"type": "stop"}
    shown = ids[:limit]
    for position, token in enumerate(shown):
        if token in params.get("stop_token_ids", ()):
            end = {"type": "stop", "matched": token}
            is_trimmed = token != 0 and not params["no_stop_trim"]
            shown = shown[: position if is_trimmed else position + 1]
            break
    text = TOKENIZER.decode(shown, skip_special_tokens=params["skip_special_tokens"])
    for length in range(1, len(text) + 1):
        matched = next((stop for stop in params.get("stop", ()) if text[:length].endswith(stop)), None)
        if matched is not None:
            text = text[: length if params["no_stop_trim"] else length - len(matched)]
            end = {"type": "stop", "matched": matched}
            break
    return Request(shard, shown, text, end)


def test_every_request_ends_once_with_its_own_text(ring_name: str, seed: int) -> None:
    """Nobody hangs, nobody reads another's words, and after a year nothing is left over."""
    world = World(ring_name, seed)
    try:
        for _ in range(STEPS):
            world.step()
        world.settle()
        assert all(request.has_ended for request in world.requests.values())
        assert len(world.requests) > 5
    finally:
        world.close()


def test_without_deaths_and_aborts_every_request_has_its_whole_text(ring_name: str, seed: int) -> None:
    """Backpressure alone must cost nobody anything but time."""
    world = World(ring_name, seed)
    try:
        world.is_calm = True
        while len(world.requests) < 30:
            world.submit()
            for _ in range(world.rng.randrange(20)):
                world.step()
        world.settle()
        assert all(request.is_whole for request in world.requests.values())
    finally:
        world.close()
