"""What every decoder promises, whichever way it decodes.

Deltas are final: what was handed out is never withdrawn and never sent twice. They are
always whole characters. Joined, and with what `finish` gives, they are the text that the
tokenizers library decodes from all ids at once, with one exception: a run of byte tokens
(`<0xE4>`) that is not valid UTF-8. The library decides about such a run as a whole, after
its last byte: one bad byte turns the good characters and newlines beside it into U+FFFD.
A stream has already sent those. So each character here stands as soon as it is complete,
and only the bad bytes become U+FFFD. The other choice, to hold every run of bytes until it
ends, would keep whole answers back in languages that are written in byte tokens.

Ids outside the vocabulary (negative ones too) add nothing and are counted; they are one
request's concern and no reason for an error.

A decoder is used by one thread at a time.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from manager._detok import lib

if TYPE_CHECKING:
    import numpy.typing as npt

# Ids of the prompt's end that `open` looks at. A pending character has at most three bytes,
# so at most three tokens; the others are there because ids that add nothing stand between.
PROMPT_TAIL_MAX: int = lib.DETOK_PROMPT_TAIL_MAX


class DecoderKind(enum.Enum):
    """How a decoder comes to its text."""

    TABLE = "table"  # bytes of each id from a table, in C
    LIBRARY = "library"  # the tokenizers library, on a window of ids


class BatchDecoder(Protocol):
    """Turns the ids of many requests into text, each request in a slot of its own.

    `reason` says in words why the decoder is of its kind. `vocab_size` is the largest id
    plus one. Faults of the caller (a slot that is not open, counts that do not add up)
    raise DetokenizeError before anything has changed; a wrong dtype or shape TypeError.
    """

    kind: DecoderKind
    reason: str
    vocab_size: int

    def open(
        self,
        prompt_tail: npt.NDArray[np.int32],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> int:
        """A slot for a new text, below `slots_max`; UnavailableError if all are in use.

        `prompt_tail`: (m,) int32, the last ids of the prompt, of which the last
        PROMPT_TAIL_MAX count. Fewer are taken for the whole prompt, none for the true start
        of a text; PROMPT_TAIL_MAX or more are a continuation, even if they say nothing. The
        prompt's own text never comes out, except that a character which the prompt began
        comes out when the output completes it.

        `spaces_between_special_tokens` is accepted from every request. The library's
        tokenizers have no such choice, so it changes nothing.
        """
        ...

    def close(self, slot: int) -> None:
        """Frees the slot; what it held is lost. The number will be given out again."""
        ...

    def decode(
        self,
        slots: npt.NDArray[np.uint32],
        counts: npt.NDArray[np.uint32],
        token_ids: npt.NDArray[np.int32],
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """The text of n rows: UTF-8 back to back, and (n,) uint32 lengths in bytes.

        Row r is the next counts[r] ids of `token_ids`, of the text in slots[r]. A slot may
        come up in several rows; they are taken in order. `slots`, `counts`: (n,) uint32;
        `token_ids`: (counts.sum(),) int32.
        """
        ...

    def finish(self, slot: int) -> bytes:
        """What was held back, in UTF-8: U+FFFD for an incomplete character. The slot stays open."""
        ...

    def decode_one(self, token_id: int) -> str:
        """What the id adds in the midst of a text, special tokens shown; "" if it is unknown.

        For texts beside log probabilities: word starts keep their space, so that two
        tokens which differ in it differ in their text.
        """
        ...

    def decode_each(
        self, token_ids: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """`decode_one` of n ids: UTF-8 back to back, and (n,) uint32 lengths in bytes."""
        ...

    def unknown_ids(self, slot: int) -> int:
        """How many ids outside the vocabulary the open text in this slot has met."""
        ...


def check_rows(
    slots: npt.NDArray[np.uint32], counts: npt.NDArray[np.uint32], token_ids: npt.NDArray[np.int32]
) -> None:
    """TypeError unless the arguments of `decode` have the dtypes and shapes it promises."""
    # Not converted silently: an int64 column would wrap into ids that exist.
    if slots.dtype != np.uint32 or counts.dtype != np.uint32 or token_ids.dtype != np.int32:
        raise TypeError(
            "wrong dtype: "
            f"slots={slots.dtype}, counts={counts.dtype}, token_ids={token_ids.dtype}, "
            "wanted=uint32, uint32, int32"
        )
    if slots.ndim != 1 or slots.shape != counts.shape or token_ids.ndim != 1:
        raise TypeError(
            f"wrong shape: slots={slots.shape}, counts={counts.shape}, token_ids={token_ids.shape}, "
            "wanted=(n,), (n,), (sum,)"
        )
