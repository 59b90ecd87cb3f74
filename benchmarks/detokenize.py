"""Microseconds a token, of our way to turn ids into text and of three others, in one run.

    python benchmarks/detokenize.py [--tokenizer FILE] [--rounds N]

All ways take the same ids, one for each request and step, in turns: a round is one stretch of
steps of each, so that a busy machine is busy for all. The best round counts, and what to look
at are the ratios. The others are written here anew after their published descriptions:

    stream    tokenizers' DecodeStream, one for each request
    windows   SGLang's: two windows of ids for each request, decoded by decode_batch
    held      vLLM's: a DecodeStream, the whole text, a fixed number of characters held back

Ours is measured twice: `core`, the decoder alone, from ids into the reply ring, claimed and
committed by the calls of C that a Claim wraps; and `step`, all that a worker does, from a frame
in its egress ring to a frame in its reply ring.
"""
# It measures what lies behind the public calls, on texts in many scripts.
# ruff: noqa: SLF001, RUF001

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

import shmring
from manager import messages
from manager._detok import ffi, lib
from manager.config import Settings
from manager.deployment import Deployment, Facts, register_name
from manager.detokenize import TableDecoder, choose
from manager.shard import DetokShard
from manager.tokenizer import EMBEDDED_TOKENIZER, load_tokenizer

ROOT = Path(__file__).parents[1]
BATCHES = (1, 32, 256, 4096)
STOPS = ("<|im_end|>", "\nUser:", "END OF TEXT", "</answer>")
TEXT = (
    "The quick brown fox jumps over the lazy dog, and then it does so again; nobody knows why.\n"
    "def area(r):\n    return 3.14159 * r ** 2  # of a circle\n"
    "你好，世界！今天天气很好，我们去公园散步吧。 한국어 문장도 하나 있습니다. Привет, мир! 👩‍💻🌶️\n"
)
BROKEN = "\N{REPLACEMENT CHARACTER}"


class Core:
    """The decoder alone: ids that lie ready, text into a claim of the reply ring."""

    name = "ours, core into the ring"

    def __init__(self, table):
        self._decoder = TableDecoder(table, slots_max=1 << 16, reason="benchmark")

    def start(self, batch):
        slots = [self._decoder.open(np.empty(0, np.int32)) for _ in range(batch)]
        self._slots = np.array(slots, np.uint32)
        self._counts = np.ones(batch, np.uint32)
        self._lengths = np.empty(batch, np.uint32)
        states = self._decoder._states
        self._states, self._state_count = ffi.from_buffer("struct detok_state *", states), len(states)
        self._pointers = [
            ffi.from_buffer("uint32_t[]", a) for a in (self._slots, self._counts, self._lengths)
        ]
        self._stack = contextlib.ExitStack()
        ring = self._stack.enter_context(shmring.create(f"bench-{os.getpid()}", 1 << 22))
        self._producer = self._stack.enter_context(ring.producer())
        self._consumer = self._stack.enter_context(ring.consumer())

    def step(self, row):
        slots, counts, lengths = self._pointers
        ids = ffi.from_buffer("int32_t[]", row)
        table, producer = self._decoder.c_table, self._producer
        bound = lib.detok_decode_bound(table, ids, len(row))
        out = ffi.from_buffer("uint8_t[]", producer._claim(bound))
        length = lib.detok_decode(
            table,
            self._states,
            self._state_count,
            slots,
            counts,
            len(row),
            ids,
            len(row),
            out,
            bound,
            lengths,
        )
        producer._commit(length, 1, 0)
        producer.publish()

    def after(self):
        if self._consumer.drain(1000):
            self._consumer.release()

    def stop(self):
        for slot in self._slots.tolist():
            self._decoder.close(slot)
        self._stack.close()


class Step:
    """All that a worker does for a frame."""

    def __init__(self, table, stops=(), *, skip=True):
        self.name = f"ours, whole step{f', {len(stops)} stops' if stops else ''}"
        self._table, self._stops, self._skip = table, stops, skip

    def start(self, batch):
        self._stack = contextlib.ExitStack()
        name = f"bench-{os.getpid()}"
        rings = [self._stack.enter_context(shmring.create(f"{name}.{ring}", 1 << 23)) for ring in "egr"]
        egress, register, reply = rings
        self._egress = self._stack.enter_context(egress.producer())
        manager = self._stack.enter_context(register.producer())
        self._reply = self._stack.enter_context(reply.consumer())
        self._shard = DetokShard(
            egress=self._stack.enter_context(egress.consumer()),
            register=self._stack.enter_context(register.consumer()),
            reply=self._stack.enter_context(reply.producer()),
            decoder=TableDecoder(self._table, slots_max=1 << 16, reason="benchmark"),
        )
        self._ids = np.arange(1, batch + 1, dtype=np.uint64)
        self._ones, self._codes = np.ones(batch, np.uint32), np.zeros(batch, np.uint8)
        assert messages.REGISTER.push(
            manager,
            batch,
            self._ids,
            np.array([(0, self._skip, True, False, False)] * batch, messages.OUTPUT_DTYPE),
            np.zeros(batch, np.uint32),
            np.empty(0, np.int32),
            *messages.pack_bytes([messages.pack_stops(self._stops, ())] * batch),
        )
        self._shard.do_work(1)

    def before(self, row):
        columns = (self._ids, self._ones, row, self._codes, None, None, None)
        assert messages.BATCH.push(self._egress, len(row), *columns)

    def step(self, row):
        del row
        self._shard.do_work(1)

    def after(self):
        if self._reply.drain(1000):
            self._reply.release()

    def stop(self):
        self._stack.close()


class Stream:
    name = "stream (DecodeStream)"

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def start(self, batch):
        self._streams = [DecodeStream(skip_special_tokens=True) for _ in range(batch)]

    def step(self, row):
        tokenizer = self._tokenizer
        return [stream.step(tokenizer, i) for stream, i in zip(self._streams, row.tolist(), strict=True)]


class Windows:
    """Text of the last window, less that of its older part; nothing while it ends in U+FFFD."""

    name = "windows (the SGLang way)"

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def start(self, batch):
        self._ids = [[] for _ in range(batch)]
        self._old, self._read = [0] * batch, [0] * batch

    def step(self, row):
        decode = self._tokenizer.decode_batch
        for ids, token_id in zip(self._ids, row.tolist(), strict=True):
            ids.append(token_id)
        whole = decode([ids[old:] for ids, old in zip(self._ids, self._old, strict=True)])
        said = decode(
            [ids[old:read] for ids, old, read in zip(self._ids, self._old, self._read, strict=True)]
        )
        texts = []
        for r, (text, before) in enumerate(zip(whole, said, strict=True)):
            new = text[len(before) :]
            if new and not new.endswith(BROKEN):
                self._old[r], self._read[r] = self._read[r], len(self._ids[r])
                texts.append(new)
            else:
                texts.append("")
        return texts


class Held(Stream):
    """The whole text is kept, stops are looked for at its end, so many characters are held back."""

    def __init__(self, tokenizer, stops=()):
        super().__init__(tokenizer)
        self.name = f"held (the vLLM way), {len(stops)} stops"
        self._stops = stops
        self._hold = max(map(len, stops), default=1) - 1

    def start(self, batch):
        super().start(batch)
        self._texts, self._sent = [""] * batch, [0] * batch

    def step(self, row):
        out = []
        for r, delta in enumerate(super().step(row)):
            self._texts[r] += delta or ""
            text = self._texts[r]
            if delta:
                for stop in self._stops:
                    if text.find(stop, 1 - len(delta) - len(stop)) != -1:
                        break
            end = max(self._sent[r], len(text) - self._hold)
            out.append(text[self._sent[r] : end])
            self._sent[r] = end
        return out


def measure(ways, batch, ids, *, rounds, tokens):
    """Best microseconds a token of each way, by name; each in turn in every round."""
    steps = max(4, tokens // batch)
    best = {way.name: float("inf") for way in ways}
    rows = [np.ascontiguousarray(ids[(np.arange(batch) * 37 + s) % len(ids)]) for s in range(steps)]
    for _ in range(rounds):
        for way in ways:
            way.start(batch)
            spent = 0
            for row in rows:
                if hasattr(way, "before"):
                    way.before(row)
                start = time.perf_counter_ns()
                way.step(row)
                spent += time.perf_counter_ns() - start
                if hasattr(way, "after"):
                    way.after()
            if hasattr(way, "stop"):
                way.stop()
            best[way.name] = min(best[way.name], spent / 1000 / (steps * batch))
    return best


def compare(tokenizer, table, ids, rounds, tokens):
    makers = [
        lambda: Core(table),
        lambda: Step(table),
        lambda: Step(table, STOPS),
        lambda: Stream(tokenizer),
        lambda: Windows(tokenizer),
        lambda: Held(tokenizer),
        lambda: Held(tokenizer, STOPS),
    ]
    print(
        "us a token                        "
        + "".join(f"{f'B={b}':>10}" for b in BATCHES)
        + "   B=256: x stream"
    )
    found = {}
    for batch in BATCHES:
        for name, cost in measure(
            [make() for make in makers],
            batch,
            ids,
            rounds=rounds,
            tokens=min(tokens, 300) if batch == 1 else tokens,
        ).items():
            found[name, batch] = cost
    for name in dict.fromkeys(name for name, _ in found):
        costs = "".join(f"{found[name, batch]:10.3f}" for batch in BATCHES)
        print(f"{name:34}{costs}{found[Stream.name, 256] / found[name, 256]:14.1f}")
    step, with_stops = Step(table).name, Step(table, STOPS).name
    whole = found[step, 256] * 256
    print(f"\na whole step of 256: {whole:.1f} us; wanted: 5 + 0.15 * 256 = {5 + 0.15 * 256:.1f}")
    surcharge = ", ".join(f"{found[with_stops, b] - found[step, b]:+.3f} (B={b})" for b in BATCHES)
    print(f"four stop strings on every request, us a token more: {surcharge}")
    core = found[Core.name, 256]
    print(f"core at B=256: {core:.3f} us a token, {found[Stream.name, 256] / core:.0f} times stream")


def astray(tokenizer, table, ids, rounds):
    """4,000 stray bytes, or skipped special tokens: the cost of the last 200 against that of text."""
    flags = table.flags
    lone = [
        i for i in np.flatnonzero(np.diff(table.text_offsets) == 1).tolist() if table.text_of(i) == b"\x80"
    ]
    special = np.flatnonzero(flags & lib.DETOK_ID_SPECIAL).tolist()
    print("\nus a token, of the last 200 of 4,000 (B=1)")
    for name, chosen in (("text", None), ("stray bytes", lone), ("skipped specials", special)):
        if chosen is not None and not chosen:
            continue
        line = f"{name:20}"
        for make in (lambda: Step(table), lambda: Stream(tokenizer), lambda: Windows(tokenizer)):
            cost = float("inf")
            for _ in range(min(rounds, 2)):
                way = make()
                way.start(1)
                spent = 0
                for number in range(4000):
                    token_id = ids[number % len(ids)] if chosen is None else chosen[number % len(chosen)]
                    row = np.array([token_id], np.int32)
                    if hasattr(way, "before"):
                        way.before(row)
                    start = time.perf_counter_ns()
                    way.step(row)
                    spent += (time.perf_counter_ns() - start) if number >= 3800 else 0
                    if hasattr(way, "after"):
                        way.after()
                if hasattr(way, "stop"):
                    way.stop()
                cost = min(cost, spent / 1000 / 200)
            line += f"  {way.name}: {cost:.1f}"
        print(line)


CHILD = """
import json, sys, time
def memory():
    lines = (line.split() for line in open("/proc/self/smaps_rollup") if line.startswith("P"))
    sizes = {line[0]: int(line[1]) for line in lines}
    return (sizes["Private_Clean:"] + sizes["Private_Dirty:"]) / 1024
import manager.worker as worker
before = memory()
def serve(*_):
    print(json.dumps({"ready_ms": (time.perf_counter() - start) * 1000, "more_mib": memory() - before,
                      "library": "tokenizers" in sys.modules}))
    return True
worker._run = serve
start = time.perf_counter()
worker.run_worker(sys.argv[1], int(sys.argv[2]))
"""


def start_up(path):
    """The first worker waits for the table; each further one only maps it."""
    loaded = load_tokenizer(path)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        choice = choose(loaded.tokenizer)
        best = min(best, time.perf_counter() - start)
    print(f"\ntable of {loaded.vocab_size} ids built and proved: {best:.3f} s; wanted: 0.5")
    name = f"bench-{os.getpid()}"
    facts = Facts(loaded.vocab_size, (), path, choice)
    deployment = Deployment(Settings(name=name, workers=3, tokenizer=path), facts)
    try:
        producers = [deployment.ring(register_name(name, i)).producer(takeover=True) for i in range(3)]
        answers = []
        for shard in range(3):
            answer = subprocess.run(
                [sys.executable, "-c", CHILD, name, str(shard)],
                capture_output=True,
                check=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            )
            answers.append(json.loads(answer.stdout))
        del producers
    finally:
        deployment.close()
    for shard, facts_of in enumerate(answers):
        print(
            f"worker {shard}: ready in {facts_of['ready_ms']:.1f} ms after its imports (wanted: 20), "
            f"{facts_of['more_mib']:.1f} MiB more than these (wanted: 20), "
            f"tokenizer library loaded: {facts_of['library']}"
        )


def processor():
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(": ", 1)[1]
    return platform.processor()


def main():
    qwen = ROOT / ".cache" / "tokenizers" / "qwen3.json"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, default=qwen if qwen.exists() else EMBEDDED_TOKENIZER)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=1 << 15, help="of each way in a round")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    choice = choose(tokenizer)
    load, version = os.getloadavg()[0], platform.python_version()
    print(f"{processor()}, {os.cpu_count()} CPUs, load {load:.1f}; Python {version}")
    print(f"{options.tokenizer.name}: {choice.kind.value}, {choice.reason}\n")
    if choice.table is None:
        sys.exit("this tokenizer has no table: nothing to compare")
    ids = np.array(tokenizer.encode("".join(itertools.repeat(TEXT, 20))).ids, np.int32)
    compare(tokenizer, choice.table, ids, options.rounds, options.tokens)
    astray(tokenizer, choice.table, ids, options.rounds)
    start_up(options.tokenizer)


if __name__ == "__main__":
    main()
