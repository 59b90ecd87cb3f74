"""Chooses how a tokenizer's ids are decoded: by a table if that is proved right.

The choice is made from the decoder's definition and then put to the proof against the
library itself, at every load. Whatever does not pass is decoded by the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from manager.detokenize.interface import BatchDecoder, DecoderKind
from manager.detokenize.library import LibraryDecoder
from manager.detokenize.proof import difference, sequences_needed
from manager.detokenize.table import DecodeTable, TableUnfitError
from manager.detokenize.table_blob import table_to_bytes
from manager.detokenize.table_decoder import TableDecoder
from manager.detokenize.vocabulary import Vocabulary
from manager.errors import DetokenizeError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SLOTS_MAX = 1 << 16


_TABLE_REASON = "each id adds the same bytes, as proved at load"


@dataclass(frozen=True)
class Choice:
    """How a tokenizer's ids are decoded, and why so."""

    kind: DecoderKind
    reason: str
    table: DecodeTable | None
    """Of kind TABLE."""

    def table_bytes(self) -> bytes:
        """The table in the form in which it is shared; b"" if there is none."""
        return b"" if self.table is None else table_to_bytes(self.table)


def choose(tokenizer: Tokenizer, vocabulary: Vocabulary | None = None) -> Choice:
    """By a table, if there is one and it is proved right; else by the library."""
    try:
        table = proved_table(tokenizer, vocabulary or Vocabulary.of(tokenizer))
    except TableUnfitError as error:
        return Choice(DecoderKind.LIBRARY, str(error), None)
    return Choice(DecoderKind.TABLE, _TABLE_REASON, table)


def load_decoder(
    tokenizer: Tokenizer, *, slots_max: int = SLOTS_MAX, kind: DecoderKind | None = None
) -> BatchDecoder:
    """The decoder of a tokenizer, for at most `slots_max` texts at a time.

    `kind` wants one of the two; DetokenizeError if that is TABLE and there is no right one.
    A TABLE decoder does not keep the tokenizer.
    """
    vocabulary = Vocabulary.of(tokenizer)
    if kind is DecoderKind.LIBRARY:
        return LibraryDecoder(tokenizer, vocabulary, slots_max=slots_max, reason="asked for")
    choice = choose(tokenizer, vocabulary)
    if choice.table is not None:
        return TableDecoder(choice.table, slots_max=slots_max, reason=choice.reason)
    if kind is DecoderKind.TABLE:
        raise DetokenizeError(f"no decode table: {choice.reason}")
    return LibraryDecoder(tokenizer, vocabulary, slots_max=slots_max, reason=choice.reason)


def proved_table(tokenizer: Tokenizer, vocabulary: Vocabulary) -> DecodeTable:
    """A table that decodes as the library does; TableUnfitError if there is none."""
    table = DecodeTable.build(tokenizer, vocabulary)
    trial = TableDecoder(table, slots_max=sequences_needed(table.vocab_size), reason="on trial")
    found = difference(trial, table, tokenizer)
    if found is not None:
        raise TableUnfitError(f"the table decodes differently from the library: {found}")
    return table
