"""One measurement: a way, a mode and a task, in two fresh processes pinned to a processor each."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ways import STEP, make_step

if TYPE_CHECKING:
    from ways import Way

TIMEOUT_S = 15.0
BATCH = 64
PACE_S = 0.004


@dataclass(frozen=True)
class Task:
    kind: str
    """records, batches, pingpong, steps, paced or busy."""
    size: int
    """Bytes of a record, or rows of a step."""
    codec: str = ""

    @property
    def channels(self) -> int:
        return 2 if self.kind == "pingpong" else 1

    @property
    def bytes(self) -> int:
        """Of the largest record."""
        if self.kind in ("steps", "paced", "busy"):
            return 512 + 64 * self.size  # of the pickled form; the columns are 25 a row
        return self.size


def percentile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


class Writer:
    def __init__(self, task: Task, ways: list[Way], credit: Any) -> None:
        self.task, self.ways, self.way = task, ways, ways[0]
        if self.way.is_lossy:
            self._bound(credit)
        if task.codec:
            self.way.use(task.codec)
            self.step = self.way.make_step(task.size)

    def _bound(self, credit: Any) -> None:
        send, window, sent = self.way.send, max(1, self.way.slots // 2), 0

        def bounded(payload):
            nonlocal sent
            while sent - credit.value >= window:
                os.sched_yield()
            send(payload)
            sent += 1

        self.way.send = bounded

    def run(self, count: int) -> dict[str, Any]:
        return getattr(self, self.task.kind)(count) or {}

    def records(self, count):
        send, payload = self.way.send, bytes(self.task.size)
        for _ in range(count):
            send(payload)

    def batches(self, count):
        send_many, payloads = self.way.send_many, [bytes(self.task.size)] * BATCH
        for _ in range(count // BATCH):
            send_many(payloads)

    def steps(self, count):
        send_step, step = self.way.send_step, self.step
        for _ in range(count):
            send_step(step)

    def pingpong(self, count):
        send, recv, release = self.way.send, self.ways[1].recv, self.ways[1].release
        payload, clock, took = bytes(self.task.size), time.perf_counter_ns, []
        for _ in range(count):
            start = clock()
            send(payload)
            recv()[0]
            if release is not None:
                release()
            took.append(clock() - start)
        return {"took": took}

    def paced(self, count):
        """One step every 4 ms, the thread busy in between as a scheduler is."""
        send_step, step = self.way.send_step, self.step
        clock, cpu, started, spent, wall = time.perf_counter_ns, time.thread_time_ns, [], [], []
        others = time.process_time_ns() - cpu()
        at = clock()
        for _ in range(count):
            at += int(PACE_S * 1e9)
            while clock() < at:
                pass
            before, start = cpu(), clock()
            send_step(step)
            end, after = clock(), cpu()
            started.append(start)
            wall.append(end - start)
            spent.append(after - before)
        others = time.process_time_ns() - cpu() - others
        return {"started": started, "spent": spent, "wall": wall, "others": others}

    def busy(self, count):
        """As paced, while another thread of the process runs Python all the time."""
        stop, turns = threading.Event(), [0]

        def work():
            while not stop.is_set():
                turns[0] += sum(range(100)) > 0

        thread = threading.Thread(target=work)
        thread.start()
        send_step, step, clock, wall = self.way.send_step, self.step, time.perf_counter_ns, []
        begun = at = clock()
        try:
            for _ in range(count):
                at = max(at + 500_000, clock())
                while clock() < at:
                    pass
                start = clock()
                send_step(step)
                wall.append(clock() - start)
        finally:
            stop.set()
            thread.join()
        return {"wall": wall, "turns_per_s": turns[0] * 1e9 / (clock() - begun)}


class Reader:
    def __init__(self, task: Task, ways: list[Way], credit: Any) -> None:
        self.task, self.ways, self.way, self.credit = task, ways, ways[0], credit
        if self.way.is_lossy:
            self._grant()
        if task.codec:
            self.way.use(task.codec)

    def _grant(self) -> None:
        recv, every, got = self.way.recv, max(1, self.way.slots // 8), 0

        def granting():
            nonlocal got
            if got % every == 0:
                self.credit.value = got
            got += 1
            return recv()

        self.way.recv = granting

    def run(self, count: int) -> dict[str, Any]:
        return getattr(self, self.task.kind)(count) or {}

    def records(self, count):
        recv, release = self.way.recv, self.way.release
        if release is None:
            for _ in range(count):
                record = recv()
                record[0], record[-1]
        else:
            for _ in range(count):
                record = recv()
                record[0], record[-1]
                del record
                release()

    def batches(self, count):
        recv_many, left = self.way.recv_many, count // BATCH * BATCH
        while left > 0:
            records = recv_many()
            for record in records:
                record[0]
            left -= len(records)

    def steps(self, count):
        recv_step, release, rows = self.way.recv_step, self.way.release, self.task.size
        for _ in range(count):
            columns = recv_step()
            if columns[0][-1] != rows:
                raise RuntimeError("wrong step")
            del columns
            if release is not None:
                release()

    def pingpong(self, count):
        recv, release, send = self.way.recv, self.way.release, self.ways[1].send
        payload = bytes(self.task.size)
        for _ in range(count):
            recv()[0]
            if release is not None:
                release()
            send(payload)

    def paced(self, count):
        recv_step, release, clock, done = self.way.recv_step, self.way.release, time.perf_counter_ns, []
        for _ in range(count):
            columns = recv_step()
            done.append(clock())
            del columns
            if release is not None:
                release()
        return {"done": done}

    def busy(self, count):
        self.steps(count)


def _come_first(*, is_busy: bool) -> None:
    """On a machine that others use, their work waits for the parts of a second that are measured.

    A way's own threads come before the one that calls it: that may be busy, on the same processor. Two
    busy threads of one process would never give way to each other, so those run as ever.
    """
    for thread in Path("/proc/self/task").iterdir():
        policy, priority = os.SCHED_FIFO, 10 if int(thread.name) == os.getpid() else 11
        if is_busy:
            policy, priority = os.SCHED_OTHER, 0
        os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))


def _child(side: int, task: Task, mode: str, ways: list[Way], credit: Any, control: Any) -> None:
    os.sched_setaffinity(0, {side % os.cpu_count()})
    try:
        for index, way in enumerate(ways):
            if (side == 0) == (index == 0):
                way.write(mode)
            else:
                way.read(mode)
        part = (Writer, Reader)[side](task, ways, credit)
        gc.collect()
        gc.freeze()
        gc.disable()
        control.send("ready")
        while (count := control.recv()) is not None:
            if os.environ.get("BENCH_FIRST") == "1":
                _come_first(is_busy=task.kind == "busy")
            cpu, start = time.process_time_ns(), time.perf_counter_ns()
            extra = part.run(count)
            end = time.perf_counter_ns()
            control.send({"start": start, "end": end, "cpu": time.process_time_ns() - cpu, **extra})
        for way in ways:
            way.close()
    except BaseException as error:  # noqa: BLE001 -- told to the parent
        control.send({"error": f"{type(error).__name__}: {error}"})
    finally:
        control.close()
        os._exit(0)


def measure(kind: type[Way], mode: str, task: Task, seconds: float) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(prefix="bench-")
    stem = uuid.uuid4().hex[:10]
    ways = [kind(f"bench{stem}{i}", task.bytes, folder) for i in range(task.channels)]
    credit = context.RawValue("Q", 0)
    controls, processes = [], []
    try:
        for way in ways:
            way.set_up(context)
        for side in (0, 1):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_child, args=(side, task, mode, ways, credit, theirs), daemon=True
            )
            process.start()
            theirs.close()
            controls.append(ours)
            processes.append(process)
        for control in controls:
            _take(control)
        return _run(task, controls, seconds)
    finally:
        for control in controls:
            with contextlib.suppress(OSError):
                control.send(None)
        for process in processes:
            process.join(3)
            if process.is_alive():
                process.kill()
                process.join()
        for way in ways:
            way.tear_down()
        shutil.rmtree(folder, ignore_errors=True)


def _take(control: Any) -> Any:
    if not control.poll(TIMEOUT_S):
        raise RuntimeError("no answer in time")
    answer = control.recv()
    if isinstance(answer, dict) and "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def _go(controls: list[Any], count: int) -> list[dict[str, Any]]:
    for control in reversed(controls):
        control.send(count)
    return [_take(control) for control in controls]


def _run(task: Task, controls: list[Any], seconds: float) -> dict[str, float]:
    if task.kind == "paced":
        _go(controls, 20)
        count = max(50, int(seconds / PACE_S * 3))
    elif task.kind == "busy":
        count = 3000
    else:
        count = BATCH * 4
        while True:
            writer, reader = _go(controls, count)
            took = (reader["end"] - writer["start"]) / 1e9
            if took > 0.05 or count > 5_000_000:
                break
            count = int(count * min(20, max(2, 0.08 / took))) // BATCH * BATCH
        count = max(BATCH, int(count * seconds / took) // BATCH * BATCH)
    writer, reader = _go(controls, count)
    took = (max(writer["end"], reader["end"]) - writer["start"]) / 1e9
    found = {"per_s": count / took, "writer_cpu_us": writer["cpu"] / 1e3 / count}
    if task.kind == "pingpong":
        found = {
            "p50_us": percentile(writer["took"], 0.5) / 1e3,
            "p99_us": percentile(writer["took"], 0.99) / 1e3,
        }
    elif task.kind == "paced":
        delays = [end - start for start, end in zip(writer["started"], reader["done"], strict=True)]
        found = {
            # with what the way's own threads have used
            "writer_cpu_us": statistics.fmean(writer["spent"]) / 1e3 + writer["others"] / 1e3 / count,
            "wall_p50_us": percentile(writer["wall"], 0.5) / 1e3,
            "delivery_p50_us": percentile(delays, 0.5) / 1e3,
            "reader_cpu": reader["cpu"] / 1e9 / took,
        }
    elif task.kind == "busy":
        found = {
            "p50_us": percentile(writer["wall"], 0.5) / 1e3,
            "p99_us": percentile(writer["wall"], 0.99) / 1e3,
            "p99.9_us": percentile(writer["wall"], 0.999) / 1e3,
            "turns_per_s": writer["turns_per_s"],
        }
    return found


__all__ = ["STEP", "Task", "make_step", "measure"]
