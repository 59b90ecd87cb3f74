"""The text and the tokenizer that come with the package (data/NOTICE.md says what they are).

`TOKENIZER_PATH` is what a deployment names as its tokenizer if it has no other.
"""

from __future__ import annotations

import lzma
from pathlib import Path

_DATA = Path(__file__).parent / "data"

TOKENIZER_PATH = _DATA / "tokenizer.json"
TEXT_PATH = _DATA / "botchan.txt.xz"

VOCAB_SIZE = 4096
EOS_TOKEN_ID = 0  # "<|endoftext|>", the first special token of scripts/make_engine_data.py
PAD_TOKEN_ID = 1  # "<|pad|>"

# The book has 627 paragraphs of 128 tokens on average, many of them a line of talk. An ending after
# every fourth makes texts of some hundred tokens, a length that people ask for.
PARAGRAPHS_PER_DOCUMENT = 4


def read_text() -> str:
    """Read the book: one paragraph a line, 254 kB, ASCII."""
    with lzma.open(TEXT_PATH, "rt", encoding="ascii") as file:
        return file.read()


def read_documents() -> list[str]:
    """Cut the book into pieces after which a model may end: four paragraphs each, none across chapters."""
    documents: list[str] = []
    paragraphs: list[str] = []
    for paragraph in read_text().splitlines():
        if paragraphs and (paragraph.startswith("CHAPTER ") or len(paragraphs) == PARAGRAPHS_PER_DOCUMENT):
            documents.append("\n".join(paragraphs))
            paragraphs = []
        paragraphs.append(paragraph)
    documents.append("\n".join(paragraphs))
    return documents
