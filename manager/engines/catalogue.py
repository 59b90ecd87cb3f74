"""The engines by name, as a command line or a configuration names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manager.engines.echo import EchoEngine
from manager.errors import ConfigError

if TYPE_CHECKING:
    import random

    from manager.engines.engine import Engine
    from manager.engines.port import ModelFacts

ENGINE_NAMES = ("echo", "ngram")
# Does the output go on where the prompt ended? An echo's starts a text of its own: decoded as going
# on, its first word would keep the space that some tokenizers put before a word.
CONTINUES_PROMPT = {"echo": False, "ngram": True}


def make_engine(name: str, facts: ModelFacts, *, randomness: random.Random, chunk: int = 1) -> Engine:
    """Make an engine that fits a deployment; a scheduler port and a manifest both have the facts.

    `chunk` is for the echo: tokens of each request a step. `randomness` gives seeds to requests
    that bring none. Raises `ConfigError` for an unknown name and for a deployment that the engine
    cannot serve.
    """
    if name == "echo":
        return EchoEngine(context_length=facts.context_length, chunk=chunk)
    if name == "ngram":
        # Here, so that an echo starts without a tokenizer library.
        from manager.engines.ngram_engine import NGramEngine  # noqa: PLC0415

        return NGramEngine(
            vocab_size=facts.vocab_size,
            context_length=facts.context_length,
            eos_token_ids=facts.eos_token_ids,
            randomness=randomness,
        )
    raise ConfigError(f"no such engine: name={name}, known={', '.join(ENGINE_NAMES)}", setting="engine")
