"""Loads a tokenizer, and encodes text with it without holding the GIL.

`encode_batch_fast` is the only encoder here: `Tokenizer.encode` holds the GIL for its whole
call, so a long prompt would stop the event loop for 50 to 120 ms per 110 KiB, also from a thread.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from manager.errors import ConfigError, TokenizeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

EMBEDDED_TOKENIZER = Path(__file__).parent / "engines" / "data" / "tokenizer.json"

#: Contents that common families give their end-of-text token, for a tokenizer.json that comes alone.
_EOS_CONTENTS = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 - DeepSeek's own spelling
    "<eos>",
    "</s>",
    "<EOT>",
)


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer and the facts of it that a deployment needs."""

    path: Path
    tokenizer: Tokenizer
    vocab_size: int
    """Largest id plus one."""
    eos_token_ids: tuple[int, ...]

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Encode each text to (n,) int32 ids, special tokens added. The GIL is free meanwhile."""
        try:
            encodings = self.tokenizer.encode_batch_fast(list(texts))
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizeError(f"tokenizer failed: why={error}") from error
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]


def find_tokenizer_file(path: Path) -> Path:
    """Return the `tokenizer.json` that `path` means: itself, or the one in that folder."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"tokenizer file does not exist: tokenizer={file}", setting="tokenizer")
    return file


def load_tokenizer(path: Path | None) -> LoadedTokenizer:
    """Load a `tokenizer.json`; None: the embedded one. Raises ConfigError that names the file."""
    file = EMBEDDED_TOKENIZER if path is None else find_tokenizer_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(
            f"tokenizer file cannot be read: tokenizer={file}, why={error}", setting="tokenizer"
        ) from error
    # some files come with padding and truncation switched on, for another use than ours
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ConfigError(f"tokenizer has no tokens: tokenizer={file}", setting="tokenizer")
    return LoadedTokenizer(
        path=file,
        tokenizer=tokenizer,
        vocab_size=max(vocabulary.values()) + 1,
        eos_token_ids=_eos_token_ids(file, tokenizer),
    )


def _eos_token_ids(file: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the files beside the tokenizer say, or else what its token is called."""
    generation = _read_json(file.parent / "generation_config.json").get("eos_token_id")
    listed = generation if isinstance(generation, list) else [generation]
    if listed and all(type(item) is int for item in listed):
        return tuple(listed)
    eos = _read_json(file.parent / "tokenizer_config.json").get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    candidates = (content,) if isinstance(content, str) else _EOS_CONTENTS
    for candidate in candidates:
        token_id = tokenizer.token_to_id(candidate)
        if token_id is not None:
            return (token_id,)
    return ()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
