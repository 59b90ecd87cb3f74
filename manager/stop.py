"""Finds stop strings in text that comes in pieces.

A stop string is found wherever it ends, however the pieces are cut. What is held back
meanwhile is the longest end of the text that is the beginning of a stop string and not the
whole of it: never a fixed window, so text that cannot become a stop string is never late.

Works on UTF-8 with the Aho-Corasick automaton: each byte is looked at once, whatever the
number of stop strings. Pieces are whole characters. Then so is everything released: a stop
string begins with the first byte of a character, so a byte-wise match does too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manager.errors import ValidationError
from manager.stop_regex import admit

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROOT = 0
_NO_STOP = -1

#: Characters that a regex without an end is searched for in. An answer may be as long as it likes,
#: and to search all of it at every step would cost more and more.
REGEX_REACH_MAX = 4096
_OLD_MATCHES_MAX = 64


@dataclass(frozen=True)
class StopStep:
    """What a piece of text led to.

    `text` may be sent now. `matched` is the stop string found in this step, once; what came
    after it is dropped. `held_length` bytes wait for more text.
    """

    text: bytes
    matched: str | None
    held_length: int


class StopMatcher:
    """Watches one text for stop strings, and for regular expressions.

    Of several that occur, the one that ends first counts; of those that end together, the
    first in `stops`. The text ends before it, or after it if `keep`. An empty stop string,
    or one that is not valid text, raises ValidationError.

    `regexes` are searched for in the last of the text, as far back as they can reach, once a
    piece. What they match stays in the text, for it is not what anybody wrote down; unless it
    is, letter for letter, the pattern itself: then it ends the text as a stop string does. So
    of a regex only what may become its own letters is held back. A pattern that is not
    admitted raises ValidationError.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool, regexes: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._patterns = [_encoded(stop) for stop in self._stops]
        self._automaton = _Automaton(self._patterns, [regex.encode() for regex in regexes])
        self._regexes = _RegexTail(regexes) if regexes else None
        self._node = _ROOT
        self._held = b""
        self._ended = False

    def push(self, delta: bytes, *, armed: bool = True) -> StopStep:
        """Takes the next piece, whole characters of UTF-8.

        `armed` false: the text may not stop yet. Stop strings that end in this piece are
        passed over for good; those that it only begins are held.
        """
        if self._ended:
            return StopStep(b"", None, 0)
        text = self._held + delta
        position, found = self._scan(text, armed=armed)
        if self._regexes is not None and delta:
            matched = self._regexes.push(delta, armed=armed)
            if matched is not None and (found == _NO_STOP or len(self._held) + matched.end < position):
                return self._end_at(text, len(self._held) + matched.end, matched)
        if found != _NO_STOP:
            return self._end(text[:position], found)

        # Of the node's text only a proper prefix of a stop string is worth waiting for.
        held_length = self._automaton.held_length[self._node]
        self._held = text[len(text) - held_length :]
        return StopStep(text[: len(text) - held_length], None, held_length)

    def flush(self) -> bytes:
        """The text held back, at the end of a text that did not stop by itself."""
        held, self._held = self._held, b""
        self._node = _ROOT
        return held

    def _scan(self, text: bytes, *, armed: bool) -> tuple[int, int]:
        """Looks on behind what is held, to the first stop string or to the end: (where, which)."""
        automaton = self._automaton
        node, position = self._node, len(self._held)
        while position < len(text):
            if node == _ROOT:
                # Most text is here: skip to a byte that begins a stop string.
                begin = automaton.first_bytes.search(text, position)
                if begin is None:
                    break
                position = begin.start()
            node = automaton.step(node, text[position])
            position += 1
            found = automaton.stop_ending_at[node]
            if found != _NO_STOP and armed:
                return position, found
        self._node = node
        return len(text), _NO_STOP

    def _end(self, text: bytes, found: int) -> StopStep:
        self._ended = True
        self._held = b""
        if not self._keep:
            text = text[: len(text) - len(self._patterns[found])]
        return StopStep(text, self._stops[found], 0)

    def _end_at(self, text: bytes, end: int, match: _RegexMatch) -> StopStep:
        self._ended = True
        self._held = b""
        literal = match.regex.encode()
        if not self._keep and text[:end].endswith(literal) and match.length == len(literal):
            end -= len(literal)
        return StopStep(text[:end], match.regex, 0)


@dataclass(frozen=True)
class _RegexMatch:
    """A regex that matched: where it ends, in bytes of the piece, and how many bytes it took."""

    regex: str
    end: int
    length: int


class _RegexTail:
    """The last of a text, as far back as a regex can reach, and a search in it."""

    def __init__(self, regexes: Sequence[str]) -> None:
        # first: to compile one that is refused may raise anything
        reach = max(admit(regex) for regex in regexes)
        self._compiled = [(regex, re.compile(regex)) for regex in regexes]
        # one character more, so that ^ and \b see whether anything stands before
        self._length = min(reach, REGEX_REACH_MAX) + 1
        self._tail = ""
        self._start = 0
        """Where a match may begin: behind the one character more."""

    def push(self, delta: bytes, *, armed: bool) -> _RegexMatch | None:
        """Takes the next piece; the match in it that ends first, and behind its start.

        What ended before it was passed over, or is the past of a text that had to go on.
        """
        piece = delta.decode()
        text, boundary = self._tail + piece, len(self._tail)
        best: tuple[int, int, str] | None = None
        if armed:
            for regex, compiled in self._compiled:
                span = _first_behind(compiled, text, self._start, boundary)
                if span is not None and (best is None or span[1] < best[0]):
                    best = (span[1], span[0], regex)
        self._tail = text[-self._length :]
        if len(text) > self._length:
            self._start = 1
        if best is None:
            return None
        end, start, regex = best
        return _RegexMatch(regex, len(text[boundary:end].encode()), len(text[start:end].encode()))


def _first_behind(
    compiled: re.Pattern[str], text: str, position: int, boundary: int
) -> tuple[int, int] | None:
    """The first match from `position` on that ends behind `boundary`.

    Older ones are few, and no more than _OLD_MATCHES_MAX of them are looked through.
    """
    for _ in range(_OLD_MATCHES_MAX):
        match = compiled.search(text, position)
        if match is None:
            return None
        if match.end() > boundary:
            return match.span()
        position = match.start() + 1
    match = compiled.search(text, boundary)
    return None if match is None else match.span()


def trim_at_stop(text: bytes, matched: str, keep: bool) -> bytes:
    """Cuts `text` at the first `matched`, behind it if `keep`; unchanged where there is none.

    For a stop string that somebody else found, and reports without saying where.
    """
    pattern = matched.encode("utf-8", "surrogatepass")
    start = text.find(pattern)
    if not pattern or start < 0:
        return text
    return text[: start + len(pattern) if keep else start]


class _Automaton:
    """A trie of the patterns with, for each node, where to go on when no child fits.

    A node stands for the text on the way to it: the longest end of the text so far that
    begins a pattern. `stop_ending_at[node]`: the first pattern in order that ends here, or
    _NO_STOP. `held_length[node]`: the length of the longest end of the node's text that is
    a proper prefix of a pattern.
    """

    def __init__(self, patterns: Sequence[bytes], held_only: Sequence[bytes] = ()) -> None:
        """`held_only`: patterns whose beginnings are held, and that are never found."""
        self._children: list[dict[int, int]] = [{}]
        self._fall_back: list[int] = [_ROOT]
        self.stop_ending_at: list[int] = [_NO_STOP]
        self.held_length: list[int] = [0]
        # An empty class is no regular expression: (?!) is one that is found nowhere.
        begins = {re.escape(pattern[:1]) for pattern in (*patterns, *held_only)}
        first_bytes = b"|".join(sorted(begins)) or b"(?!)"
        self.first_bytes = re.compile(first_bytes)
        for order, pattern in enumerate(patterns):
            self._add(pattern, order)
        for pattern in held_only:
            self._add(pattern, _NO_STOP)
        self._link()

    def step(self, node: int, byte: int) -> int:
        """The node after one more byte. Falls back no more often, in all, than it climbed."""
        children = self._children
        while byte not in children[node]:
            if node == _ROOT:
                return _ROOT
            node = self._fall_back[node]
        return children[node][byte]

    def _add(self, pattern: bytes, order: int) -> None:
        node = _ROOT
        for length, byte in enumerate(pattern, start=1):
            child = self._children[node].get(byte)
            if child is None:
                child = len(self._children)
                self._children[node][byte] = child
                self._children.append({})
                self._fall_back.append(_ROOT)
                self.stop_ending_at.append(_NO_STOP)
                self.held_length.append(length)
            node = child
        if self.stop_ending_at[node] == _NO_STOP:  # the same pattern twice: the first counts
            self.stop_ending_at[node] = order

    def _link(self) -> None:
        """Links in order of length, so what a node falls back to is complete before it."""
        nodes = list(self._children[_ROOT].values())
        for node in nodes:  # grows as it goes
            shorter = self._fall_back[node]
            if not self._children[node]:  # a whole pattern and no part of another
                self.held_length[node] = self.held_length[shorter]
            endings = (self.stop_ending_at[node], self.stop_ending_at[shorter])
            self.stop_ending_at[node] = min((n for n in endings if n != _NO_STOP), default=_NO_STOP)
            for byte, child in self._children[node].items():
                self._fall_back[child] = self.step(shorter, byte)
                nodes.append(child)


def _encoded(stop: str) -> bytes:
    if not stop:
        raise ValidationError("stop string is empty", field="stop")
    try:
        return stop.encode()
    except UnicodeEncodeError as error:
        raise ValidationError(f"stop string is not valid text: stop={stop!r}", field="stop") from error
