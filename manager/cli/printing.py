"""What `generate` prints: text as it comes, or one JSON object a request; one line of figures."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TextIO

import msgspec

if TYPE_CHECKING:
    from manager.errors import ManagerError
    from manager.output import GenerateOutput

#: Columns after which a line of interleaved text is cut at the next space.
_LINE_WIDTH = 76


class Printer(Protocol):
    """Takes the pieces of all requests."""

    def piece(self, index: int, output: GenerateOutput) -> None:
        """One piece; the last one has a finish reason or an error."""
        ...

    def failure(self, index: int, error: ManagerError) -> None:
        """A request that gave no output at all."""
        ...


class PlainPrinter:
    """One prompt: its text as it comes. Several: line by line, each with its prompt's number."""

    def __init__(self, out: TextIO, *, is_single: bool) -> None:
        self._out = out
        self._is_single = is_single
        self._open: dict[tuple[int, int], str] = {}

    def piece(self, index: int, output: GenerateOutput) -> None:
        """Print what can be printed of it."""
        is_last = output.finish_reason is not None or output.error is not None
        if self._is_single:
            self._out.write(output.text + ("\n" if is_last else ""))
            self._out.flush()
        else:
            self._add(index, output, is_last=is_last)
        if output.error is not None:
            self.failure(index, output.error)

    def _add(self, index: int, output: GenerateOutput, *, is_last: bool) -> None:
        key = (index, output.sample)
        text = self._open.pop(key, "") + output.text
        lines = []
        while True:
            cut = text.find("\n", 0, _LINE_WIDTH)
            if cut >= 0:
                lines.append(text[:cut])
                text = text[cut + 1 :]
            elif len(text) > _LINE_WIDTH:
                cut = text.rfind(" ", 1, _LINE_WIDTH) + 1 or _LINE_WIDTH
                lines.append(text[:cut])
                text = text[cut:]
            else:
                break
        if is_last:
            if text:
                lines.append(text)
        else:
            self._open[key] = text
        label = f"[{index}]" if output.sample == 0 else f"[{index}.{output.sample}]"
        for line in lines:
            self._out.write(f"{label} {line}\n")
        self._out.flush()

    def failure(self, index: int, error: ManagerError) -> None:
        """One line on stderr."""
        print(f"error: prompt {index}: {error}", file=sys.stderr)


class JsonPrinter:
    """One JSON object a line, at each request's end."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._texts: dict[tuple[int, int], list[str]] = {}
        self._ids: dict[tuple[int, int], list[int]] = {}
        self._logprobs: dict[tuple[int, int], tuple[list[object], list[object]]] = {}

    def piece(self, index: int, output: GenerateOutput) -> None:
        """Keep it, or print the whole if it is the last."""
        key = (index, output.sample)
        texts, ids = self._texts.setdefault(key, []), self._ids.setdefault(key, [])
        texts.append(output.text)
        ids.extend(output.output_ids)
        if output.logprobs is not None:
            of_tokens, of_top = self._logprobs.setdefault(key, ([], []))
            of_tokens.extend(output.logprobs.output)
            of_top.extend(output.logprobs.output_top)
        if output.finish_reason is None and output.error is None:
            return
        del self._texts[key], self._ids[key]
        line: dict[str, object] = {
            "index": index,
            "sample": output.sample,
            "rid": output.rid,
            "text": "".join(texts),
            "output_ids": ids,
            "finish_reason": None if output.finish_reason is None else output.finish_reason.to_mapping(),
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": output.completion_tokens,
        }
        if key in self._logprobs:
            line["logprobs"], line["top_logprobs"] = self._logprobs.pop(key)
        if output.error is not None:
            line["error"] = _error_object(output.error)
        self._write(line)

    def failure(self, index: int, error: ManagerError) -> None:
        """An object with the error in place of the text."""
        self._write({"index": index, "error": _error_object(error)})

    def _write(self, line: dict[str, object]) -> None:
        self._out.write(msgspec.json.encode(line).decode() + "\n")
        self._out.flush()


def _error_object(error: ManagerError) -> dict[str, object]:
    return {"status": error.status, "message": str(error), "field": getattr(error, "field", None)}


@dataclass
class Figures:
    """Counts and times of a run. Clock: time.perf_counter, seconds."""

    started_s: float | None = None
    """Of the first request: waiting for a scheduler or for somebody to type is no work."""
    requests: int = 0
    failed: int = 0
    tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    """Of each request, from its submission to its first piece with a token."""

    def line(self) -> str:
        """The one line."""
        elapsed_s = 0.0 if self.started_s is None else time.perf_counter() - self.started_s
        rate = self.tokens / elapsed_s if elapsed_s > 0 else 0.0
        firsts = sorted(self.first_token_s)
        first = (
            f"{firsts[len(firsts) // 2] * 1e3:.1f} ms (p99 {firsts[int(len(firsts) * 0.99)] * 1e3:.1f} ms)"
            if firsts
            else "-"
        )
        failed = f", failed: {self.failed}" if self.failed else ""
        return (
            f"requests: {self.requests}{failed}, tokens: {self.tokens}, tokens/s: {rate:.0f}, "
            f"time to first token: {first}, elapsed: {elapsed_s:.2f} s"
        )
