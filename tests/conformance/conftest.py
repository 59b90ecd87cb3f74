"""The ways by which a process comes to a decoder; all of them keep the same promises."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

import shmring
from manager.detokenize import (
    SLOTS_MAX,
    BatchDecoder,
    DecoderKind,
    TableDecoder,
    choose,
    load_decoder,
    table_from_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

WAYS = {
    "table": DecoderKind.TABLE,
    "table from bytes": DecoderKind.TABLE,
    "table mapped": DecoderKind.TABLE,
    "library": DecoderKind.LIBRARY,
}


@dataclass
class Loader:
    """Makes the decoder of a tokenizer, in one of the ways."""

    way: str
    name: str
    """Of shared memory that it may use."""
    _undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def kind(self) -> DecoderKind:
        """How its decoders come to their text."""
        return WAYS[self.way]

    def __call__(self, tokenizer: Tokenizer, *, slots_max: int = SLOTS_MAX) -> BatchDecoder:
        if self.way in ("table", "library"):
            return load_decoder(tokenizer, slots_max=slots_max, kind=self.kind)
        packed: bytes | memoryview = choose(tokenizer).table_bytes()
        assert packed, "there is a table for it"
        if self.way == "table mapped":
            self._undo.enter_context(contextlib.closing(shmring.publish_blob(self.name, bytes(packed))))
            mapping = shmring.read_blob(self.name)
            self._undo.callback(mapping.handle.close)
            packed = mapping.payload
        return TableDecoder(table_from_bytes(packed), slots_max=slots_max, reason="shared")

    def close(self) -> None:
        """Let go of what the decoders read."""
        self._undo.close()


@pytest.fixture(params=WAYS)
def load(ring_name: str, request: pytest.FixtureRequest) -> Iterator[Loader]:
    """Of a tokenizer, its decoder."""
    loader = Loader(request.param, f"{ring_name}.table")
    yield loader
    loader.close()
