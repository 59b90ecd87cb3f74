"""The whole manager and everything that it speaks to, in one process, under a seeded schedule.

The manager, its event loop's tasks, rings, shards, the scheduler's port and the engines' loop are the real
ones. What stands in: a loop that goes on when it is told to (stepped_loop), an engine that does what
each request says (scripted_engine), and death, which is a part dropped between two pieces of work or in
the midst of one, as SIGKILL ends it.

`step` lets one part do one piece of work and then looks whether everything that must hold at any
moment holds; `settle` goes on without new mischief until nothing is left of any request anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from clients import CONTEXT_LENGTH, TOKENIZER, TOKENIZER_FILE, Client, think_of_client, think_of_text
from fragile_parts import (
    InterruptedConsumer,
    InterruptedOutbox,
    WatchedManager,
    Worker,
    drop,
    malformed,
)
from scripted_engine import KilledError, ScriptedEngine, ScriptedPort
from stepped_loop import SteppedLoop, SteppedWaiter

import manager.intake
import manager.tokenizer_manager
import shmring
from manager import DisconnectedError, InternalError, Settings, UnavailableError, messages
from manager.deployment import egress_name, register_name, reply_name, ring_names
from manager.detokenize import DecoderKind, TableDecoder, choose, load_decoder
from manager.engines.loop import EngineLoop
from manager.errors import DeploymentEndedError, PartLostError, ValidationError
from manager.lifecycle import State
from manager.shard import DetokShard
from manager.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self


CLIENTS_MAX = 60
#: Steps in which nothing changes any more: it hangs. Time passes in one of 25.
IDLE_STEPS_MAX = 3000
LOOK_INTERVAL = 16
#: A part that died or a full ring, and the end of the manager.
MAY_END_A_QUESTION = (UnavailableError, DisconnectedError)
#: Requests that nobody will ever make begin here.
STRANGERS = 10**9

choose_once = functools.cache(choose)
load_tokenizer_once = functools.cache(load_tokenizer)


class World:
    """All parts. A context manager, which takes down what it has built also if the test fails."""

    def __init__(self, name: str, seed: int, *, is_stormy: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.name = name
        self.is_stormy = is_stormy
        """Parts die, clients go away, nonsense is sent."""
        self.is_calm = False
        """Nothing new comes, nobody dies."""
        self.shards = rng.choice([1, 2, 3, 5])
        self.truncates = rng.random() < 0.3
        self.slots_max = rng.choice([6, 256, 256]) if is_stormy else 256
        self.settings = Settings(
            name=name,
            tokenizer=TOKENIZER_FILE,
            workers=self.shards,
            context_length=CONTEXT_LENGTH,
            eos_token_ids=(272,),
            allow_auto_truncate=self.truncates,
            requests_max=rng.choice([6, 30, 4096]),
            ingress_capacity_bytes=8192,
            egress_capacity_bytes=4096,
            register_capacity_bytes=4096,
            reply_capacity_bytes=4096,
        )
        self.clients: list[Client] = []
        self._open_clients: list[Client] = []
        self.tasks: dict[Client, asyncio.Task[None]] = {}
        self.questions: list[asyncio.Task[None]] = []
        self.deaths = 0
        self.workers: dict[int, Worker] = {}
        self.engine_loop: EngineLoop | None = None
        self.is_closed = False
        worker, scheduler = rng.choice([(0.28, 0.20), (0.28, 0.20), (0.12, 0.36), (0.38, 0.14)])
        self._worker_share, self._scheduler_share = worker, scheduler
        """Of all work; the ring before the slower one fills up."""
        self._condemned: set[Client] = set()
        """Those whose one request is named in a frame that cannot be read: it must end of that."""
        self._busy: set[str] = set()
        """Parts in the midst of something, while others work."""
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        undo = self._undo
        waiters: list[SteppedWaiter] = []
        undo.enter_context(mock.patch.object(SteppedWaiter, "made", waiters, create=True))
        undo.enter_context(
            mock.patch.multiple(
                manager.tokenizer_manager,
                AsyncWaiter=SteppedWaiter,
                Outbox=InterruptedOutbox,
                _RECORDS_AT_ONCE=self.rng.choice([1, 3, 64]),
            )
        )
        undo.enter_context(
            mock.patch.multiple(manager.intake, choose=choose_once, load_tokenizer=load_tokenizer_once)
        )
        undo.enter_context(mock.patch.dict("os.environ", {"SHMRING_POISON": "1"}))
        self.loop = SteppedLoop()
        undo.callback(self._close_loop)
        self.manager = WatchedManager(self.settings, start_workers=False)
        self.manager.problems, self.manager.told_ends, self.manager.spoilt = [], set(), set()
        self.loop.run_alone(self.manager.start())
        undo.callback(self._close_parts)
        undo.callback(self.close)
        self.waiter = waiters[0]
        assert isinstance(self.manager._outbox, InterruptedOutbox)
        self.manager._outbox.let_others_work = lambda: self._interrupt("manager", 12, 0.2)
        for shard in range(self.shards):
            self._start_worker(shard)
        self._start_scheduler()
        self.loop.run_alone(self.manager.wait_until_ready(10))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def close(self) -> None:
        """Close the manager, whatever is going on in it."""
        if not self.is_closed:
            self.is_closed = True
            self.loop.run_alone(self.manager.close())

    def close_in_the_midst(self) -> None:
        """Close the manager with everything under way: all must hear of it, and nothing may be kept."""
        self.expect_the_end()
        self.close()
        self.let_clients_hear()
        self.check()
        assert not self.open_clients(), "somebody waits for a manager that was closed"
        assert self.manager.in_flight_count == 0

    def let_clients_hear(self) -> None:
        """Threads and readers do the last that they have to do; nobody else works."""
        for _ in range(100):
            for client in self.clients:
                client.read_on()
            while self.loop.jobs:
                self.loop.do_job(0)
            self.loop.turn()

    def _close_parts(self) -> None:
        for worker in self.workers.values():
            for end in worker.ends:
                end.close()
        if self.engine_loop is not None:
            self.port.close()

    def _close_loop(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        for _ in range(10):
            self.loop.turn()
        self.loop.close()

    def expect_the_end(self) -> None:
        """The manager is going to be closed: everybody may hear of it."""
        self.is_calm = True
        for client in self.clients:
            client.excuses |= {DisconnectedError, UnavailableError}

    # the parts

    def _start_worker(self, shard: int) -> None:
        ends: list[Any] = [
            shmring.Consumer.attach(egress_name(self.name, shard), takeover=True),
            shmring.Consumer.attach(register_name(self.name, shard)),
            shmring.Producer.attach(reply_name(self.name, shard), takeover=True),
        ]
        stage = DetokShard(
            egress=InterruptedConsumer(  # type: ignore[arg-type]
                ends[0], self._dies_now, lambda steps: self._interrupt(f"worker {shard}", steps)
            ),
            register=ends[1],
            reply=ends[2],
            decoder=self._decoder(),
        )
        self.workers[shard] = Worker(stage, ends)

    def _decoder(self) -> Any:
        choice = choose_once(TOKENIZER)
        if choice.table is None or self.rng.random() < 0.1:
            return load_decoder(TOKENIZER, slots_max=self.slots_max, kind=DecoderKind.LIBRARY)
        return TableDecoder(choice.table, slots_max=self.slots_max, reason=choice.reason)

    def _dies_now(self) -> bool:
        return self.is_stormy and not self.is_calm and self.rng.random() < 0.003

    def _start_scheduler(self) -> None:
        rng = self.rng
        engine = ScriptedEngine(context_length=CONTEXT_LENGTH, chunk=rng.choice([1, 2, 7, 50]))
        self.port = ScriptedPort.attach(self.name, continues_prompt=False)
        self.port.engine = engine
        self.port.let_others_work = self._step_beside_scheduler
        self.port.gives_up = lambda: bool(self._busy - {"scheduler"})
        self.engine_loop = EngineLoop(
            engine,
            self.port,
            running_max=rng.choice([3, 8, 256]),
            # with no room for what waits, an abort of what runs for ever would wait behind it for ever
            waiting_max=1024 if self.is_stormy else rng.choice([1, 64]),
        )

    def _step_beside_scheduler(self) -> None:
        if self._dies_now():
            raise KilledError
        with self._while_busy("scheduler"):
            self.step()

    def _may_interrupt(self) -> bool:
        """Whether the scheduler may work in the midst of what another part does.

        If it has to wait for that part there, it dies; so it works only where that is seldom.
        """
        names = [egress_name(self.name, shard) for shard in range(self.shards)]
        has_room = all(shmring.read_statistics(name).used_bytes < 1024 for name in names)
        return self.is_stormy and not self.is_calm and has_room

    def _interrupt(self, part: str, steps_max: int, chance: float = 0.05) -> None:
        """Let others work in the midst of what a part does, now and then."""
        if part not in self._busy and not self.is_closed and self.rng.random() < chance:
            with self._while_busy(part):
                for _ in range(self.rng.choice([1, steps_max])):
                    self.step()

    @contextlib.contextmanager
    def _while_busy(self, part: str) -> Iterator[None]:
        before = self._busy
        self._busy = before | {part}
        try:
            yield
        finally:
            self._busy = before

    def _kill_worker(self, shard: int) -> None:
        drop(self.workers.pop(shard).ends)
        self.deaths += 1

    def _kill_scheduler(self) -> None:
        drop([self.port._ingress, *self.port._egress])
        self.engine_loop = None
        self.deaths += 1

    def _let_worker_work(self, shard: int, limit: int) -> None:
        if f"worker {shard}" in self._busy:
            return
        worker = self.workers.get(shard)
        if worker is None:
            # dead for long enough that rings fill up
            if self.is_calm or self.rng.random() < 0.15:
                self._start_worker(shard)
            return
        try:
            worker.stage.do_work(limit)
        except KilledError:
            self._kill_worker(shard)
        except shmring.EndOfRing:
            assert self.is_closed

    def _let_scheduler_work(self, limit: int) -> None:
        if "scheduler" in self._busy or (self._busy and not self._may_interrupt()):
            return
        if self.engine_loop is None:
            if self.is_calm or self.rng.random() < 0.15:
                self._start_scheduler()
            return
        try:
            self.engine_loop.do_work(limit)
        except KilledError:
            self._kill_scheduler()
        except DeploymentEndedError:
            assert self.is_closed

    # the clients

    def add_client(self, client: Client | None = None) -> Client:
        """Let one more client come."""
        rng = self.rng
        if client is None:
            client = think_of_client(
                rng, len(self.clients), truncates=self.truncates, may_hold=self.is_stormy
            )
        if self.is_stormy:
            client.excuses.add(PartLostError)
            client.excuses.add(UnavailableError)
            open_rids = [other.rid for other in self.open_clients() if other.rid is not None]
            if open_rids and rng.random() < 0.04:
                client.request["rid"] = rng.choice(open_rids)
                client.excuses.add(ValidationError)
        else:
            client.leaves_after = None
        if self.slots_max < 256:
            client.excuses.add(UnavailableError)
        self.clients.append(client)
        self._open_clients.append(client)
        self.tasks[client] = self.loop.create_task(client.run(self.manager))
        return client

    def open_clients(self) -> list[Client]:
        """Those that wait for something; looks whether one has anything to complain of."""
        for client in self._open_clients:
            if client.problem is not None:
                raise AssertionError(f"{client.problem}: {client.request}") from client.problem
        self._open_clients = [client for client in self._open_clients if not self.tasks[client].done()]
        return self._open_clients

    def _give_up(self, client: Client) -> None:
        """Go away by one of the ways that there are, once or twice."""
        rid = client.rid
        if rid is None or self.rng.random() < 0.4:
            self.tasks[client].cancel()
            return
        for other in self.clients:
            if other.rid == rid:
                other.excuses.add(DisconnectedError)
        for _ in range(self.rng.choice([1, 1, 2])):
            self._abort(self.rng.choice([rid, rid, f"{rid}_0", f"{rid}_1", f"{rid}_0_1"]))

    def _go_at_once(self, client: Client) -> None:
        """Give up with the request just sent, before anybody has seen it."""
        for _ in range(4):
            self.loop.turn()
            while self.loop.jobs:
                self.loop.do_job(0)
        self._give_up(client)
        self.loop.turn()

    def _abort(self, rid: str) -> None:
        self.loop.call_soon(self.manager.abort, rid)

    def _put_question(self) -> None:
        ways = [self._ask, self._probe, self._detokenize, self._detokenize, self._tokenize]
        self.questions.append(self.loop.create_task(self.rng.choice(ways)()))

    async def _ask(self) -> None:
        with contextlib.suppress(*MAY_END_A_QUESTION):
            state = json.loads(await self.manager.ask_scheduler(b"how are you"))
            assert state["running"] >= 0

    async def _probe(self) -> None:
        await self.manager.probe()

    async def _detokenize(self) -> None:
        ids = TOKENIZER.encode(think_of_text(self.rng)).ids
        with contextlib.suppress(*MAY_END_A_QUESTION):
            assert await self.manager.detokenize(ids) == TOKENIZER.decode(ids)

    async def _tokenize(self) -> None:
        text = think_of_text(self.rng)
        with contextlib.suppress(*MAY_END_A_QUESTION):
            assert await self.manager.tokenize(text) == TOKENIZER.encode(text).ids

    # mischief

    def _push_strangers(self) -> None:
        """Output of requests that ended, and of some that never were."""
        last = next(self.manager._request_ids._numbers)
        past = [
            i for i in self.rng.sample(range(1, last + 1), min(last, 5)) if i not in self.manager._streams
        ]
        ids = np.array([*past, STRANGERS + self.rng.randrange(100)], np.uint64)
        counts = np.ones(len(ids), np.uint32)
        tokens = np.full(len(ids), 97, np.int32)
        self.port.engine.endings = {}
        try:
            self.port.push_batch(ids, counts, tokens)
        except KilledError:
            self._kill_scheduler()

    def _push_nonsense(self, *, is_reply: bool) -> None:
        """A frame that cannot be read, but names some requests of a shard."""
        sent = (State.QUEUED, State.STREAMING)
        streams = [stream for stream in self.manager._streams.values() if stream.state in sent]
        # rather such as nothing else will end
        lasting = [s for s in streams if (s.request.sampling.custom_params or {}).get("holds")]
        first = self.rng.choice([*(lasting or streams), None])
        shard = self.rng.randrange(self.shards) if first is None else first.shard
        named = [s for s in (lasting or streams) if s.shard == shard][:2]
        record_type: int = messages.ReplyType.TEXT if is_reply else messages.EgressType.BATCH
        if not is_reply:
            producer = self.port._egress[shard]
        elif shard in self.workers and f"worker {shard}" not in self._busy:
            producer = self.workers[shard].ends[2]
        else:
            return
        if producer.try_push(malformed([stream.request_id for stream in named]), record_type):
            if is_reply:
                self.manager.spoilt.update(stream.request_id for stream in named)
            for stream in named:
                owners = [client for client in self.open_clients() if client.rid == stream.request.client_rid]
                if len(owners) == 1 and len(owners[0].singles) == 1:
                    self._condemned.add(owners[0])
            rids = {stream.request.client_rid for stream in named}
            singles = {stream.request.rid for stream in named}
            for client in self.clients:
                if client.rid in rids or client.rid in singles or client.rid is None:
                    client.excuses.add(InternalError)

    # the schedule

    def step(self) -> None:
        """Let one part do one piece of work, and look at everything."""
        rng = self.rng
        limit = rng.choice([1, 2, 5, 64])
        shard = rng.randrange(self.shards)
        roll = rng.random()
        if roll < self._worker_share:
            self._let_worker_work(shard, limit)
        elif roll < self._worker_share + self._scheduler_share:
            self._let_scheduler_work(limit)
        elif "manager" in self._busy:
            return
        elif roll < 0.70:
            self.waiter.look()
            for _ in range(rng.choice([1, 1, 2, 5])):
                self.loop.turn()
        elif roll < 0.76:
            if self.loop.jobs:
                self.loop.do_job(rng.randrange(len(self.loop.jobs)))
        elif roll < 0.80:
            self.loop.now += rng.choice([0.001, 0.02, 0.3])
        elif roll < 0.84:
            open_clients = self.open_clients()
            for client in rng.sample(open_clients, min(len(open_clients), 3)):
                client.read_on()
        elif self.is_calm:
            for client in self.open_clients():
                client.read_on()
                if client.holds and client not in self._condemned:
                    self._give_up(client)
        elif roll < 0.92:
            for _ in range(rng.choice([1, 1, 1, 6])):
                if len(self.clients) < CLIENTS_MAX:
                    client = self.add_client()
                    if self.is_stormy and rng.random() < 0.08:
                        self._go_at_once(client)
        elif self.is_stormy:
            self._do_mischief(shard)
        if "manager" not in self._busy:
            self.check()

    def _do_mischief(self, shard: int) -> None:
        rng = self.rng
        has_worker = shard in self.workers and f"worker {shard}" not in self._busy
        has_scheduler = self.engine_loop is not None and "scheduler" not in self._busy
        roll = rng.random()
        if roll < 0.50:
            # what a damaged frame names must end of that
            others = [client for client in self.open_clients() if client not in self._condemned]
            if others:
                self._give_up(rng.choice(others))
            else:
                self._abort("client-that-never-was")
        elif roll < 0.59:
            if has_worker:
                self._kill_worker(shard)
        elif roll < 0.67:
            if has_scheduler:
                self._kill_scheduler()
        elif roll < 0.74:
            self._put_question()
        elif roll < 0.80:
            if has_scheduler:
                self._push_strangers()
        elif roll < 0.92:
            if has_scheduler:
                self._push_nonsense(is_reply=False)
        else:
            self._push_nonsense(is_reply=True)

    def check(self) -> None:
        """What must hold at any moment. The clients judge what they get."""
        busy = {client.rid for client in self.open_clients()}
        assert not self.manager.problems, self.manager.problems
        assert not self.loop.problems, self.loop.problems
        for task in self.questions:
            if task.done() and task.exception() is not None:
                raise AssertionError("a question ended badly") from task.exception()
        streams, rids = self.manager._streams, self.manager._rids
        assert len(streams) <= self.settings.requests_max
        assert {stream.request.rid: request_id for request_id, stream in streams.items()} == rids
        assert not [stream for stream in streams.values() if stream.is_ended], "a request that ended is kept"
        if None not in busy:
            kept = {stream.request.client_rid for stream in streams.values()}
            strangers = {rid for rid in kept - busy if not rid.startswith("HEALTH")}
            assert not strangers, f"requests of clients that have gone are kept: {strangers}"

    def settle(self) -> None:
        """No more requests and no more deaths: let all of them come to their ends."""
        if self.is_stormy and not self.is_calm and self.engine_loop is not None:
            # nobody dies from here on, which would end what they name
            self._push_nonsense(is_reply=False)
            self._push_nonsense(is_reply=True)
        self.is_calm = True
        before: dict[str, Any] = {}
        idle_steps = 0
        while idle_steps < IDLE_STEPS_MAX:
            left = self.left()
            if not any(left.values()):
                return
            idle_steps = idle_steps + LOOK_INTERVAL if left == before else 0
            before = left
            for _ in range(LOOK_INTERVAL):
                self.step()
        raise AssertionError(f"it never comes to rest: { ({what: n for what, n in left.items() if n}) }")

    def left(self) -> dict[str, Any]:
        """What is kept of any request anywhere, and what else is going on."""
        watched, engine_loop = self.manager, self.engine_loop
        left: dict[str, Any] = {
            "clients": len(self.open_clients()),
            "questions": sum(not task.done() for task in self.questions),
            "requests": len(watched._streams),
            "rids": len(watched._rids),
            "questions of the manager": len(watched._controls) + len(watched._decodes),
            "aborts to be sent": watched._outbox.kept_count,
            "tasks": len(watched._ending),
            "jobs": len(self.loop.jobs),
            "missing parts": watched.missing_parts(),
            "deaths that the manager has not noticed": self._unnoticed(),
            "scheduler": engine_loop is None or engine_loop.running_count + engine_loop.waiting_count,
            "dead workers": self.shards - len(self.workers),
        }
        for shard, worker in self.workers.items():
            stage = worker.stage
            left[f"worker {shard}"] = stage.open_count + len(stage._texts_wanted) + len(stage._unsent)
        for name in ring_names(self.name, self.shards):
            left[name] = shmring.read_statistics(name).used_bytes
        return left

    def _unnoticed(self) -> list[str]:
        parts = self.manager._parts
        ends = {f"worker {i}": reply.statistics().producer for i, reply in enumerate(self.manager._replies)}
        ends["scheduler"] = self.manager._ingress.statistics().consumer
        return [label for label, end in ends.items() if parts.attaches(label) != end.attaches]

    def all_singles(self) -> list[Any]:
        """Every single request of every client."""
        return [single for client in self.clients for single in client.singles.values()]
