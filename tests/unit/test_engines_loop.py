"""The loop of the embedded engines, at a port that is played by lists."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from manager.engines.echo import EchoEngine
from manager.engines.loop import EngineLoop, run_engine
from manager.extras import NOTHING_ASKED, OPTIONS_DTYPE, ExtrasAsked
from manager.finish import FinishCode
from manager.sampling import SAMPLING_DTYPE

if TYPE_CHECKING:
    from manager.engines.port import Port


@dataclass
class Request:
    request_id: int
    prompt_ids: list[int]
    stop_token_ids: list[int] = field(default_factory=list)
    extras: bytes = b""
    sampling: dict[str, Any] = field(default_factory=dict)
    asked: ExtrasAsked = NOTHING_ASKED
    attachments: bytes = b""


@dataclass
class Question:
    control_id: int
    payload: bytes = b"?"


@dataclass
class Columns:
    request_ids: np.ndarray
    prompt_counts: np.ndarray
    prompt_ids: np.ndarray
    sampling: np.ndarray
    stop_token_counts: np.ndarray
    stop_token_ids: np.ndarray
    options: np.ndarray
    token_id_logprob_counts: np.ndarray
    token_ids_logprob: np.ndarray
    extras: list[bytes]
    attachments: list[bytes]
    aborts: np.ndarray
    controls: list[Question]


class FakePort:
    """Requests go in by `send`; what the loop pushed is in `answers`, `ends` and `errors`.

    Like a ring it takes its memory back: the columns of a drain are overwritten at the next one.
    """

    vocab_size = 4096
    context_length = 1000
    eos_token_ids = (0,)

    def __init__(self) -> None:
        self.sent: deque[Request] = deque()
        self.aborts: list[int] = []
        self.controls: list[Question] = []
        self.results: dict[int, bytes] = {}
        self.answers: dict[int, list[int]] = {}
        self.ends: dict[int, tuple[FinishCode, int]] = {}
        self.errors: dict[int, str] = {}
        self.batch_sizes: list[int] = []
        self.extras: list[Any] = []
        self.waits: list[float | None] = []
        self._lent: list[np.ndarray] = []

    def send(self, *requests: Request) -> None:
        self.sent.extend(requests)

    def wait(self, timeout_s: float | None) -> bool:
        self.waits.append(timeout_s)
        return bool(self.sent or self.aborts or self.controls)

    def drain(self, max_requests: int) -> Columns:
        for column in self._lent:
            column.view(np.uint8)[...] = 0xEE
        rows = [self.sent.popleft() for _ in range(min(max_requests, len(self.sent)))]
        sampling = np.zeros(len(rows), SAMPLING_DTYPE)
        sampling["max_new_tokens"] = -1
        for i, row in enumerate(rows):
            for name, value in row.sampling.items():
                sampling[name][i] = value
        columns = Columns(
            request_ids=np.array([row.request_id for row in rows], np.uint64),
            prompt_counts=np.array([len(row.prompt_ids) for row in rows], np.uint32),
            prompt_ids=np.array([i for row in rows for i in row.prompt_ids], np.int32),
            sampling=sampling,
            stop_token_counts=np.array([len(row.stop_token_ids) for row in rows], np.uint32),
            stop_token_ids=np.array([i for row in rows for i in row.stop_token_ids], np.int32),
            options=np.array([row.asked.to_row() for row in rows], OPTIONS_DTYPE),
            token_id_logprob_counts=np.array([len(row.asked.token_ids_logprob) for row in rows], np.uint32),
            token_ids_logprob=np.array([i for row in rows for i in row.asked.token_ids_logprob], np.int32),
            extras=[row.extras for row in rows],
            attachments=[row.attachments for row in rows],
            aborts=np.array(self.aborts, np.uint64),
            controls=self.controls,
        )
        self.aborts = []
        self.controls = []
        self._lent = [column for column in vars(columns).values() if isinstance(column, np.ndarray)]
        return columns

    def push_batch(
        self, request_ids, token_counts, token_ids, finish_codes, finish_values, *, extras=None
    ) -> None:
        self.extras.append(extras)
        assert int(token_counts.sum()) == len(token_ids)
        self.batch_sizes.append(len(request_ids))
        begin = 0
        for request_id, count, code, value in zip(
            request_ids.tolist(),
            token_counts.tolist(),
            finish_codes.tolist(),
            finish_values.tolist(),
            strict=True,
        ):
            assert request_id not in self.ends
            self.answers.setdefault(request_id, []).extend(token_ids[begin : begin + count].tolist())
            begin += count
            if code:
                self.ends[request_id] = FinishCode(code), value

    def push_result(self, control_id: int, payload: bytes) -> None:
        self.results[control_id] = payload

    def push_error(self, request_id: int, message: str) -> None:
        assert request_id not in self.errors
        self.errors[request_id] = message


@pytest.fixture
def port() -> FakePort:
    return FakePort()


def loop_at(port: FakePort, **settings: int) -> EngineLoop:
    typed: Port = port
    return EngineLoop(EchoEngine(context_length=port.context_length), typed, **settings)


def run(loop: EngineLoop, limit: int = 10) -> int:
    """Work until there is nothing to do; how many turns that took."""
    turns = 0
    while loop.do_work(limit):
        turns += 1
        assert turns < 10_000
    return turns


def test_requests_come_out_as_they_went_in(port: FakePort):
    prompts = {i: list(range(100 * i, 100 * i + 3 * i)) for i in range(1, 8)}
    port.send(*(Request(i, prompt) for i, prompt in prompts.items()))
    run(loop_at(port), limit=3)
    assert port.answers == prompts
    assert set(port.ends.values()) == {(FinishCode.STOP, 0)}


def test_a_new_request_joins_the_running_batch(port: FakePort):
    """Continuous batching: nobody waits for the longest answer that is running."""
    loop = loop_at(port)
    port.send(Request(1, list(range(10))))
    assert loop.do_work(5) == 2
    port.send(Request(2, [7]))
    assert loop.do_work(5) == 3
    assert port.ends == {2: (FinishCode.STOP, 0)}
    assert port.answers[1] == [0, 1]
    assert port.batch_sizes == [1, 2]


def test_what_waits_for_room_in_the_batch_outlives_the_drained_columns(port: FakePort):
    """The ring takes its memory back at the next drain; a prompt read late must not be someone else's."""
    loop = loop_at(port, running_max=2)
    port.send(
        *(
            Request(i, [10 * i] * 4, stop_token_ids=[10 * i], sampling={"min_new_tokens": 2})
            for i in range(1, 8)
        )
    )
    run(loop, limit=2)
    assert port.answers == {i: [10 * i] * 3 for i in range(1, 8)}
    assert max(port.batch_sizes) == 2


def test_what_is_taken_in_is_bounded(port: FakePort):
    """A flood of requests stays in the ring, where the manager sees it and refuses more."""
    loop = loop_at(port, running_max=1, waiting_max=3)
    port.send(*(Request(i, [1] * 50) for i in range(1, 20)))
    for _ in range(10):
        loop.do_work(2)
    assert loop.running_count == 1
    assert loop.waiting_count == 3
    assert len(port.sent) == 15


def test_do_work_takes_in_no_more_than_its_limit(port: FakePort):
    """In one process with all other stages, no stage may keep the others from their turn."""
    loop = loop_at(port)
    port.send(*(Request(i, [1, 2]) for i in range(1, 6)))
    assert loop.do_work(2) == 4
    assert len(port.sent) == 3


def test_nothing_to_do_is_zero_and_pushes_nothing(port: FakePort):
    loop = loop_at(port)
    assert loop.do_work(10) == 0
    assert port.batch_sizes == []


def test_an_abort_drops_a_running_request(port: FakePort):
    """The client has gone: every further token would be work for nobody."""
    loop = loop_at(port)
    port.send(Request(1, list(range(10))), Request(2, list(range(4))))
    loop.do_work(10)
    port.aborts = [1, 999]
    run(loop)
    assert port.answers == {1: [0], 2: [0, 1, 2, 3]}
    assert 1 not in port.ends


def test_an_abort_drops_a_waiting_request(port: FakePort):
    loop = loop_at(port, running_max=1)
    port.send(Request(1, [1, 2, 3]), Request(2, [4]))
    loop.do_work(10)
    port.aborts = [2]
    run(loop)
    assert port.answers == {1: [1, 2, 3]}


def test_a_request_aborted_in_the_drain_it_came_with_is_not_started(port: FakePort):
    """Its neighbours' columns begin after its own, so it must be passed over, not left out."""
    port.send(Request(1, [1, 1]), Request(2, [2, 2], stop_token_ids=[2], extras=b"\xff"), Request(3, [3, 3]))
    port.aborts = [2]
    run(loop_at(port))
    assert port.answers == {1: [1, 1], 3: [3, 3]}
    assert port.errors == {}


def test_aborts_alone_are_work(port: FakePort):
    port.aborts = [1, 2]
    assert loop_at(port).do_work(10) == 2


def test_a_request_that_the_engine_cannot_serve_ends_with_an_error_and_the_others_go_on(port: FakePort):
    """One bad request must not take the scheduler down for everybody."""
    schema = msgspec.msgpack.encode({"json_schema": "{}"})
    port.send(
        Request(1, [1]), Request(2, [2], extras=schema), Request(3, [3], extras=b"\xff\x00"), Request(4, [4])
    )
    run(loop_at(port))
    assert port.answers == {1: [1], 4: [4]}
    assert port.errors.keys() == {2, 3}
    assert "json_schema" in port.errors[2]
    assert "extras" in port.errors[3]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (ExtrasAsked(return_logprob=True, token_ids_logprob=(1, 2)), "log probabilities"),
        (ExtrasAsked(return_hidden_states=True), "hidden states"),
    ],
)
def test_an_echo_refuses_what_it_has_not(port: FakePort, asked: ExtrasAsked, text: str):
    """With a reason, and without a word to the others."""
    port.send(Request(1, [1], asked=asked), Request(2, [2]), Request(3, [3], asked=asked))
    run(loop_at(port))
    assert port.answers == {2: [2]}
    assert port.errors.keys() == {1, 3}
    assert text in port.errors[1]
    assert set(port.extras) == {None}


def test_attachments_are_refused_by_engines_that_know_none(port: FakePort):
    """An answer as if there were no image looks like a model that cannot see."""
    port.send(Request(1, [1], attachments=b"\x81\xa1a\x01"), Request(2, [2]))
    run(loop_at(port))
    assert port.answers == {2: [2]}
    assert "attachments" in port.errors[1]


def test_run_engine_parks_while_nothing_runs_and_stops_when_told(port: FakePort):
    """An idle engine that spins keeps a core from everybody else."""
    port.send(Request(1, [5, 6, 7]))

    def should_stop() -> bool:
        return len(port.waits) == 2

    assert run_engine(EchoEngine(context_length=10), port, should_stop=should_stop) == 3
    assert port.answers == {1: [5, 6, 7]}
    assert len(port.waits) == 2
    assert all(timeout_s is not None and timeout_s > 0 for timeout_s in port.waits)


def test_run_engine_told_to_stop_leaves_at_once(port: FakePort):
    port.send(Request(1, [5]))
    assert run_engine(EchoEngine(context_length=10), port, should_stop=lambda: True) == 0
    assert port.batch_sizes == []


def test_what_the_port_raises_goes_through(port: FakePort):
    """When the deployment has ended there is nothing left to serve, and the caller must know why."""

    class EndedError(Exception):
        pass

    def drain(max_requests: int) -> Columns:
        raise EndedError

    port.drain = drain
    with pytest.raises(EndedError):
        run_engine(EchoEngine(context_length=10), port, should_stop=lambda: False)


def test_a_question_is_answered_with_the_state_of_the_loop(port: FakePort):
    """An operator who asks a scheduler what it is at would wait in vain."""
    loop = EngineLoop(EchoEngine(context_length=1000), port)
    port.send(Request(1, [5, 6, 7]))
    port.controls = [Question(17)]
    loop.do_work(8)
    assert msgspec.json.decode(port.results[17]) == {"running": 0, "waiting": 0, "pushed_tokens": 0}
    port.controls = [Question(18)]
    loop.do_work(8)
    assert msgspec.json.decode(port.results[18]) == {"running": 1, "waiting": 0, "pushed_tokens": 1}
