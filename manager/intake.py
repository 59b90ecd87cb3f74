"""The way of a request from its caller to what can be sent: checked, tokenized, checked again.

The event loop runs it, except for the encoding of text, which happens in threads that hold no GIL.
Nothing is registered or sent here, and a request whose caller has left meanwhile goes no further.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from manager.deployment import Facts
from manager.detokenize import PROMPT_TAIL_MAX, choose
from manager.errors import ConfigError, ManagerError, UnavailableError, ValidationError
from manager.lifecycle import Event
from manager.limits import Limits, check_detokenize_ids, check_logprob_start
from manager.outbox import Dispatch
from manager.request import to_token_ids
from manager.sampling import NormalizedSampling
from manager.sampling.kinds import check_text
from manager.tokenizer import LoadedTokenizer, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from manager.config import Settings
    from manager.stream import RequestStream

log = logging.getLogger(__name__)


class Intake:
    """The checks and the tokenizer of one deployment. `load` comes first."""

    limits: Limits

    def __init__(self, settings: Settings, end: Callable[[RequestStream, ManagerError], None]) -> None:
        """`end` is called with each request that goes no further, and why."""
        self._settings = settings
        self._end = end
        self._tokenizer: LoadedTokenizer | None = None
        self._is_stopped = False

    async def load(self) -> Facts:
        """Load the tokenizer, and find out what a deployment must know of it. Raises ConfigError."""
        settings, loop = self._settings, asyncio.get_running_loop()
        if settings.has_tokenizer:
            self._tokenizer = await loop.run_in_executor(None, load_tokenizer, settings.tokenizer)
        facts = _facts(settings, self._tokenizer)
        if self._tokenizer is not None:
            # once for all workers; proved against the library before anybody relies on it
            choice = await loop.run_in_executor(None, choose, self._tokenizer.tokenizer)
            log.info("decoding by %s: %s", choice.kind.value, choice.reason)
            facts = dataclasses.replace(facts, decoding=choice)
        self.limits = Limits(
            vocab_size=facts.vocab_size,
            context_length=settings.context_length,
            reserved_tokens=settings.reserved_tokens,
            allow_auto_truncate=settings.allow_auto_truncate,
            has_tokenizer=self._tokenizer is not None,
            hidden_states_enabled=settings.hidden_states_enabled,
            attachments_length_max=settings.attachments_bytes_max,
            text_length_max=settings.text_length_max or 64 * settings.context_length,
        )
        self._pool = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
        return facts

    def stop(self) -> None:
        """Encode nothing more; what has begun comes to its end."""
        self._is_stopped = True
        self._pool.shutdown(wait=False)

    def check_has_tokenizer(self, field: str) -> None:
        """Refuse what cannot be without a tokenizer."""
        if not self.limits.has_tokenizer:
            raise ValidationError(f"{field} needs a tokenizer, and this server has none", field=field)

    def checked_text(self, value: object) -> str:
        """Return a text that can be encoded by itself; empty is one. Raises ValidationError."""
        self.check_has_tokenizer("text")
        text = check_text("text", value)
        self.limits.check_text_length(text)
        return text

    def checked_ids(self, value: object) -> NDArray[np.int32]:
        """Return ids that can be decoded by themselves, (n,) n >= 0; no vocabulary is asked."""
        self.check_has_tokenizer("token_ids")
        if isinstance(value, (list, tuple, np.ndarray)) and len(value) == 0:
            return np.empty(0, np.int32)
        ids = to_token_ids("token_ids", value)
        check_detokenize_ids(ids)
        return ids

    def check(self, streams: list[RequestStream]) -> None:
        """Check each request by itself: a bad one ends, its neighbours go on."""
        for stream in streams:
            try:
                self._check(stream)
            except ManagerError as error:
                self._end(stream, error)

    def _check(self, stream: RequestStream) -> None:
        single = stream.request
        self.limits.validate(single)
        stream.move(Event.VALIDATED)
        stream.move(Event.NEEDS_NORMALIZE)
        stream.sampling = NormalizedSampling.of(
            single.sampling, vocab_size=self.limits.vocab_size, has_tokenizer=self.limits.has_tokenizer
        )

    async def tokenize(self, streams: list[RequestStream]) -> None:
        """Give every request that goes on its dispatch; text is encoded in one go in a thread."""
        going_on = [stream for stream in streams if not stream.is_ended]
        with_text = [stream for stream in going_on if stream.request.text is not None]
        encoded: list[NDArray[np.int32]] = []
        if with_text:
            for stream in with_text:
                stream.move(Event.NEEDS_TOKENIZE)
            try:
                encoded = await self.encode([stream.request.text or "" for stream in with_text])
            except ManagerError as error:
                for stream in with_text:
                    self._end(stream, error)
                return
        ids_of = dict(zip((stream.request_id for stream in with_text), encoded, strict=True))
        for stream in going_on:
            if stream.is_ended:
                continue  # aborted meanwhile: it never reached the scheduler, so nobody is told
            stream.move(Event.TOKENIZED if stream.request_id in ids_of else Event.ALREADY_TOKENIZED)
            try:
                self._prepare(stream, ids_of.get(stream.request_id, stream.request.input_ids))
            except ManagerError as error:
                self._end(stream, error)

    async def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Encode texts in a thread. Raises TokenizeError, or UnavailableError once it is stopped."""
        if self._is_stopped:
            raise _stopped()
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._encode, texts)

    def _encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Runs in a thread. What waited for one until the manager was closed is not worth the time."""
        if self._is_stopped:
            raise _stopped()
        assert self._tokenizer is not None, "text was refused where there is no tokenizer"
        return self._tokenizer.encode(texts)

    def _prepare(self, stream: RequestStream, prompt_ids: NDArray[np.int32] | None) -> None:
        """Make the checks that every request passes last, whatever way it came."""
        assert prompt_ids is not None, "a request has text or ids"
        assert stream.sampling is not None, "it was checked"
        if len(prompt_ids) == 0:
            raise ValidationError("prompt has no tokens", field="text")
        self.limits.check_input_ids(prompt_ids)
        prompt_ids, sampling = self.limits.check_total_tokens(prompt_ids, stream.sampling)
        single, tail = stream.request, prompt_ids[-PROMPT_TAIL_MAX:]
        check_logprob_start(single.extras_asked.logprob_start_len, len(prompt_ids))
        stream.prompt_count = len(prompt_ids)
        stream.dispatch = Dispatch(
            stream.request_id,
            single.rid,
            prompt_ids,
            tail,
            sampling,
            single.extras_asked,
            single.attachments,
        )


def _stopped() -> UnavailableError:
    return UnavailableError("the manager is not running: state=closed")


def _facts(settings: Settings, tokenizer: LoadedTokenizer | None) -> Facts:
    vocab_size = settings.vocab_size
    if tokenizer is None:
        assert vocab_size is not None, "checked by the settings"
        return Facts(vocab_size, settings.eos_token_ids or (), None)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            "vocab_size is smaller than the tokenizer's: "
            f"value={vocab_size}, tokenizer={tokenizer.vocab_size}",
            setting="vocab_size",
        )
    eos = settings.eos_token_ids if settings.eos_token_ids is not None else tokenizer.eos_token_ids
    return Facts(vocab_size or tokenizer.vocab_size, eos, tokenizer.path)
