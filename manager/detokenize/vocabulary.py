"""The tokens of a tokenizer by id, and which of them are special.

Read through the library's own accessors. To write the whole tokenizer out as JSON and read
that back would cost most of a second for 150,000 ids, nearly all of it for merges that no
decoder looks at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from manager.errors import DetokenizeError

if TYPE_CHECKING:
    import numpy.typing as npt
    from tokenizers import Tokenizer

# Tables are as long as the largest id. The largest vocabularies in use have 2**18 ids.
ID_COUNT_MAX = 1 << 24


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[i]` is None where the vocabulary has a hole. `special`: (n,) bool."""

    tokens: list[str | None]
    special: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Reads the vocabulary; DetokenizeError if its ids are absurdly large."""
        ids_by_token = tokenizer.get_vocab(with_added_tokens=False)
        added = tokenizer.get_added_tokens_decoder()
        id_count = 1 + max(max(ids_by_token.values(), default=-1), max(added, default=-1))
        if id_count > ID_COUNT_MAX:
            raise DetokenizeError(f"largest token id is too large: id={id_count - 1}, max={ID_COUNT_MAX - 1}")

        tokens: list[str | None] = [None] * id_count
        for token, token_id in ids_by_token.items():
            tokens[token_id] = token
        for token_id, added_token in added.items():
            tokens[token_id] = added_token.content
        unnamed = _holes(tokens)
        for token_id in unnamed:  # a hole, or a Unigram piece that is there twice
            tokens[token_id] = tokenizer.id_to_token(token_id)

        # By text, not by id: so does the library when it skips.
        special_texts = {added_token.content for added_token in added.values() if added_token.special}
        special = np.zeros(id_count, np.bool_)
        for token_id in {*added, *unnamed, *(ids_by_token.get(text, -1) for text in special_texts)}:
            if token_id >= 0 and tokens[token_id] in special_texts:
                special[token_id] = True
        return cls(tokens, special)

    def holes(self) -> list[int]:
        """Ids below the largest one that the vocabulary has not."""
        return _holes(self.tokens)


def _holes(tokens: list[str | None]) -> list[int]:
    holes = []
    start = 0
    for _ in range(tokens.count(None)):  # found by C; a loop in Python over all ids takes 20 ms
        start = tokens.index(None, start)
        holes.append(start)
        start += 1
    return holes
