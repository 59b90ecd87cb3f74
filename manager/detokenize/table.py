"""A table of what each id adds to the text, worked out from the tokenizer's decoder.

The decoder of a tokenizer.json is a chain of steps over the list of tokens. As long as
each step looks at one token (or at whether it is the first), or joins all of them, its
effect can be worked out per id, once. Such are

    ByteLevel                                    GPT-2, Llama 3, Qwen, DeepSeek
    Replace, ByteFallback, Fuse, Strip           Llama 2, Mistral, Gemma
    WordPiece, its clean-up included             BERT
    Metaspace                                    T5, ALBERT
    none                                         tokens joined by spaces

in any combination that keeps to the rule. Whatever else there is raises TableUnfitError:
steps that look at the last token (BPEDecoder), at neighbours (CTC) or at the joined text.

The table is flat numpy arrays with no pointers, so it can lie in shared memory.
"""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from manager._detok import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer

    from manager.detokenize.vocabulary import Vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_BYTE = 256
_SWAP_LENGTH_MAX = 4  # as in the C struct
_STRIP_COUNT_MAX = 255

# What the library's WordPiece decoder does to each token, in its order.
_WORDPIECE_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class TableUnfitError(Exception):
    """No table can stand for this decoder; the text says why."""


@dataclass(frozen=True)
class DecodeTable:
    """What each of n ids adds to the text.

    `text`: uint8, the bytes of all ids back to back; `text_offsets`: (n + 1,) uint32.
    `first_text`, `first_offsets`: the same for an id that is the first token, or None where
    that makes no difference. `flags`: (n,) uint8 of DETOK_ID_*. Up to `strip_count` copies
    of `strip_byte` are taken off the start of the whole text. A character that comes about
    from several tokens is replaced by `swap_to` if it is `swap_from` (b"": none is).
    `bytes_in_runs`: there are byte tokens, of which the library judges runs as a whole.
    """

    text: npt.NDArray[np.uint8]
    text_offsets: npt.NDArray[np.uint32]
    first_text: npt.NDArray[np.uint8] | None
    first_offsets: npt.NDArray[np.uint32] | None
    flags: npt.NDArray[np.uint8]
    strip_byte: int
    strip_count: int
    swap_from: bytes
    swap_to: bytes
    bytes_in_runs: bool

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return len(self.flags)

    def text_of(self, token_id: int) -> bytes:
        """What the id adds in the midst of a text; b"" if it is not in the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        start, end = self.text_offsets[token_id : token_id + 2].tolist()
        return self.text[start:end].tobytes()

    @classmethod
    def build(cls, tokenizer: Tokenizer, vocabulary: Vocabulary) -> DecodeTable:
        """The table of a tokenizer; TableUnfitError if its decoder has none."""
        chain = _Chain(vocabulary)
        steps = _decoder_steps(tokenizer)
        if not steps:
            chain.join_by_spaces()
        for step in steps:
            chain.apply(step)
        return chain.table()


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The decoder's steps in order, sequences in sequences laid flat; none without decoder."""
    if tokenizer.decoder is None:
        return []
    try:
        definition: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    except Exception as error:  # a decoder written in Python cannot be written out
        raise TableUnfitError(f"the decoder has no definition: {error}") from error
    return _laid_flat(definition)


def _laid_flat(definition: dict[str, Any]) -> list[dict[str, Any]]:
    if definition["type"] != "Sequence":
        return [definition]
    return [step for inner in definition["decoders"] for step in _laid_flat(inner)]


class _Stage(enum.IntEnum):
    """What the steps so far have made of the list of tokens."""

    TOKENS = 0  # still one text per token
    BYTES = 1  # byte tokens are bytes, and neighbours among them one text
    FUSED = 2  # one text
    STRIPPED = 3  # one text, and its start is gone


class _Chain:
    """The effect of the steps so far on every token: where it is first, and anywhere else."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._stage = _Stage.TOKENS
        self._anywhere = [token or "" for token in vocabulary.tokens]
        self._first: list[str] | None = None
        # From BYTES on the texts are bytes and these take over.
        self._anywhere_bytes: list[bytes] = []
        self._first_bytes: list[bytes] | None = None
        self._strip_byte = 0
        self._strip_count = 0
        self._swap = (b"", b"")
        self._bytes_in_runs = False

    def apply(self, step: dict[str, Any]) -> None:
        """Adds one step of the decoder."""
        known: dict[str, Callable[[dict[str, Any]], None]] = {
            "ByteFallback": self._byte_fallback,
            "ByteLevel": self._byte_level,
            "Fuse": self._fuse,
            "Metaspace": self._metaspace,
            "Replace": self._replace,
            "Strip": self._strip,
            "WordPiece": self._wordpiece,
        }
        name = step["type"]
        if name not in known:
            raise TableUnfitError(f"decoder step {name} looks beyond one token")
        known[name](step)

    def join_by_spaces(self) -> None:
        """What the library does where a tokenizer has no decoder."""
        self._first = self._anywhere
        self._anywhere = [" " + token for token in self._anywhere]

    def table(self) -> DecodeTable:
        """The table of all steps together."""
        if self._stage is _Stage.TOKENS:
            self._to_bytes(str.encode)
        flags = np.zeros(len(self._anywhere_bytes), np.uint8)
        flags[:] = lib.DETOK_ID_KNOWN
        flags[self._vocabulary.holes()] = 0
        flags[self._vocabulary.special] |= lib.DETOK_ID_SPECIAL
        text, text_offsets = _back_to_back(self._anywhere_bytes)
        whole = _are_utf8(text, text_offsets)
        first_text = first_offsets = None
        if self._first_bytes is not None:
            first_text, first_offsets = _back_to_back(self._first_bytes)
            whole &= _are_utf8(first_text, first_offsets)
        flags[whole] |= lib.DETOK_ID_WHOLE
        return DecodeTable(
            text=text,
            text_offsets=text_offsets,
            first_text=first_text,
            first_offsets=first_offsets,
            flags=flags,
            strip_byte=self._strip_byte,
            strip_count=self._strip_count,
            swap_from=self._swap[0],
            swap_to=self._swap[1],
            bytes_in_runs=self._bytes_in_runs,
        )

    def _each(self, change: Callable[[str], str]) -> None:
        self._anywhere = [change(token) for token in self._anywhere]
        if self._first is not None:
            self._first = [change(token) for token in self._first]

    def _each_bytes(self, change: Callable[[bytes], bytes]) -> None:
        self._anywhere_bytes = [change(text) for text in self._anywhere_bytes]
        if self._first_bytes is not None:
            self._first_bytes = [change(text) for text in self._first_bytes]

    def _to_bytes(self, encode: Callable[[str], bytes]) -> None:
        self._anywhere_bytes = [encode(token) for token in self._anywhere]
        if self._first is not None:
            self._first_bytes = [encode(token) for token in self._first]

    def _wanted(self, step: dict[str, Any], last: _Stage) -> None:
        if self._stage > last:
            raise TableUnfitError(f"decoder step {step['type']} works on the joined text")

    def _byte_level(self, step: dict[str, Any]) -> None:
        self._wanted(step, _Stage.TOKENS)
        self._anywhere_bytes = _byte_level_bytes(self._anywhere)
        if self._first is not None:
            self._first_bytes = _byte_level_bytes(self._first)
        self._stage = _Stage.FUSED

    def _byte_fallback(self, step: dict[str, Any]) -> None:
        self._wanted(step, _Stage.TOKENS)
        self._to_bytes(_byte_fallback_bytes)
        self._stage = _Stage.BYTES
        self._bytes_in_runs = True

    def _fuse(self, _: dict[str, Any]) -> None:
        if self._stage is _Stage.TOKENS:
            self._to_bytes(str.encode)
        self._stage = max(self._stage, _Stage.FUSED)

    def _metaspace(self, step: dict[str, Any]) -> None:
        self._wanted(step, _Stage.TOKENS)
        mark: str = step["replacement"]
        first = self._anywhere if self._first is None else self._first
        first_mark = " " if step["prepend_scheme"] == "never" else ""
        self._first = [token.replace(mark, first_mark) for token in first]
        self._anywhere = [token.replace(mark, " ") for token in self._anywhere]

    def _wordpiece(self, step: dict[str, Any]) -> None:
        self._wanted(step, _Stage.TOKENS)
        prefix: str = step["prefix"]
        if self._first is None:
            self._first = self._anywhere
        self._anywhere = [
            token[len(prefix) :] if token.startswith(prefix) else " " + token for token in self._anywhere
        ]
        if step["cleanup"]:
            self._each(_wordpiece_cleanup)

    def _replace(self, step: dict[str, Any]) -> None:
        self._wanted(step, _Stage.FUSED)
        old: str | None = step["pattern"].get("String")
        new: str = step["content"]
        if not old:
            raise TableUnfitError("decoder step Replace has a regular expression")
        if self._stage is _Stage.TOKENS:
            self._each(lambda token: token.replace(old, new))
            return
        # Of the joined text. One character lies within a token, or comes about from the
        # bytes of several, and then the decoder has an eye on it. U+FFFD also stands for
        # bytes that are not UTF-8, and nobody has an eye on those.
        from_bytes, to_bytes = old.encode(), new.encode()
        if len(old) > 1 or old == "\N{REPLACEMENT CHARACTER}" or len(to_bytes) > _SWAP_LENGTH_MAX:
            raise TableUnfitError("decoder step Replace works on the joined text")
        if self._swap[0]:
            raise TableUnfitError("two decoder steps Replace work on the joined text")
        self._swap = (from_bytes, to_bytes)
        self._each_bytes(lambda text: text.replace(from_bytes, to_bytes))

    def _strip(self, step: dict[str, Any]) -> None:
        self._wanted(step, _Stage.FUSED)
        content, start, stop = step["content"], step["start"], step["stop"]
        if stop:
            raise TableUnfitError("decoder step Strip looks at the end")
        if self._stage is _Stage.TOKENS:
            self._each(lambda token: _stripped(token, content, start))
            return
        if self._stage is _Stage.BYTES or not content.isascii() or start > _STRIP_COUNT_MAX:
            raise TableUnfitError("decoder step Strip works on runs of byte tokens")
        self._strip_byte, self._strip_count = ord(content), start
        self._stage = _Stage.STRIPPED


def _wordpiece_cleanup(token: str) -> str:
    if " " not in token:
        return token
    for old, new in _WORDPIECE_CLEANUP:
        token = token.replace(old, new)
    return token


def _stripped(token: str, content: str, count_max: int) -> str:
    count = len(token) - len(token.lstrip(content))
    return token[min(count, count_max) :]


def _byte_fallback_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(match[1]) if match else token.encode()


def _byte_level_bytes(tokens: list[str]) -> list[bytes]:
    """The bytes that the characters of each token stand for. All tokens at once: there are many."""
    codes = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), np.uint32)
    values = _BYTE_OF_CODE[np.minimum(codes, len(_BYTE_OF_CODE) - 1)]
    ends = np.cumsum(np.fromiter(map(len, tokens), np.int64, len(tokens)))
    data = values.astype(np.uint8).tobytes()
    texts = [data[start:end] for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]
    # One foreign character, and the library takes the whole token as it is written.
    foreign = np.searchsorted(ends, np.flatnonzero(values == _NO_BYTE), side="right")
    for index in set(foreign.tolist()):
        texts[index] = tokens[index].encode()
    return texts


def _byte_of_code() -> npt.NDArray[np.uint16]:
    """Code point of the stand-in -> the byte that it stands for, or _NO_BYTE; all above are foreign.

    Bytes that print stand for themselves, the others for 256, 257, ... in order, so that
    vocabularies are readable.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    bytes_of = np.full(256 + len(others) + 1, _NO_BYTE, np.uint16)
    bytes_of[printing] = printing
    bytes_of[256:-1] = others
    return bytes_of


_BYTE_OF_CODE = _byte_of_code()


def _are_utf8(text: npt.NDArray[np.uint8], offsets: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    whole = np.zeros(len(offsets) - 1, np.bool_)
    lib.detok_find_whole(
        ffi.from_buffer("uint8_t[]", text),
        ffi.from_buffer("uint32_t[]", offsets),
        len(whole),
        ffi.from_buffer("uint8_t[]", whole),
    )
    return whole


def _back_to_back(texts: list[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    ends = np.cumsum(np.fromiter(map(len, texts), np.uint64, len(texts)))
    if len(ends) and ends[-1] > np.iinfo(np.uint32).max:
        raise TableUnfitError(f"the vocabulary is too large: bytes={ends[-1]}")
    offsets = np.zeros(len(texts) + 1, np.uint32)
    offsets[1:] = ends
    return np.frombuffer(b"".join(texts), np.uint8), offsets
