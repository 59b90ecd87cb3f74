"""Many requests through real processes, aborted at random moments, and what must hold in the end.

    python tests/stress/request_load.py --requests 100000 --workers 2 --engine echo

Every request has exactly one end. What ended by itself is, letter for letter, what the engine and the
tokenizer's own library make of it; what was cut short is the beginning of that. When all is quiet
nothing is kept of any request: not in the manager's tables, not in the workers', not in the
scheduler's. And no process grows: from a tenth of the requests on, by less than RSS_GROWTH_MAX.

The seed is printed and repeats the requests and the wishes to abort, not the moments at which processes
get to run. Exit code 0: all held.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from manager import (
    DisconnectedError,
    GenerateRequest,
    ManagerError,
    QueueFullError,
    Settings,
    TokenizerManager,
)
from manager.engines.engine import Admitted
from manager.engines.ngram_engine import NGramEngine
from manager.extras import ExtrasAsked
from manager.finish import FinishCode
from manager.sampling import SAMPLING_DTYPE, NormalizedSampling, SamplingParams
from manager.shard import DetokShard
from manager.tokenizer import EMBEDDED_TOKENIZER, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from manager import GenerateOutput

#: Bytes that a process may have more at the end than after a tenth of the requests.
RSS_GROWTH_MAX: Final = 20 << 20
CONTEXT_LENGTH: Final = 1024
#: At a time: more than an engine runs at once, so that some wait for their turn.
CLIENTS: Final = 400
#: Different requests to each engine: thought out before the first is sent, for this program is a part of
#: the process that is measured, and its own tokenizer remembers words.
PLANS: Final = {"echo": 5000, "ngram": 300}
FAILURES_MAX: Final = 20
QUIET_TIMEOUT_S: Final = 30.0
#: A request that has waited for so long will wait for ever.
HANG_S: Final = 300.0
SAMPLES_OF_ONE_RUN: Final = 10

WORDS = [
    "the ",
    "school ",
    "hill",
    "\n",
    "日本",
    "é",
    "😀",
    "👩‍💻",
    "STOP",
    "ing ",
    "a",
    "b",
    ". ",
    "\t",
    "한국어 ",
]
OPENINGS = ["The school stood on", "When I came to", "My old servant", "I ", "Kiyo said", "Once upon a time"]
ECHO_STOPS = ["STOP", "hill", "😀", "日本", "b.", "ing the ", "\n\n"]
NGRAM_STOPS = ["the", ". ", "school", "\n", "Red Shirt", "I am"]


@dataclass(frozen=True)
class Wanted:
    """What one single request must become, if nobody ends it before."""

    text: str
    ids: list[int]
    """All that the engine gives: those that are shown, and behind them those that a stop leaves out."""
    end: dict[str, Any]
    logprobs: list[float] | None
    """One for each of `ids`; None: none were asked for."""


@dataclass(frozen=True)
class Plan:
    """A request, and what each of its samples must become."""

    request: dict[str, Any]
    samples: list[Wanted]


def planner(engine: str, seed: int) -> Callable[[random.Random], Plan]:
    """Give what thinks out requests for an engine."""
    rng = random.Random(seed)
    plan = echo_plan if engine == "echo" else LonelyNGram().plan
    plans = [plan(rng) for _ in range(PLANS[engine])]
    return lambda rng: rng.choice(plans)


TOKENIZER = load_tokenizer(EMBEDDED_TOKENIZER).tokenizer


def echo_plan(rng: random.Random) -> Plan:
    text = "".join(rng.choices(WORDS, k=rng.randint(1, 40)))
    ids = TOKENIZER.encode(text).ids
    limit = rng.choice([CONTEXT_LENGTH, rng.randint(0, 60)])
    params: dict[str, Any] = {"max_new_tokens": limit if limit < CONTEXT_LENGTH else None}
    if rng.random() < 0.3:
        params["stop"] = rng.sample(ECHO_STOPS, rng.randint(1, 3))
        params["no_stop_trim"] = rng.random() < 0.5
    if rng.random() < 0.15:
        params["n"] = 2
    ids = ids[:limit]
    end = {"type": "length", "length": limit} if len(ids) == limit else {"type": "stop"}
    wanted = stopped(TOKENIZER.decode(ids), ids, end, None, params)
    prompt = {"input_ids": TOKENIZER.encode(text).ids} if rng.random() < 0.5 else {"text": text}
    return Plan({**prompt, "sampling_params": params}, [wanted] * params.get("n", 1))


def stopped(
    text: str, ids: list[int], end: dict[str, Any], logprobs: list[float] | None, params: dict[str, Any]
) -> Wanted:
    """Look for stop strings in the plainest way."""
    for length in range(1, len(text) + 1):
        for stop in params.get("stop", ()):
            if text[:length].endswith(stop):
                shown = text[: length if params["no_stop_trim"] else length - len(stop)]
                return Wanted(shown, ids, {"type": "stop", "matched": stop}, logprobs)
    return Wanted(text, ids, end, logprobs)


class LonelyNGram:
    """The model with one request at a time: nobody's neighbour may change what a request gets."""

    def __init__(self) -> None:
        self._engine = NGramEngine(
            vocab_size=TOKENIZER.get_vocab_size(),
            context_length=CONTEXT_LENGTH,
            eos_token_ids=(0,),
            randomness=random.Random(0),
        )

    def plan(self, rng: random.Random) -> Plan:
        prompt = rng.choice(OPENINGS)
        params: dict[str, Any] = {
            "max_new_tokens": rng.randint(0, 60),
            "sampling_seed": rng.randrange(2**40),
            "temperature": rng.choice([0.0, 0.8]),
        }
        if rng.random() < 0.3:
            params["stop"] = rng.sample(NGRAM_STOPS, rng.randint(1, 3))
            params["no_stop_trim"] = rng.random() < 0.5
        if rng.random() < 0.15:
            params["n"] = 2
        has_logprobs = rng.random() < 0.3
        samples = [
            self._answer(
                prompt, params | {"n": 1, "sampling_seed": params["sampling_seed"] + sample}, has_logprobs
            )
            for sample in range(params.get("n", 1))
        ]
        request: dict[str, Any] = {"text": prompt, "sampling_params": params}
        if has_logprobs:
            request |= {"return_logprob": True, "top_logprobs_num": 2}
        return Plan(request, samples)

    def _answer(self, prompt: str, params: dict[str, Any], has_logprobs: bool) -> Wanted:
        sampling = NormalizedSampling.of(
            SamplingParams.from_mapping(params), vocab_size=TOKENIZER.get_vocab_size(), has_tokenizer=True
        )
        prompt_ids = TOKENIZER.encode(prompt).ids
        row = np.array([sampling.to_row()], SAMPLING_DTYPE)[0]
        asked = ExtrasAsked(return_logprob=True)
        empty = np.empty(0, np.int32)
        self._engine.admit(Admitted(1, np.array(prompt_ids, np.int32), row, empty, {}, asked))
        ids: list[int] = []
        logprobs: list[float] = []
        while self._engine.running_count:
            step = self._engine.step()
            ids += step.token_ids.tolist()
            if step.extras is not None and step.extras.output is not None:
                logprobs += step.extras.output.values[0]
        code, value = int(step.finish_codes[0]), int(step.finish_values[0])
        is_trimmed = code == FinishCode.STOP_TOKEN and value != 0
        end: dict[str, Any] = {"type": "stop", "matched": value}
        if code == FinishCode.LENGTH:
            end = {"type": "length", "length": value}
        shown = ids[:-1] if is_trimmed else ids
        text = TOKENIZER.decode([*prompt_ids, *shown])[len(TOKENIZER.decode(prompt_ids)) :]
        return stopped(text, ids, end, logprobs if has_logprobs else None, params)


@dataclass
class Seen:
    """What a client has got of one single request."""

    wanted: Wanted
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    ends: int = 0

    def take(self, output: GenerateOutput) -> str | None:
        """Add a piece; returns what is wrong with it."""
        if self.ends:
            return "a piece after the end"
        wanted = self.wanted
        self.text += output.text
        self.ids += output.output_ids
        if not wanted.text.startswith(self.text) or wanted.ids[: len(self.ids)] != self.ids:
            return "text or ids of something else"
        said = [] if output.logprobs is None else output.logprobs.output
        start = len(self.logprobs)
        self.logprobs += [value for value, _, _ in said]
        if said and wanted.logprobs is None:
            return "log probabilities that nobody asked for"
        if [token_id for _, token_id, _ in said] != wanted.ids[start : len(self.logprobs)]:
            return "log probabilities of other tokens"
        if wanted.logprobs is not None and len(self.logprobs) < len(self.ids):
            return "tokens without their log probabilities"
        close = zip(self.logprobs[start:], (wanted.logprobs or [])[start:], strict=False)
        if any(value is None or abs(value - right) > 1e-5 for value, right in close):
            return "log probabilities of something else"
        if output.error is not None:
            self.ends += 1
        elif output.finish_reason is not None:
            self.ends += 1
            if self.text != wanted.text or output.finish_reason.to_mapping() != wanted.end:
                return f"it ended otherwise: {output.finish_reason.to_mapping()}"
        return None


@dataclass(frozen=True)
class Wish:
    """When and how a client gives up."""

    way: str
    """abort: by its name; cancel: the task that reads; leave: reading ends."""
    turns: int | None = None
    """After so many turns of the loop: before it was dispatched, or just then."""
    after_s: float | None = None
    """After so much time: while it waits, or wherever it is by then."""
    after_ids: int | None = None
    """After so many tokens: while it streams, or with its end on the way."""


def think_of_wish(rng: random.Random, plan: Plan) -> Wish | None:
    """Most stay to the end; the others go at each moment that there is."""
    roll = rng.random()
    if roll < 0.5:
        return None
    way = rng.choice(["abort", "cancel"])
    if roll < 0.6:
        return Wish(way, turns=rng.choice([0, 1, 2, 5]))
    if roll < 0.75:
        return Wish(way, after_s=rng.choice([0.001, 0.01, 0.05]) * rng.random())
    total = min(len(wanted.ids) for wanted in plan.samples)
    way = rng.choice(["abort", "cancel", "leave"])
    if roll < 0.88:
        return Wish(way, after_ids=rng.randint(1, max(total, 1)))
    return Wish(way, after_ids=max(total - 1, 0))  # its last token is on the way


class Load:
    """The whole run."""

    def __init__(self, *, count: int, seed: int, engine: str, workers: int, name: str) -> None:
        self.count, self.seed, self.engine, self.workers, self.name = count, seed, engine, workers, name
        self.failures: list[str] = []
        self.ends: Counter[str] = Counter()
        self.started = 0
        self.done = 0
        self.rss: list[tuple[int, dict[str, dict[str, int]]]] = []
        """Requests done, and by process: "total", "own" and "shared" bytes."""
        self._plan = planner(engine, seed)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def fail(self, problem: str) -> None:
        if len(self.failures) < FAILURES_MAX:
            self.failures.append(problem)

    async def run(self) -> None:
        settings = Settings(name=self.name, workers=self.workers, context_length=CONTEXT_LENGTH)
        try:
            async with TokenizerManager(settings, start_workers=False) as manager:
                self._manager = manager
                self._start_parts()
                assert await manager.wait_until_ready(60), manager.missing_parts()
                begun = time.monotonic()
                await asyncio.gather(*(self._client() for _ in range(min(CLIENTS, self.count))))
                self.seconds = time.monotonic() - begun
                await self._wait_until_nothing_is_left()
                self._measure()
                for label, process in self._processes.items():
                    if process.poll() is not None:
                        self.fail(f"{label} died: exit_code={process.returncode}")
            for process in self._processes.values():
                await asyncio.to_thread(process.wait, 30)
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
        self._judge_memory()

    def _start_parts(self) -> None:
        here = [sys.executable, __file__]
        commands = {
            f"worker {shard}": [*here, "--worker-of", self.name, "--shard", str(shard)]
            for shard in range(self.workers)
        }
        commands["scheduler"] = [
            *(sys.executable, "-m", "manager", "scheduler", "--name", self.name, "--engine", self.engine)
        ]
        for label, command in commands.items():
            self._processes[label] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )

    async def _client(self) -> None:
        """One request after the other, until all are done."""
        step = max(self.count // SAMPLES_OF_ONE_RUN, 1)
        while self.started < self.count:
            number, self.started = self.started, self.started + 1
            await self._serve(number)
            self.done += 1
            if self.done % step == 0:
                self._measure()

    async def _serve(self, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        plan = self._plan(rng)
        wish = think_of_wish(rng, plan)
        request = GenerateRequest(**plan.request, rid=f"load-{number}", stream=rng.random() < 0.8)
        seen = [Seen(wanted) for wanted in plan.samples]
        task = asyncio.create_task(self._read(number, request, seen, wish))
        if wish is not None and (wish.turns is not None or wish.after_s is not None):
            for _ in range(wish.turns or 0):
                await asyncio.sleep(0)
            if wish.after_s is not None:
                await asyncio.sleep(wish.after_s)
            self._give_up(wish, number, task)
        done, _ = await asyncio.wait([task], timeout=HANG_S)
        if not done:
            self.fail(f"request {number} hangs: {request}")
            task.cancel()
            return
        if not task.cancelled() and task.exception() is not None:
            self.fail(f"request {number}: {task.exception()!r}")

    def _give_up(self, wish: Wish, number: int, task: asyncio.Task[None]) -> None:
        if wish.way == "abort":
            self._manager.abort(f"load-{number}")
        else:
            task.cancel()

    async def _read(self, number: int, request: GenerateRequest, seen: list[Seen], wish: Wish | None) -> None:
        """Read to the end, or as long as the client wishes to; judge every piece and the end."""
        may_be_aborted = wish is not None and wish.way == "abort"
        end = "none"
        try:
            async with contextlib.aclosing(self._manager.generate(request)) as outputs:
                async for output in outputs:
                    problem = seen[output.sample].take(output)
                    if problem is not None:
                        self.fail(f"request {number}: {problem}: {output}, {seen[output.sample]}, {request}")
                    if output.error is not None:
                        self._judge_error(number, output.error, may_be_aborted=may_be_aborted)
                    if wish is not None and wish.after_ids is not None and len(seen[0].ids) >= wish.after_ids:
                        if wish.way == "leave":
                            end = "left"
                            break
                        self._give_up(wish, number, asyncio.current_task())  # type: ignore[arg-type]
                        wish = None
            end = "read to the end" if end == "none" else end
        except ManagerError as error:
            end = type(error).__name__
            for single in seen:
                single.ends += 1
            self._judge_error(number, error, may_be_aborted=may_be_aborted)
        except asyncio.CancelledError:
            end = "cancelled"
        self.ends[end] += 1
        wrong = [single.ends for single in seen if single.ends != 1]
        if wrong and (end not in ("left", "cancelled") or max(wrong) > 1):
            self.fail(f"request {number} has not one end each: end={end}, ends={wrong}")

    def _judge_error(self, number: int, error: ManagerError, *, may_be_aborted: bool) -> None:
        is_ours = isinstance(error, DisconnectedError) and may_be_aborted
        if not is_ours and not isinstance(error, QueueFullError):
            self.fail(f"request {number} failed: {error!r}")

    async def _wait_until_nothing_is_left(self) -> None:
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        while True:
            left = await self._left()
            if not any(left.values()):
                return
            if time.monotonic() > deadline:
                self.fail(f"something is left: { ({what: n for what, n in left.items() if n}) }")
                return
            await asyncio.sleep(0.05)

    async def _left(self) -> dict[str, int]:
        """What is kept anywhere, by its place."""
        manager = self._manager
        left = {
            "manager: requests": len(manager._streams),
            "manager: rids": len(manager._rids),
            "manager: aborts to be sent": manager._outbox.kept_count,
            "manager: questions": len(manager._controls) + len(manager._decodes),
        }
        state = json.loads(await manager.ask_scheduler(b""))
        left |= {f"scheduler: {what}": state[what] for what in ("running", "waiting")}
        for label, process in self._processes.items():
            if label != "scheduler":
                process.send_signal(signal.SIGUSR1)
                assert process.stdout is not None
                answer = json.loads(await asyncio.to_thread(process.stdout.readline))
                left |= {f"{label}: {what}": count for what, count in answer.items()}
        return left

    def _measure(self) -> None:
        pids = {"manager": os.getpid()} | {label: process.pid for label, process in self._processes.items()}
        self.rss.append((self.done, {label: rss_of(pid) for label, pid in pids.items()}))

    def growth(self) -> dict[str, int]:
        """Bytes of each process, from the first measurement to the last."""
        first, last = self.rss[0][1], self.rss[-1][1]
        return {label: last[label]["total"] - first[label]["total"] for label in last}

    def _judge_memory(self) -> None:
        for label, growth in self.growth().items():
            if growth >= RSS_GROWTH_MAX:
                self.fail(f"{label} grew: bytes={growth}, max={RSS_GROWTH_MAX}")

    def text(self) -> str:
        """What happened, for people."""
        lines = [
            f"requests={self.done}, seconds={self.seconds:.1f}, each_second={self.done / self.seconds:.0f}",
            "ends: " + ", ".join(f"{end}={count}" for end, count in sorted(self.ends.items())),
            "resident MiB, of them shared rings, after so many requests:",
        ]
        for label in self.rss[0][1]:
            points = (
                f"{done}: {rss[label]['total'] / 2**20:.1f} ({rss[label]['shared'] / 2**20:.1f})"
                for done, rss in self.rss
            )
            lines.append(f"  {label}: " + "  ".join(points))
        growth = ", ".join(f"{label}={bytes_ / 2**20:.1f}" for label, bytes_ in self.growth().items())
        lines.append(f"growth in MiB: {growth}")
        if self.failures:
            lines += ["FAILED:", *self.failures]
        return "\n".join(lines)


def rss_of(pid: int) -> dict[str, int]:
    """Resident bytes of a process: in total, its own, and of shared memory."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        found[name] = value
    names = {"total": "VmRSS", "own": "RssAnon", "shared": "RssShmem"}
    return {what: 1024 * int(found[name].split()[0]) for what, name in names.items()}


def serve_as_worker(name: str, shard: int) -> int:
    """Be a worker as `python -m manager worker` is one, that says on SIGUSR1 what it keeps."""
    import manager.worker as module

    stages: list[DetokShard] = []

    class KnownShard(DetokShard):
        def __init__(self, **ends: Any) -> None:
            super().__init__(**ends)
            stages.append(self)

    def say(_number: int, _frame: object) -> None:
        stage = stages[0]
        kept = {
            "open": stage.open_count,
            "unsent": len(stage._unsent),
            "texts wanted": len(stage._texts_wanted),
        }
        print(json.dumps(kept), flush=True)

    module.DetokShard = KnownShard  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, say)
    return 0 if module.run_worker(name, shard, timeout_s=60) else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", choices=("echo", "ngram"), default="echo")
    parser.add_argument("--seed", type=int, help="of a run to be repeated; default: a new one")
    parser.add_argument("--worker-of", help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker_of is not None:
        return serve_as_worker(options.worker_of, options.shard)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(
        f"load: --requests {options.requests} --workers {options.workers} --engine {options.engine} "
        f"--seed {seed}",
        flush=True,
    )
    load = Load(
        count=options.requests,
        seed=seed,
        engine=options.engine,
        workers=options.workers,
        name=f"load-{os.getpid()}",
    )
    asyncio.run(load.run())
    print(load.text())
    return 1 if load.failures else 0


if __name__ == "__main__":
    sys.exit(main())
