"""Token ids to text, for many requests at a time, in pieces that are final."""

from manager.detokenize.decoder import SLOTS_MAX, Choice, choose, load_decoder, proved_table
from manager.detokenize.interface import PROMPT_TAIL_MAX, BatchDecoder, DecoderKind
from manager.detokenize.library import LibraryDecoder
from manager.detokenize.table import DecodeTable, TableUnfitError
from manager.detokenize.table_blob import table_from_bytes, table_to_bytes
from manager.detokenize.table_decoder import TableDecoder
from manager.detokenize.vocabulary import Vocabulary

__all__ = [
    "PROMPT_TAIL_MAX",
    "SLOTS_MAX",
    "BatchDecoder",
    "Choice",
    "DecodeTable",
    "DecoderKind",
    "LibraryDecoder",
    "TableDecoder",
    "TableUnfitError",
    "Vocabulary",
    "choose",
    "load_decoder",
    "proved_table",
    "table_from_bytes",
    "table_to_bytes",
]
