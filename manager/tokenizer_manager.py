"""The tokenizer manager: takes text in, gives token ids to a scheduler, streams text out.

    async with TokenizerManager(settings) as manager:
        await manager.wait_until_ready()
        async for output in manager.generate(GenerateRequest(text="Once upon a time", stream=True)):
            print(output.text, end="")

It lives in one event loop and waits for nobody: tokenizing happens in threads, ring ends only
ever try, one thread sleeps for all replies. Everything that can grow has a bound in `Settings`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from typing import TYPE_CHECKING, Any, Final

import shmring
from manager.arguments import as_bytes
from manager.deployment import Deployment, egress_name, ingress_name, register_name, reply_name
from manager.errors import (
    ConfigError,
    DisconnectedError,
    InternalError,
    ManagerError,
    PartLostError,
    QueueFullError,
    UnavailableError,
    ValidationError,
    error_of_status,
)
from manager.ids import RequestIds, mint_health_rid, shard_of
from manager.inbox import Inbox
from manager.intake import Intake
from manager.lifecycle import Event, State
from manager.outbox import Outbox
from manager.output import GenerateOutput, merged_outputs, outputs_of
from manager.questions import Questions
from manager.request import GenerateRequest, SingleRequest, check_flag, fan_out
from manager.stream import RequestStream
from manager.supervisor import Supervisor, part_commands
from manager.watch import SCHEDULER, PartHealth, PartState, PartWatch, worker_label
from shmring import AsyncWaiter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Self

    from manager.config import Settings
    from manager.extras import Extras
    from manager.finish import FinishReason

log = logging.getLogger(__name__)

_RECORDS_AT_ONCE: Final = 64
#: Seconds between two tries of what did not fit a ring.
_RETRY_S: Final = 0.001
_RETRY_MAX_S: Final = 0.05
_ABORT_FLUSH_S: Final = 0.5
#: Seconds that a dead worker's last replies may take to be read.
_LAST_WORDS_S: Final = 0.5


class TokenizerManager:
    """The manager of one deployment. Use it as an async context manager."""

    def __init__(
        self,
        settings: Settings,
        *,
        engine: str | None = None,
        start_workers: bool = True,
        request_ids: RequestIds | None = None,
    ) -> None:
        """`engine`: an embedded engine to start as the scheduler; None: somebody's own attaches.

        `start_workers` False: somebody else starts `python -m manager worker`.
        """
        self._settings = settings
        self._commands = part_commands(settings, engine=engine, start_workers=start_workers)
        self._intake = Intake(settings, self._end)
        self._request_ids = request_ids or RequestIds()
        self._streams: dict[int, RequestStream] = {}
        self._rids: dict[str, int] = {}
        self._controls = Questions[bytes](settings.requests_max)
        self._decodes = Questions[str](settings.requests_max)
        self._broken_shards: dict[int, str] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._state = "new"

    async def start(self) -> None:
        """Make the deployment and start its parts, once. Raises before anything is left behind."""
        if self._state != "new":
            raise RuntimeError(f"a manager is started once: state={self._state}")
        settings = self._settings
        self._loop = asyncio.get_running_loop()
        facts = await self._intake.load()
        self.limits = self._intake.limits
        with contextlib.ExitStack() as undo:
            undo.callback(self._intake.stop)
            self._deployment = Deployment(settings, facts)
            undo.callback(self._deployment.close)
            self._supervisor = Supervisor(restarts_max=settings.restarts_max)
            undo.callback(self._supervisor.stop, settings.stop_timeout_s)
            self._take_ends(undo)
            self._waiter = AsyncWaiter()
            undo.callback(self._waiter.close)
            self._supervisor.start_all(self._commands, self._deployment.deployment_id)
            self._undo = undo.pop_all()
        self._state = "running"
        self._flusher: asyncio.Task[None] | None = None
        self._tasks = [
            asyncio.create_task(self._serve_replies(shard)) for shard in range(settings.workers)
        ] + [asyncio.create_task(self._watch())]
        *readers, watch = self._tasks
        for shard, task in enumerate(readers):
            task.add_done_callback(functools.partial(self._end_with, [shard]))
        watch.add_done_callback(functools.partial(self._end_with, list(range(settings.workers))))

    def _take_ends(self, undo: contextlib.ExitStack) -> None:
        settings, deployment, name = self._settings, self._deployment, self._settings.name
        # takeover everywhere: a part that dies is replaced, and `_watch` tells of it
        self._ingress = undo.enter_context(deployment.ring(ingress_name(name)).producer(takeover=True))
        registers = [
            undo.enter_context(deployment.ring(register_name(name, shard)).producer(takeover=True))
            for shard in range(settings.workers)
        ]
        self._outbox = Outbox(self._ingress, registers)
        self._replies = [
            undo.enter_context(deployment.ring(reply_name(name, shard)).consumer(takeover=True))
            for shard in range(settings.workers)
        ]
        self._inboxes = [Inbox(reply, self) for reply in self._replies]
        self._parts = PartWatch(
            self._ingress,
            self._replies,
            [deployment.ring(egress_name(name, shard)) for shard in range(settings.workers)],
            stalled_after_s=settings.stalled_after_s,
            clock=time.monotonic,
        )

    async def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Wait for a scheduler and all workers. False: `timeout_s` has passed; see `missing_parts`.

        Raises ConfigError if a part that we started cannot start, UnavailableError if the manager
        is closed meanwhile.
        """
        seconds = shmring.check_timeout(timeout_s)
        self._check_running()
        deadline = None if seconds is None else self._loop.time() + seconds
        while self.missing_parts():
            self._look_at_parts()
            for label in self.missing_parts():
                self._check_start(label)
            if deadline is not None and self._loop.time() >= deadline:
                return not self.missing_parts()
            await asyncio.sleep(0.01)
            self._check_running()
        return True

    def _check_start(self, label: str) -> None:
        """A part that ended before it ever was ready will not be ready the next time either."""
        if self._supervisor.is_ours(label) and not self._parts.attaches(label):
            code = self._supervisor.exit_code(label)
            if code is not None:
                raise ConfigError(f"{label} cannot start: exit_code={code}", setting=label)

    def missing_parts(self) -> list[str]:
        """The parts that are not there: "scheduler", "worker 0", ... Of a manager that does not run, all."""
        return self._parts.missing() if self._state == "running" else self._labels()

    def _labels(self) -> list[str]:
        return [SCHEDULER, *map(worker_label, range(self._settings.workers))]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        """Serve a request: its output as it comes (stream) or each prompt's whole output at its end.

        Raises ValidationError (400), UnavailableError (503) and what ends the request; in a batch
        a request that fails ends with an output that carries its `error`, and the others go on.
        Leaving the iteration early aborts what is still running.
        """
        self._check_running()
        if not isinstance(request, GenerateRequest):
            raise TypeError(f"generate takes a GenerateRequest: type={type(request).__name__}")
        settings = self._settings
        streams = self._open(
            fan_out(request, preferred=settings.preferred_sampling, accumulated=settings.accumulated_output)
        )
        try:
            self._intake.check(streams)
            await self._intake.tokenize(streams)
            for stream in streams:
                self._dispatch(stream)
            if len(streams) == 1 and not request.is_batch:
                async for output in outputs_of(streams[0]):
                    yield output
            else:
                async for output in merged_outputs(streams):
                    yield output
        finally:
            for stream in streams:
                self._leave(stream)

    def _open(self, singles: list[SingleRequest]) -> list[RequestStream]:
        """Give all of them a place in the tables, or none. From here on each can be aborted."""
        for single in singles:
            if single.rid in self._rids:
                raise ValidationError(f"rid is in flight already: rid={single.rid}", field="rid")
        flying = len(self._streams) + len(singles)
        if flying > self._settings.requests_max:
            raise QueueFullError(
                f"too many requests in flight: count={flying}, max={self._settings.requests_max}"
            )
        streams = []
        for single in singles:
            request_id = self._request_ids.take()
            stream = RequestStream(request_id, shard_of(request_id, self._settings.workers), single)
            self._streams[request_id] = stream
            self._rids[single.rid] = request_id
            streams.append(stream)
        return streams

    def _dispatch(self, stream: RequestStream) -> None:
        """Send one request on its way, or end it with the reason why not."""
        if stream.is_ended:
            return
        try:
            self._check_running()
            self._check_ready(SCHEDULER)
            self._check_shard(stream.shard)
            dispatch, stream.dispatch = stream.dispatch, None
            assert dispatch is not None, "a request is dispatched once"
            self._outbox.send(dispatch)
            stream.move(Event.PRE_SEND_VALIDATED)
        except ManagerError as error:
            self._keep_flushing()
            self._end(stream, error)
        except shmring.RecordTooLargeError as error:
            self._outbox.deregister(stream.request_id)
            self._keep_flushing()
            text = f"request does not fit a ring: length={error.length}, max={error.length_max}"
            field = "attachments" if stream.request.attachments else "input_ids"
            self._end(stream, ValidationError(text, field=field))

    def health(self) -> dict[str, PartHealth]:
        """Each part at the last look, by its label; nothing is asked of anybody, so it costs nothing.

        Told from the roles that the kernel holds and from counters in the rings: a scheduler that is
        busy or has nothing to do is healthy, one that hangs or is stopped is not. Before the start and
        after the end none is.
        """
        if self._state != "running":
            state = PartState.WAITING if self._state == "new" else PartState.LOST
            return dict.fromkeys(self._labels(), PartHealth(state, pulse_age_s=None, is_healthy=False))
        health = self._parts.health()
        for shard in self._broken_shards:
            label = worker_label(shard)
            health[label] = dataclasses.replace(health[label], is_healthy=False)
        return health

    async def probe(self, timeout_s: float | None = 20.0) -> bool:
        """Generate one token, through all parts. False: no answer in time, or an error."""
        seconds = shmring.check_timeout(timeout_s)
        request = GenerateRequest(
            input_ids=[0],
            rid=mint_health_rid(),
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
        )

        async def generate() -> None:
            async with contextlib.aclosing(self.generate(request)) as outputs:
                async for _ in outputs:
                    pass

        try:
            await asyncio.wait_for(generate(), seconds)
        except (ManagerError, TimeoutError, asyncio.TimeoutError):
            return False
        return True

    async def ask_scheduler(self, payload: bytes, timeout_s: float | None = 5.0) -> bytes:
        """Put a question to the scheduler and wait for its answer; both are the scheduler's own language.

        An embedded engine answers everything with its state as JSON. Raises UnavailableError if
        there is no scheduler, or no answer in time; ValidationError if the question never fits a ring.
        """
        data, seconds = as_bytes("payload", payload), shmring.check_timeout(timeout_s)
        self._check_running()
        self._check_ready(SCHEDULER)
        control_id = self._request_ids.take()
        (answer,) = await self._controls.ask(
            control_id, SCHEDULER, lambda: self._outbox.ask(control_id, data), seconds
        )
        return answer

    async def tokenize(self, text: str) -> list[int]:
        """Return the ids that a prompt of this text has, special tokens included.

        Raises ValidationError for no text, or one that is too long, or where there is no tokenizer.
        """
        self._check_running()
        (ids,) = await self._intake.encode([self._intake.checked_text(text)])
        found: list[int] = ids.tolist()
        return found

    async def detokenize(
        self,
        token_ids: Sequence[int] | NDArray[Any],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        timeout_s: float | None = 20.0,
    ) -> str:
        """Return the text of ids that are a whole text, decoded by a worker; no scheduler is needed.

        An id outside of the vocabulary adds nothing. Raises ValidationError for what are no ids, for
        more of them than a register ring takes, and where there is no tokenizer; UnavailableError if
        the worker is not there, or does not answer in time.
        """
        seconds = shmring.check_timeout(timeout_s)
        self._check_running()
        ids = self._intake.checked_ids(token_ids)
        skip = check_flag("skip_special_tokens", skip_special_tokens)
        spaces = check_flag("spaces_between_special_tokens", spaces_between_special_tokens)
        request_id = self._request_ids.take()
        shard = shard_of(request_id, self._settings.workers)
        self._check_shard(shard)

        def send() -> None:
            self._outbox.decode(
                request_id,
                ids,
                skip_special_tokens=skip,
                spaces_between_special_tokens=spaces,
            )

        return "".join(await self._decodes.ask(request_id, worker_label(shard), send, seconds))

    def _check_ready(self, label: str) -> None:
        if not self._parts.is_ready(label):
            raise UnavailableError(f"part is not there: part={label}, name={self._settings.name}")

    def _check_shard(self, shard: int) -> None:
        if shard in self._broken_shards:
            raise InternalError(self._broken_shards[shard])
        self._check_ready(worker_label(shard))

    def abort(self, rid: str) -> int:
        """Abort the requests that the client calls `rid`; returns how many there were.

        Each ends with DisconnectedError. An unknown or empty rid aborts nothing.
        """
        found = [
            stream
            for stream in self._streams.values()
            if rid and rid in (stream.request.rid, stream.request.client_rid)
        ]
        for stream in found:
            self._abort(stream, DisconnectedError(f"request was aborted: rid={stream.request.rid}"))
        return len(found)

    def _abort(self, stream: RequestStream, error: ManagerError) -> None:
        """The scheduler first, then the state: the other way round a zombie would run on."""
        if stream.state in (State.QUEUED, State.STREAMING):
            self._outbox.abort(stream.request_id)
            self._outbox.deregister(stream.request_id)
            self._keep_flushing()
        self._end(stream, error)

    def _end(self, stream: RequestStream, error: ManagerError) -> None:
        """End a request with an error; whoever has to be told of it was told."""
        self._forget(stream)
        stream.fail(error)

    def _leave(self, stream: RequestStream) -> None:
        """The reader has gone; whatever still runs for it is stopped."""
        if not stream.is_ended:
            self._abort(stream, DisconnectedError("the reader has gone"))
        self._forget(stream)

    def _forget(self, stream: RequestStream) -> None:
        """The rid is free again before the last event is handed over."""
        self._streams.pop(stream.request_id, None)
        if self._rids.get(stream.request.rid) == stream.request_id:
            del self._rids[stream.request.rid]

    def on_text(
        self,
        request_id: int,
        text: str,
        token_ids: list[int],
        completion_count: int,
        reason: FinishReason | None,
    ) -> None:
        """Hand a chunk to its request; one that has ended does not hear of it."""
        stream = self._streams.get(request_id)
        if stream is None:
            self._decodes.answer(request_id, text, is_last=reason is not None)
            return
        if reason is not None:
            self._forget(stream)
            status = reason.abort_status()
            if status is not None:
                if text or token_ids:
                    stream.add(text, token_ids, completion_count, None)
                stream.fail(error_of_status(*status))
                return
        stream.add(text, token_ids, completion_count, reason)

    def on_extras(self, request_id: int, extras: Extras) -> None:
        """Keep what belongs to the next chunk of its request."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.stage(extras)

    def on_fail(self, request_id: int, error: ManagerError) -> None:
        """End a request with an error that a worker or the scheduler found."""
        stream = self._streams.get(request_id)
        if stream is None:
            self._decodes.fail(request_id, error)
        else:
            self._end(stream, error)

    def on_abort_asked(self, request_id: int) -> None:
        """Pass a worker's wish on to the scheduler."""
        if request_id in self._decodes:
            return  # the scheduler never heard of it
        self._outbox.abort(request_id)
        if request_id in self._streams:
            # it ends by a reply that could not be read: its worker takes it for alive
            self._outbox.deregister(request_id)
        self._keep_flushing()

    def on_result(self, control_id: int, payload: bytes) -> None:
        """Hand an answer to whoever asked; nobody may wait for it any more."""
        self._controls.answer(control_id, payload)

    async def _serve_replies(self, shard: int) -> None:
        reply, inbox = self._replies[shard], self._inboxes[shard]
        try:
            while True:
                await self._waiter.wait_until_readable(reply)
                while inbox.do_work(_RECORDS_AT_ONCE):
                    await asyncio.sleep(0)
        except shmring.ShmringError as error:
            # nothing can come from this shard any more; its requests must not wait for it
            self._break(shard, f"reply ring cannot be read: why={error}")

    def _end_with(self, shards: list[int], task: asyncio.Task[None]) -> None:
        """Without its task nobody would hear of these shards again: end what waits for them."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a task of the manager has failed: shards=%s", shards, exc_info=error)
            for shard in shards:
                self._break(shard, f"internal error: the manager cannot go on: why={error!r}")

    def _break(self, shard: int, problem: str) -> None:
        """End what waits for this shard, and refuse what would."""
        if shard in self._broken_shards:
            return
        log.error("shard is broken: shard=%d, why=%s", shard, problem)
        self._broken_shards[shard] = problem
        for stream in [stream for stream in self._streams.values() if stream.shard == shard]:
            self._abort(stream, InternalError(problem))
        for question_id in self._decodes.put_to(worker_label(shard)):
            self._decodes.fail(question_id, InternalError(problem))

    def _keep_flushing(self) -> None:
        if self._outbox.kept_count and (self._flusher is None or self._flusher.done()):
            self._flusher = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        pause_s = _RETRY_S
        while self._outbox.flush():
            await asyncio.sleep(pause_s)
            # a reader that does not come back must not keep us busy
            pause_s = min(2 * pause_s, _RETRY_MAX_S)

    async def _watch(self) -> None:
        while True:
            self._look_at_parts()
            self._supervisor.restart_dead()
            await asyncio.sleep(self._settings.check_interval_s)

    def _look_at_parts(self) -> None:
        lost = self._parts.look()
        for shard in range(self._settings.workers):
            if worker_label(shard) in lost:
                self._lose(worker_label(shard), [shard])
        if SCHEDULER in lost:
            self._lose(SCHEDULER, [])
        for name, shards in self._deployment.truncated().items():
            for shard in shards:
                self._break(shard, f"ring was cut short: ring={name}")

    def _lose(self, label: str, shards: list[int]) -> None:
        """A part has gone: end what had been sent to it. What is not sent yet meets what is there then."""
        lost = [
            stream
            for stream in self._streams.values()
            if stream.state in (State.QUEUED, State.STREAMING) and (not shards or stream.shard in shards)
        ]
        log.warning("part has gone: part=%s, requests=%d", label, len(lost))
        asked = [*self._controls.put_to(label), *self._decodes.put_to(label)]
        task = asyncio.create_task(self._end_lost(label, shards, lost, asked))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_lost(
        self, label: str, shards: list[int], lost: list[RequestStream], asked: list[int]
    ) -> None:
        """End requests of a part that has gone, those apart that its last words end well.

        The aborts reach a scheduler's successor behind the requests that it may find in the ring.
        """
        for shard in shards:
            # what it had published is still good; only the waiter's side may touch that end
            published = self._replies[shard].statistics().producer.position
            deadline = self._loop.time() + _LAST_WORDS_S
            while (
                self._replies[shard].statistics().consumer.position < published
                and shard not in self._broken_shards
                and self._loop.time() < deadline
            ):
                await asyncio.sleep(_RETRY_S)
        for stream in lost:
            if not stream.is_ended:
                self._abort(stream, PartLostError(f"part has died: part={label}", part=label))
        for question_id in asked:
            self._fail_question(question_id, PartLostError(f"part has died: part={label}", part=label))

    def _fail_question(self, question_id: int, error: ManagerError) -> None:
        self._controls.fail(question_id, error)
        self._decodes.fail(question_id, error)

    @property
    def in_flight_count(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def _check_running(self) -> None:
        if self._state != "running":
            raise UnavailableError(f"the manager is not running: state={self._state}")

    async def close(self) -> None:
        """End everything in order: requests, scheduler, workers, names. Twice is once.

        Whoever calls it while it is going on waits for its end too. It goes on if the caller is
        cancelled.
        """
        if self._state == "running":
            self._state = "closed"
            self._intake.stop()
            self._closing = asyncio.create_task(self._close())
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        with self._undo:  # what follows is the good order; this is done in any case
            for stream in list(self._streams.values()):
                self._abort(stream, DisconnectedError("the manager is shutting down"))
            for question_id in [*self._controls.put_to(None), *self._decodes.put_to(None)]:
                self._fail_question(question_id, DisconnectedError("the manager is shutting down"))
            deadline = self._loop.time() + _ABORT_FLUSH_S
            while self._outbox.flush() and self._loop.time() < deadline:
                await asyncio.sleep(_RETRY_S)
            tasks = [task for task in (*self._tasks, *self._ending, self._flusher) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._waiter.close()
            self._outbox.close()
            await self._loop.run_in_executor(None, self._supervisor.stop, self._settings.stop_timeout_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
