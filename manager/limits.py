"""What one deployment can take: vocabulary, context, and the features it was started with.

Pure arithmetic on a single request. `validate` runs when a request comes in, before anything
is registered for it; `check_input_ids` again on what a tokenizer made of it, because
an id beyond the vocabulary ends the scheduler and everyone's requests with it; and
`check_total_tokens` and `check_logprob_start` last, on every way to the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from manager.errors import ConfigError, ValidationError
from manager.ids import check_rid
from manager.sampling.kinds import INT32_MAX

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from manager.request import SingleRequest
    from manager.sampling import NormalizedSampling


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of a deployment. All counts are tokens."""

    vocab_size: int
    context_length: int
    """Prompt, reserved slots and output together."""
    reserved_tokens: int = 0
    """Slots of every request that the engine keeps for itself, for speculative decoding."""
    allow_auto_truncate: bool = False
    """Whether a request that is too long is cut, or refused."""
    has_tokenizer: bool = True
    text_length_max: int | None = None
    """Characters of a text that is worth tokenizing; None: any number."""
    attachments_length_max: int | None = None
    """Bytes of a request's attachments, packed; None: any number."""
    hidden_states_enabled: bool = False
    """Whether the engine can give hidden states."""

    def __post_init__(self) -> None:
        for setting, low in (("vocab_size", 1), ("context_length", 1), ("reserved_tokens", 0)):
            value = getattr(self, setting)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{setting} cannot work: value={value!r}, min={low}", setting=setting)

    def validate(self, request: SingleRequest) -> None:
        """Refuse what this deployment can never serve. Raises ValidationError with the field."""
        check_rid(request.rid)
        if request.text is not None:
            self.check_text_length(request.text)
        if request.input_ids is not None:
            self.check_input_ids(request.input_ids)
        elif not self.has_tokenizer:
            raise ValidationError("input_ids must be set: this server has no tokenizer", field="input_ids")
        if request.extras_asked.logprob_texts and not self.has_tokenizer:
            raise ValidationError(
                "return_text_in_logprobs needs a tokenizer, and this server has none",
                field="return_text_in_logprobs",
            )
        if request.token_ids_logprob is not None:
            self._check_vocabulary("token_ids_logprob", np.asarray(request.token_ids_logprob, dtype=np.int64))
        if request.top_logprobs_num > self.vocab_size:
            raise ValidationError(
                "top_logprobs_num is above the size of the vocabulary: "
                f"value={request.top_logprobs_num}, max={self.vocab_size}",
                field="top_logprobs_num",
            )
        length_max = self.attachments_length_max
        if length_max is not None and len(request.attachments) > length_max:
            raise ValidationError(
                f"attachments are too long: length={len(request.attachments)}, max={length_max}",
                field="attachments",
            )
        if request.return_hidden_states and not self.hidden_states_enabled:
            raise ValidationError(
                "return_hidden_states needs a deployment with the setting hidden_states_enabled",
                field="return_hidden_states",
            )

    def check_text_length(self, text: str) -> None:
        """Refuse a text that is not worth tokenizing."""
        if self.text_length_max is not None and len(text) > self.text_length_max:
            raise ValidationError(
                f"text is too long for the context: characters={len(text)}, max={self.text_length_max}, "
                f"context_length={self.context_length}",
                field="text",
            )

    def check_input_ids(self, input_ids: NDArray[np.int32]) -> None:
        """(n,) int32: every id in the vocabulary, both ends checked."""
        self._check_vocabulary("input_ids", input_ids)

    def _check_vocabulary(self, field: str, ids: NDArray[np.integer]) -> None:
        if ids.size == 0:
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise ValidationError(
                f"{field} is out of range of the vocabulary: value={low if low < 0 else high}, "
                f"allowed=0..{self.vocab_size - 1}",
                field=field,
            )

    def check_total_tokens(
        self, input_ids: NDArray[np.int32], sampling: NormalizedSampling
    ) -> tuple[NDArray[np.int32], NormalizedSampling]:
        """Prompt and output against the context: both unchanged, or cut if that is allowed.

        A prompt must leave room for one token (`>=`); prompt and output may fill the context
        exactly (`>`). The prompt is checked also where the output has no limit. Reserved slots
        count as prompt, except for a prompt that was cut: then, as in SGLang, the count is
        that of the ids alone, or a request that was let in would be left no room at all.
        """
        input_count = len(input_ids) + self.reserved_tokens
        if input_count >= self.context_length:
            if not self.allow_auto_truncate:
                raise ValidationError(
                    "input_ids, or the text they were made of, are longer than the context: "
                    f"input tokens={input_count}, context_length={self.context_length}",
                    field="input_ids",
                )
            input_ids = input_ids[: self.context_length]
            input_count = len(input_ids)
        max_new_tokens = sampling.params.max_new_tokens
        if max_new_tokens is None:
            return input_ids, sampling
        total = input_count + max_new_tokens
        if total <= self.context_length:
            return input_ids, sampling
        if not self.allow_auto_truncate:
            raise ValidationError(
                "max_new_tokens is more than the context leaves room for: "
                f"context_length={self.context_length}, total tokens={total}, "
                f"input tokens={input_count}, completion tokens={max_new_tokens}",
                field="max_new_tokens",
            )
        room = self.context_length - input_count
        if sampling.params.min_new_tokens > room:
            raise ValidationError(
                "min_new_tokens is above what the context leaves room for: "
                f"value={sampling.params.min_new_tokens}, room={room}",
                field="min_new_tokens",
            )
        return input_ids, sampling.with_max_new_tokens(room)


def check_logprob_start(start: int, prompt_count: int) -> None:
    """Log probabilities of the prompt begin at one of its tokens, or nowhere (-1); cut tokens are none."""
    if start >= prompt_count:
        raise ValidationError(
            "logprob_start_len is not below the number of prompt tokens: "
            f"value={start}, prompt tokens={prompt_count}",
            field="logprob_start_len",
        )


def check_detokenize_ids(ids: NDArray[np.integer]) -> None:
    """(n,) of any integer dtype: ids that only a decoder will see need no vocabulary, but fit int32."""
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > INT32_MAX):
        raise ValidationError(
            f"token_ids is out of range: min={int(ids.min())}, max={int(ids.max())}, allowed=0..{INT32_MAX}",
            field="token_ids",
        )
