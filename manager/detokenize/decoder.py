"""Chooses how a tokenizer's ids are decoded: by a table if that is proved right.

The choice is made from the decoder's definition and then put to the proof against the
library itself, at every load. Whatever does not pass is decoded by the library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from manager.detokenize.interface import BatchDecoder, DecoderKind
from manager.detokenize.library import LibraryDecoder
from manager.detokenize.proof import difference, sequences_needed
from manager.detokenize.table import DecodeTable, TableUnfitError
from manager.detokenize.table_decoder import TableDecoder
from manager.detokenize.vocabulary import Vocabulary
from manager.errors import DetokenizeError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SLOTS_MAX = 1 << 16


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
    try:
        table = proved_table(tokenizer, vocabulary)
    except TableUnfitError as error:
        if kind is DecoderKind.TABLE:
            raise DetokenizeError(f"no decode table: {error}") from error
        return LibraryDecoder(tokenizer, vocabulary, slots_max=slots_max, reason=str(error))
    return TableDecoder(table, slots_max=slots_max, reason="each id adds the same bytes, as proved at load")


def proved_table(tokenizer: Tokenizer, vocabulary: Vocabulary) -> DecodeTable:
    """A table that decodes as the library does; TableUnfitError if there is none."""
    table = DecodeTable.build(tokenizer, vocabulary)
    trial = TableDecoder(table, slots_max=sequences_needed(table.vocab_size), reason="on trial")
    found = difference(trial, table, tokenizer)
    if found is not None:
        raise TableUnfitError(f"the table decodes differently from the library: {found}")
    return table
