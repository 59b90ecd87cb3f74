"""Decodes with the tokenizers library, for decoders that no table can stand for.

A text keeps the last ids that were said (the context) and those that are not said yet
(held). What the held ids add is what the library makes of both, less what it makes of the
context alone. A text that ends in U+FFFD may end inside a character, so its end waits.

Against the library's own stream of this kind: what is held can be flushed; broken bytes
raise nothing and do not make the window grow; the text of the prompt never comes out;
whole characters before an incomplete one go out at once. Each id costs a little more than
one call of the library, on at most CONTEXT_MAX + HELD_MAX + 1 ids.

If a later id changes the text of earlier ones (a joined " n't", say), that text stands as
it was sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from manager.detokenize.interface import PROMPT_TAIL_MAX, DecoderKind, check_rows
from manager.detokenize.slots import SlotTable
from manager.errors import DetokenizeError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from manager.detokenize.vocabulary import Vocabulary

_BROKEN = "\N{REPLACEMENT CHARACTER}"

# A context grows with the text to CONTEXT_MAX ids and is then cut to CONTEXT_KEPT, so most
# ids need no call for it.
CONTEXT_KEPT = 5
CONTEXT_MAX = 16
# Beyond this, held ids are said in part even if the text goes on to end in U+FFFD.
HELD_MAX = 16
# A character has at most four bytes; so many tokens at the end may belong to one that is
# incomplete.
_INCOMPLETE_MAX = 3


class LibraryDecoder:
    """A BatchDecoder on a tokenizer, one window of ids per slot."""

    kind = DecoderKind.LIBRARY

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, *, slots_max: int, reason: str) -> None:
        self.reason = reason
        self.vocab_size = len(vocabulary.tokens)
        self._library = _Library(tokenizer, vocabulary)
        self._slots = SlotTable(slots_max)
        self._windows: dict[int, _Window] = {}

    def open(
        self,
        prompt_tail: npt.NDArray[np.int32],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,  # noqa: ARG002 - see BatchDecoder.open
    ) -> int:
        """See BatchDecoder.open."""
        if prompt_tail.dtype != np.int32 or prompt_tail.ndim != 1:
            raise TypeError(f"prompt_tail is not (m,) int32: {prompt_tail.dtype}, {prompt_tail.shape}")
        slot = self._slots.take()
        self._windows[slot] = _Window(
            self._library, prompt_tail[-PROMPT_TAIL_MAX:].tolist(), skip_special_tokens
        )
        return slot

    def close(self, slot: int) -> None:
        """See BatchDecoder.close."""
        self._slots.give_back(slot)
        del self._windows[slot]

    def decode(
        self,
        slots: npt.NDArray[np.uint32],
        counts: npt.NDArray[np.uint32],
        token_ids: npt.NDArray[np.int32],
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """See BatchDecoder.decode."""
        check_rows(slots, counts, token_ids)
        ids = token_ids.tolist()
        rows = list(zip(slots.tolist(), counts.tolist(), strict=True))
        if sum(count for _, count in rows) != len(ids):
            raise DetokenizeError(
                "batch refused, counts do not add up to the number of token ids: "
                f"rows={len(rows)}, token_ids={len(ids)}"
            )
        for slot, _ in rows:
            self._slots.check(slot)

        texts: list[bytes] = []
        start = 0
        for slot, count in rows:
            window = self._windows[slot]
            text = "".join([window.push(token_id) for token_id in ids[start : start + count]])
            texts.append(text.encode())
            start += count
        lengths = np.fromiter(map(len, texts), np.uint32, len(texts))
        return np.frombuffer(bytearray(b"".join(texts)), np.uint8), lengths

    def finish(self, slot: int) -> bytes:
        """See BatchDecoder.finish."""
        self._slots.check(slot)
        return self._windows[slot].flush().encode()

    def decode_one(self, token_id: int) -> str:
        """See BatchDecoder.decode_one."""
        if not self._library.knows(token_id):
            return ""
        library = self._library
        return library.added(library.neutral, [token_id], skip_special=False).text

    def decode_each(
        self, token_ids: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """See BatchDecoder.decode_each."""
        if token_ids.dtype != np.int32 or token_ids.ndim != 1:
            raise TypeError(f"token_ids is not (n,) int32: {token_ids.dtype}, {token_ids.shape}")
        texts = [self.decode_one(token_id).encode() for token_id in token_ids.tolist()]
        lengths = np.fromiter(map(len, texts), np.uint32, len(texts))
        return np.frombuffer(bytearray(b"".join(texts)), np.uint8), lengths

    def unknown_ids(self, slot: int) -> int:
        """See BatchDecoder.unknown_ids."""
        self._slots.check(slot)
        return self._windows[slot].unknown_ids


class _Context(NamedTuple):
    """Ids that were said, and their text."""

    token_ids: list[int]
    text: str


class _Added(NamedTuple):
    """What some ids add, and the context that they make together with the one before."""

    text: str
    context: _Context


class _Library:
    """The library's decode, as far as a window needs it."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._known = [token is not None for token in vocabulary.tokens]
        self._special: list[bool] = vocabulary.special.tolist()
        self.neutral = self._find_neutral()

    def knows(self, token_id: int) -> bool:
        return 0 <= token_id < len(self._known) and self._known[token_id]

    def is_special(self, token_id: int) -> bool:
        return self._special[token_id]

    def text(self, token_ids: list[int], *, skip_special: bool) -> str:
        if not token_ids:
            return ""
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special)
        except Exception as error:
            raise DetokenizeError(f"the tokenizers library failed: {error}: token_ids={token_ids}") from error

    def cut_context(self, token_ids: list[int], *, skip_special: bool) -> _Context:
        """Of the last CONTEXT_KEPT ids as many as have whole characters for their text.

        A context that begins inside a character would do harm: where bytes are tokens, the
        library takes all the bytes after it for broken ones, too.
        """
        last = token_ids[-CONTEXT_KEPT:]
        for start in range(len(last)):
            text = self.text(last[start:], skip_special=skip_special)
            if _BROKEN not in text:
                return _Context(last[start:], text)
        return self.neutral

    def added(self, context: _Context, token_ids: list[int], *, skip_special: bool) -> _Added:
        """What `token_ids` add to the text after `context`."""
        for before in (context, self.neutral):
            all_ids = before.token_ids + token_ids
            text = self.text(all_ids, skip_special=skip_special)
            if text.startswith(before.text):
                return _Added(text[len(before.text) :], _Context(all_ids, text))
            # They change the text of their context, which has been sent: a run of bytes that
            # was good and is now broken, say. Then they are taken for themselves, in the
            # midst of a text that they leave alone.
        text = self.text(token_ids, skip_special=skip_special)
        return _Added(text, _Context(token_ids, text))

    def _find_neutral(self) -> _Context:
        """An id of plain text that keeps its text whatever stands beside it."""
        for token_id, special in enumerate(self._special):
            if special or not self._known[token_id]:
                continue
            text = self.text([token_id], skip_special=False)
            if text.isascii() and text.isalpha():
                twice = self.text([token_id, token_id], skip_special=False)
                if twice.startswith(text):
                    return _Context([token_id], text)
        return _Context([], "")


class _Window:
    """One text. Of the text of `held`, `_sent_length` characters were sent.

    `prompt_tail`: the prompt's last ids, at most PROMPT_TAIL_MAX.
    """

    __slots__ = ("_context", "_held", "_library", "_prompt_broken", "_sent_length", "_skip", "unknown_ids")

    def __init__(self, library: _Library, prompt_tail: list[int], skip_special: bool) -> None:
        self._library = library
        self._skip = skip_special
        self._held: list[int] = []
        self._sent_length = 0
        # As many U+FFFD may follow in the held text that are the prompt's own.
        self._prompt_broken = 0
        self.unknown_ids = 0

        tail = [token_id for token_id in prompt_tail if self._says(token_id)]
        if tail:
            self._context = library.cut_context(tail, skip_special=skip_special)
            self._hold_incomplete(tail)
        elif len(prompt_tail) < PROMPT_TAIL_MAX:
            self._context = _Context([], "")
        else:
            self._context = library.neutral  # a continuation, though of nothing known

    def _says(self, token_id: int) -> bool:
        library = self._library
        return library.knows(token_id) and not (self._skip and library.is_special(token_id))

    def _hold_incomplete(self, tail: list[int]) -> None:
        """Holds the last ids of a prompt that ends inside a character."""
        if not self._library.text(tail, skip_special=self._skip).endswith(_BROKEN):
            return
        for start in range(len(tail)):
            for count in range(1, min(_INCOMPLETE_MAX, len(tail) - start) + 1):
                said = tail[start : len(tail) - count]
                said_text = self._library.text(said, skip_special=self._skip)
                if _BROKEN in said_text:
                    continue
                self._context = _Context(said, said_text) if said or start == 0 else self._library.neutral
                self._held = tail[len(tail) - count :]
                text = self._added().text
                self._sent_length = len(text.rstrip(_BROKEN))
                self._prompt_broken = len(text) - self._sent_length
                return

    def push(self, token_id: int) -> str:
        """The text that can be sent now that the id has come."""
        if not self._library.knows(token_id):
            self.unknown_ids += 1
            return ""
        if not self._says(token_id):
            return ""
        self._held.append(token_id)
        added = self._added()
        if not added.text.endswith(_BROKEN):
            return self._say(added, len(self._held))
        if len(self._held) > HELD_MAX:
            return self._say_older(added)
        return self._send(added.text.rstrip(_BROKEN))

    def flush(self) -> str:
        """The text of everything held, as it is."""
        if not self._held:
            return ""
        return self._say(self._added(), len(self._held))

    def _added(self) -> _Added:
        return self._library.added(self._context, self._held, skip_special=self._skip)

    def _send(self, text: str) -> str:
        """Of the held text's beginning, `text`, what was not sent yet."""
        fresh = text[self._sent_length :]
        if not fresh:
            return ""
        self._sent_length = len(text)
        broken = len(fresh) - len(fresh.lstrip(_BROKEN))
        prompts, self._prompt_broken = min(broken, self._prompt_broken), 0
        return fresh[prompts:]

    def _say(self, added: _Added, count: int) -> str:
        """Sends what the first `count` held ids add; they are context from now on."""
        fresh = self._send(added.text)
        self._sent_length = max(self._sent_length - len(added.text), 0)
        self._held = self._held[count:]
        self._context = self._after(added)
        return fresh

    def _after(self, added: _Added) -> _Context:
        context = added.context
        if len(context.token_ids) <= CONTEXT_MAX and _BROKEN not in context.text:
            return context
        return self._library.cut_context(context.token_ids, skip_special=self._skip)

    def _say_older(self, added: _Added) -> str:
        """Sends what cannot belong to a character that is incomplete at the end.

        Where to cut is found by trying: the texts on both sides must make the text of all.
        """
        library, skip = self._library, self._skip
        for count in range(len(self._held) - _INCOMPLETE_MAX, 0, -1):
            older = library.added(self._context, self._held[:count], skip_special=skip)
            newer = library.added(self._after(older), self._held[count:], skip_special=skip)
            if older.text + newer.text == added.text:
                return self._say(older, count)
        return self._say(added, len(self._held))
