"""The scheduler loop of the embedded engines: continuous batching.

Every turn takes in what has arrived, starts what there is room for, moves every running request
one step on and sends the step as one batch. It runs wherever somebody calls `do_work`: in a
process of its own through `run_engine`, or step by step beside everything else in one process.

An aborted request is dropped without a word: nobody is there to hear it. A request that cannot be
served ends with an error of its own, and the loop goes on.
"""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING

from manager.engines.engine import Admitted
from manager.errors import ManagerError
from manager.extras import ExtrasAsked
from manager.sampling import decode_extras

if TYPE_CHECKING:
    from collections.abc import Callable

    from manager.engines.engine import Engine
    from manager.engines.port import Arrivals, Port

RUNNING_MAX = 256  # rows of a batch, what a server of some size runs at once
# Drained, not started. As many as a manager lets in by default, so that a ring is never left full of
# requests with aborts behind them; a manager that lets in more makes those wait.
WAITING_MAX = 16384
DRAIN_MAX = 64  # requests taken in before a step: bounds what new ones add to the others' latency
IDLE_WAIT_S = 0.1  # how long should_stop may go unasked while nothing runs


class EngineLoop:
    """One engine at one port."""

    def __init__(
        self,
        engine: Engine,
        port: Port,
        *,
        running_max: int = RUNNING_MAX,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        assert running_max > 0
        assert waiting_max > 0
        self._engine = engine
        self._port = port
        self._running_max = running_max
        self._waiting_max = waiting_max
        self._waiting: deque[Admitted] = deque()
        self.pushed_token_count = 0

    @property
    def running_count(self) -> int:
        """Requests in the batch."""
        return self._engine.running_count

    @property
    def waiting_count(self) -> int:
        """Requests that were taken in and wait for room in the batch."""
        return len(self._waiting)

    def do_work(self, limit: int) -> int:
        """Take in at most `limit` requests and make one step.

        Returns how much was done, in requests taken in, aborts obeyed and rows pushed; 0 means
        that there is nothing to do until something arrives.
        """
        done = self._take_in(min(limit, self._waiting_max - len(self._waiting)))
        self._start_waiting()
        if self._engine.running_count:
            output = self._engine.step()
            self._port.push_batch(
                output.request_ids,
                output.token_counts,
                output.token_ids,
                output.finish_codes,
                output.finish_values,
                extras=output.extras,
            )
            self.pushed_token_count += len(output.token_ids)
            done += len(output.request_ids)
        return done

    def _take_in(self, limit: int) -> int:
        """Drain. With no room left nothing is drained, and aborts wait behind the requests before them."""
        if limit <= 0:
            return 0
        arrivals = self._port.drain(limit)
        count, abort_count = len(arrivals.request_ids), len(arrivals.aborts)
        for control in arrivals.controls:
            self._port.push_result(control.control_id, self._state())
        aborted: set[int] = set()
        if abort_count:
            aborted.update(arrivals.aborts.tolist())
            self._engine.drop(arrivals.aborts)
            self._waiting = deque(request for request in self._waiting if request.request_id not in aborted)
        if count:
            self._queue(arrivals, aborted)
        return count + abort_count + len(arrivals.controls)

    def _state(self) -> bytes:
        """Answer a control request: what the loop is at, as JSON."""
        state = {
            "running": self._engine.running_count,
            "waiting": len(self._waiting),
            "pushed_tokens": self.pushed_token_count,
        }
        return json.dumps(state).encode()

    def _queue(self, arrivals: Arrivals, aborted: set[int]) -> None:
        """Copy the requests out of the columns, for those may be views of the ring."""
        prompt_end = stop_end = logprob_end = 0
        sampling = arrivals.sampling.copy()
        for row, (request_id, prompt_count, stop_count, logprob_count, options) in enumerate(
            zip(
                arrivals.request_ids.tolist(),
                arrivals.prompt_counts.tolist(),
                arrivals.stop_token_counts.tolist(),
                arrivals.token_id_logprob_counts.tolist(),
                arrivals.options.tolist(),
                strict=True,
            )
        ):
            prompt_begin, prompt_end = prompt_end, prompt_end + prompt_count
            stop_begin, stop_end = stop_end, stop_end + stop_count
            logprob_begin, logprob_end = logprob_end, logprob_end + logprob_count
            if request_id in aborted:
                continue
            if arrivals.attachments[row]:
                # an answer that ignored an image would look like a broken model to the client
                self._port.push_error(request_id, "the engine takes no attachments: field=attachments")
                continue
            try:
                extras = decode_extras(arrivals.extras[row]) if arrivals.extras[row] else {}
            except ManagerError as error:
                self._port.push_error(request_id, str(error))
                continue
            self._waiting.append(
                Admitted(
                    request_id=request_id,
                    prompt_ids=arrivals.prompt_ids[prompt_begin:prompt_end].copy(),
                    sampling=sampling[row],
                    stop_token_ids=arrivals.stop_token_ids[stop_begin:stop_end].copy(),
                    extras=extras,
                    asked=ExtrasAsked.of_row(
                        options, arrivals.token_ids_logprob[logprob_begin:logprob_end].tolist()
                    ),
                )
            )

    def _start_waiting(self) -> None:
        while self._waiting and self._engine.running_count < self._running_max:
            request = self._waiting.popleft()
            try:
                self._engine.admit(request)
            except ManagerError as error:
                self._port.push_error(request.request_id, str(error))


def run_engine(engine: Engine, port: Port, *, should_stop: Callable[[], bool]) -> int:
    """Serve a port until told to stop, parked while there is nothing to do.

    Returns the number of tokens pushed. What the port raises (the deployment ended, a ring is
    broken) goes through to the caller.
    """
    loop = EngineLoop(engine, port)
    while not should_stop():
        if not loop.do_work(DRAIN_MAX):
            port.wait(IDLE_WAIT_S)
    return loop.pushed_token_count
