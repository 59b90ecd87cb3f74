"""An n-gram model of order 4 with stupid back-off (Brants et al. 2007), over the shipped book.

A next id that followed the last three ids in the text is scored by its share of what followed
them. A context of few followers gets those of the context one id shorter as well, their scores
times `BACKOFF`, and so on down to single ids. So candidates stay sparse, some tens of 4096 ids,
and there are always some. Scores are weights: whoever draws from them normalizes.

Encoding the book takes 0.12 s and counting it 0.09 s (one core of a virtual AMD EPYC). What may
follow a context is put together when the context first comes up, and kept: the text has 90,000
contexts, which come to 60 MB at most. Doing it for all of them at load would take a second.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from manager.engines import corpus
from manager.engines.sampler import Candidates

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

ORDER = 4
BACKOFF = 0.4  # Brants et al. 2007, section 4
FOLLOWERS_MIN = 4  # a context of fewer gets those of the shorter context, too
FOLLOWERS_MAX = 16  # of one context, the most frequent


class _Level:
    """What followed the contexts of one length in the text."""

    def __init__(self, contexts: NDArray[np.int64], following: NDArray[np.int64], base: int) -> None:
        """Count pairs of a packed context and the id after it, both (n,)."""
        pairs, counts = np.unique(contexts * base + following, return_counts=True)
        context, ids = np.divmod(pairs, base)
        # By context, then the most frequent first, then by id.
        order = np.lexsort((ids, -counts, context))
        distinct, begins, places = np.unique(context, return_index=True, return_inverse=True)
        totals = np.bincount(places, weights=counts)
        # Lists and a dict, for they are read one context at a time.
        self._indexes = dict(zip(distinct.tolist(), range(len(distinct)), strict=True))
        self._begins: list[int] = [*begins.tolist(), len(ids)]
        self._ids: list[int] = ids[order].tolist()
        self._scores: list[float] = (counts / totals[places])[order].tolist()

    def __contains__(self, context: int) -> bool:
        return context in self._indexes

    def followers(self, context: int) -> dict[int, float]:
        """Get the most frequent ids after a context that the text has, and their scores."""
        index = self._indexes[context]
        begin = self._begins[index]
        end = min(self._begins[index + 1], begin + FOLLOWERS_MAX)
        return dict(zip(self._ids[begin:end], self._scores[begin:end], strict=True))


class NGramModel:
    """Probabilities of the next id, given a context: the last three ids, packed into one number."""

    def __init__(self, documents: Sequence[Sequence[int]], *, vocab_size: int, eos_token_id: int) -> None:
        """Count. Every document begins after an eos id and ends with one.

        At most 2^15 ids: four of them, and one mark for the unknown, must fit into 63 bits.
        """
        assert 0 <= eos_token_id < vocab_size <= 1 << 15
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self._unknown = vocab_size
        self._base = vocab_size + 1
        self._wrap: int = self._base ** (ORDER - 1)
        stream = [eos_token_id]
        for document in documents:
            stream.extend(document)
            stream.append(eos_token_id)
        ids = np.array(stream, np.int64)
        self._known: dict[int, Candidates] = {}  # at most the contexts of the text
        self._levels: list[_Level] = []  # levels[k]: after contexts of k ids
        contexts = np.zeros(len(ids), np.int64)
        for length in range(ORDER):
            self._levels.append(_Level(contexts[length:], ids[length:], self._base))
            # contexts[i] becomes the length + 1 ids before i; what is rolled in at the front is cut off.
            contexts += np.roll(ids, length + 1) * self._base**length
        # Every id of the vocabulary, by frequency, the unseen ones as if seen half a time.
        counts = np.maximum(np.bincount(ids, minlength=vocab_size), 0.5)
        self.unigrams = Candidates.from_weights(dict(enumerate(counts.tolist())))

    @classmethod
    def load(cls) -> NGramModel:
        """Build the model of the shipped book with the shipped tokenizer."""
        tokenizer = Tokenizer.from_file(str(corpus.TOKENIZER_PATH))
        # One by one: encode_batch starts threads, and a process that forks later would be warned of them.
        documents = [
            tokenizer.encode(document, add_special_tokens=False).ids for document in corpus.read_documents()
        ]
        return cls(documents, vocab_size=corpus.VOCAB_SIZE, eos_token_id=corpus.EOS_TOKEN_ID)

    def context(self, ids: Iterable[int]) -> int:
        """Pack a context. Of the ids only the last three matter.

        Before the first there was an eos, and before that nothing that the text could have.
        """
        packed = self._wrap - 1  # three of the unknown
        ids = chain((self.eos_token_id,), ids)
        for token_id in ids:
            packed = self.extended(packed, token_id)
        return packed

    def extended(self, context: int, token_id: int) -> int:
        """Pack the context that comes after a token. Ids that are none of the vocabulary are "unknown"."""
        if not 0 <= token_id < self.vocab_size:
            token_id = self._unknown
        return (context * self._base + token_id) % self._wrap

    def candidates(self, context: int) -> Candidates:
        """Get the ids that may come next; never none."""
        for length in range(ORDER - 1, 0, -1):
            suffix = context % self._base**length
            if suffix in self._levels[length]:
                return self._candidates(suffix, length)
        return self._candidates(0, 0)

    def _candidates(self, context: int, length: int) -> Candidates:
        """Put together, or look up, what follows a context of so many ids that the text has."""
        key = context * ORDER + length
        known = self._known.get(key)
        if known is not None:
            return known
        scores = self._levels[length].followers(context)
        if len(scores) < FOLLOWERS_MIN and length:
            # What has a follower has one without its first id.
            shorter = self._candidates(context % self._base ** (length - 1), length - 1)
            scores = {
                **{
                    token_id: BACKOFF * score
                    for token_id, score in zip(shorter.ids, shorter.weights, strict=True)
                },
                **scores,
            }
        known = self._known[key] = Candidates.from_weights(scores)
        return known
