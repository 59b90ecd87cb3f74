"""A request as a caller writes it, and the single requests that it stands for.

A caller may hand over one prompt or many, and ask for several samples of each. `fan_out` turns
that into single requests and decides, before it builds the first of them, whether the whole may
be served: a small request can stand for gigabytes.

The shape of the prompt decides: a string or a flat list of ids is one prompt, a list of
strings or of lists is a batch, also with one element. Every other field is one value for all
prompts, or a list with one value for each.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np

from manager.attachments import pack_attachments
from manager.errors import ValidationError
from manager.extras import ExtrasAsked
from manager.ids import check_rid, mint_rid
from manager.sampling.kinds import INT32_MAX, Integer, check_text, shown, wrong_type
from manager.sampling.params import SamplingParams, merge_preferred

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Single requests that one request may stand for, prompts times samples. SGLang's default.
BATCH_COUNT_MAX: Final = 4096

# Bytes that may come into being by giving every single request its copy of a shared value. SGLang's number.
BROADCAST_BYTES_MAX: Final = 64 * 1024 * 1024

# Parsed JSON is larger than its text by about this factor; SGLang's estimate.
PARSED_JSON_FACTOR: Final = 8

_INT32_MIN: Final = -(2**31)
_INT64_SPAN: Final = 2**64
_INT64_HALF: Final = 2**63

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What a Python caller hands over. Exactly one of `text` and `input_ids` is set.

    Nothing is checked here: `fan_out` does, and names the field.
    """

    text: str | Sequence[str] | None = None
    input_ids: Sequence[int] | Sequence[Sequence[int]] | NDArray[Any] | Sequence[NDArray[Any]] | None = None
    rid: str | Sequence[str] | None = None
    sampling_params: (
        SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | Mapping[str, Any]] | None
    ) = None
    stream: bool = False
    accumulated: bool | None = None
    """Whether each piece holds all of the output so far, and not what is new; None: as the deployment's
    setting `accumulated_output` says."""
    return_logprob: bool | Sequence[bool] | None = None
    logprob_start_len: int | Sequence[int] | None = None
    """First prompt position with logprobs, below the number of its tokens; -1: none of the prompt."""
    top_logprobs_num: int | Sequence[int] | None = None
    token_ids_logprob: Sequence[int] | Sequence[Sequence[int] | None] | None = None
    return_text_in_logprobs: bool | Sequence[bool] | None = None
    return_hidden_states: bool | Sequence[bool] | None = None
    attachments: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None
    """What the engine alone understands, passed on as it is: one mapping for all prompts, or one each."""

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list, also if the list has one element."""
        if self.text is not None:
            return not isinstance(self.text, str)
        return _is_nested(self.input_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class SingleRequest:
    """One prompt, one stream of output."""

    index: int
    """The prompt's place in the request."""
    sample: int
    """Which sample of the prompt."""
    rid: str
    """Unique within the request: the client's, with `_index` in a batch and `_sample` if n > 1."""
    client_rid: str
    """What the client calls it: whoever aborts this aborts every single request that carries it."""
    text: str | None
    input_ids: NDArray[np.int32] | None
    """(n,) int32, n >= 1, contiguous. None where `text` is set."""
    sampling: SamplingParams
    """Parameters with n = 1."""
    stream: bool
    accumulated: bool
    """Each piece holds all of the output so far."""
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: tuple[int, ...] | None
    return_text_in_logprobs: bool
    return_hidden_states: bool
    attachments: bytes
    """Packed; b"" for none."""

    @property
    def extras_asked(self) -> ExtrasAsked:
        """What it wants beside tokens."""
        if not self.return_logprob:
            return ExtrasAsked(return_hidden_states=self.return_hidden_states)
        return ExtrasAsked(
            return_logprob=True,
            return_hidden_states=self.return_hidden_states,
            logprob_start_len=self.logprob_start_len,
            top_logprobs_num=self.top_logprobs_num,
            token_ids_logprob=self.token_ids_logprob or (),
            logprob_texts=self.return_text_in_logprobs,
        )


def fan_out(
    request: GenerateRequest,
    *,
    preferred: Mapping[str, object] | None = None,
    accumulated: bool = False,
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> list[SingleRequest]:
    """The single requests, prompt by prompt, samples of a prompt in a row.

    `preferred` are the operator's sampling parameters; a SamplingParams given by the caller is
    complete and takes none of them. `accumulated` is for a request that does not say. Raises
    ValidationError naming the field.
    """
    is_batch, prompts = _prompts(request)
    count = len(prompts)
    check_flag("stream", request.stream)
    if request.accumulated is not None:
        accumulated = check_flag("accumulated", request.accumulated)
    sampling = _sampling(request.sampling_params, count, preferred)
    total = sum(params.n for params in sampling)
    if total > BATCH_COUNT_MAX:
        raise ValidationError(
            f"request stands for too many: prompts={count}, samples={total}, max={BATCH_COUNT_MAX}", field="n"
        )
    token_ids_logprob = _token_ids_logprob(request.token_ids_logprob, count, is_batch=is_batch)
    attachments = _each("attachments", request.attachments, count, pack_attachments, b"")
    if total > 1:
        _check_broadcast(prompts, sampling, token_ids_logprob, attachments)

    rids, client_rids = _rids(request.rid, count, is_batch=is_batch, random_bytes=random_bytes)
    return_logprob = _flags("return_logprob", request.return_logprob, count)
    logprob_start_len = _integers("logprob_start_len", request.logprob_start_len, count, low=-1, default=-1)
    top_logprobs_num = _integers("top_logprobs_num", request.top_logprobs_num, count, low=0, default=0)
    return_text = _flags("return_text_in_logprobs", request.return_text_in_logprobs, count)
    return_hidden_states = _flags("return_hidden_states", request.return_hidden_states, count)

    singles = [
        SingleRequest(
            index=index,
            sample=sample,
            rid=rids[index] if params.n == 1 else check_rid(f"{rids[index]}_{sample}"),
            client_rid=client_rids[index],
            text=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else prompt,
            sampling=sample_params,
            stream=request.stream,
            accumulated=accumulated and request.stream,  # without a stream there is but one piece
            return_logprob=return_logprob[index],
            logprob_start_len=logprob_start_len[index],
            top_logprobs_num=top_logprobs_num[index],
            token_ids_logprob=token_ids_logprob[index],
            return_text_in_logprobs=return_text[index],
            return_hidden_states=return_hidden_states[index],
            attachments=attachments[index],
        )
        for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
        for sample, sample_params in enumerate(_samples(params))
    ]
    # Only now, because the suffixes may run into a rid that the client chose for another prompt.
    seen: set[str] = set()
    for single in singles:
        if single.rid in seen:
            raise ValidationError(f"rid is used twice in one request: rid={shown(single.rid)}", field="rid")
        seen.add(single.rid)
    return singles


def to_token_ids(field: str, value: object) -> NDArray[np.int32]:
    """A flat list of ids as (n,) int32, contiguous. An int32 array is taken as it is, not copied.

    Raises ValidationError if it is empty, not flat, or holds anything but ints that fit int32.
    """
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise ValidationError(
                f"{field} must be a flat array of integers: shape={value.shape}, dtype={value.dtype}",
                field=field,
            )
        numbers: NDArray[Any] = value
    else:
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray, memoryview)):
            raise wrong_type(field, value, "list of integers")
        # One pass in C over the types: a loop with isinstance costs as much as tokenizing did.
        for kind in set(map(type, value)):
            if issubclass(kind, bool) or not issubclass(kind, (int, np.integer)):
                raise ValidationError(
                    f"{field} holds something that is no integer: type={kind.__name__}", field=field
                )
        try:
            numbers = np.array(value, dtype=np.int64)
        except OverflowError:
            raise ValidationError(f"{field} holds an id beyond 64 bits: allowed=int32", field=field) from None
    if numbers.size == 0:
        raise ValidationError(f"{field} cannot be empty", field=field)
    if numbers.dtype != np.int32:
        low, high = int(numbers.min()), int(numbers.max())
        if low < _INT32_MIN or high > INT32_MAX:
            raise ValidationError(
                f"{field} holds an id that does not fit int32: value={low if low < _INT32_MIN else high}",
                field=field,
            )
        numbers = numbers.astype(np.int32)
    return np.ascontiguousarray(numbers)


def _is_nested(value: object) -> bool:
    """Whether it is a list of lists, judged by its first element; the rest is checked later."""
    if isinstance(value, np.ndarray):
        return value.ndim > 1
    return (
        isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], (list, tuple, np.ndarray))
    )


def _prompts(request: GenerateRequest) -> tuple[bool, list[str | NDArray[np.int32]]]:
    """Whether it is a batch, and its prompts. The count is checked before anything is converted."""
    if (request.text is None) == (request.input_ids is None):
        raise ValidationError(
            "exactly one of text and input_ids must be set: "
            f"set={'neither' if request.text is None else 'both'}",
            field="text",
        )
    if request.text is not None:
        if isinstance(request.text, str):
            return False, [_text(request.text)]
        if not isinstance(request.text, (list, tuple)):
            raise wrong_type("text", request.text, "string or list of strings")
        _check_count("text", len(request.text))
        return True, [_text(text) for text in request.text]
    if not _is_nested(request.input_ids):
        return False, [to_token_ids("input_ids", request.input_ids)]
    assert isinstance(request.input_ids, (list, tuple, np.ndarray))
    _check_count("input_ids", len(request.input_ids))
    return True, [to_token_ids("input_ids", ids) for ids in request.input_ids]


def _text(value: object) -> str:
    text = check_text("text", value)
    if not text:
        raise ValidationError("text cannot be empty", field="text")
    return text


def _check_count(field: str, count: int) -> None:
    if count == 0:
        raise ValidationError(f"{field} needs at least one item", field=field)
    if count > BATCH_COUNT_MAX:
        raise ValidationError(
            f"{field} has too many items: count={count}, max={BATCH_COUNT_MAX}", field=field
        )


def _sampling(value: object, count: int, preferred: Mapping[str, object] | None) -> list[SamplingParams]:
    """One SamplingParams a prompt; a shared one is checked once and shared."""

    def build(item: object) -> SamplingParams:
        if isinstance(item, SamplingParams):
            return item
        if item is not None and not isinstance(item, Mapping):
            raise wrong_type("sampling_params", item, "object")
        return SamplingParams.from_mapping(merge_preferred(preferred or {}, item))

    if isinstance(value, (list, tuple)):
        _check_length("sampling_params", len(value), count)
        return [build(item) for item in value]
    return [build(value)] * count


def _samples(params: SamplingParams) -> list[SamplingParams]:
    """One SamplingParams a sample, each with n = 1.

    A seed is counted up, or all samples would be the same text. Without a seed each is random.
    """
    if params.n == 1:
        return [params]
    if params.sampling_seed is None:
        return [replace(params, n=1)] * params.n
    return [
        replace(params, n=1, sampling_seed=_wrap_int64(params.sampling_seed + sample))
        for sample in range(params.n)
    ]


def _wrap_int64(value: int) -> int:
    return (value + _INT64_HALF) % _INT64_SPAN - _INT64_HALF


def _check_broadcast(
    prompts: Sequence[str | NDArray[np.int32]],
    sampling: Sequence[SamplingParams],
    token_ids_logprob: Sequence[tuple[int, ...] | None],
    attachments: Sequence[bytes],
) -> None:
    """Charge every value that more than one single request gets a copy of.

    What only one of them carries was sent as such, and is not charged however large it is.
    """
    samples = [params.n for params in sampling]
    charges = {
        "text" if isinstance(prompts[0], str) else "input_ids": sum(
            _copied_length(prompt) * count
            for prompt, count in zip(prompts, samples, strict=True)
            if count > 1
        ),
        "sampling_params": _shared_length(sampling, samples),
        "token_ids_logprob": _shared_length(token_ids_logprob, samples),
        "attachments": _shared_length(attachments, samples),
    }
    copied = sum(charges.values())
    if copied > BROADCAST_BYTES_MAX:
        field = max(charges, key=lambda name: charges[name])
        raise ValidationError(
            f"{field} grows too large when every prompt and sample gets its copy: "
            f"bytes={copied}, max={BROADCAST_BYTES_MAX}",
            field=field,
        )


def _shared_length(
    values: Sequence[SamplingParams | tuple[int, ...] | bytes | None], samples: Sequence[int]
) -> int:
    """Bytes of all copies of those values that are copied. A shared value is one object."""
    copies = Counter[int]()
    for value, count in zip(values, samples, strict=True):
        copies[id(value)] += count
    # The sequence keeps its objects alive, so an id names one of them only.
    distinct = {id(value): value for value in values if value is not None}
    return sum(_copied_length(value) * copies[key] for key, value in distinct.items() if copies[key] > 1)


def _copied_length(shared: str | bytes | NDArray[np.int32] | SamplingParams | tuple[int, ...]) -> int:
    if isinstance(shared, (str, bytes)):
        return len(shared)
    if isinstance(shared, np.ndarray):
        return int(shared.nbytes)
    if isinstance(shared, SamplingParams):
        return len(msgspec.json.encode(shared)) * PARSED_JSON_FACTOR
    return len(shared) * np.dtype(np.int32).itemsize


def _rids(
    value: object, count: int, *, is_batch: bool, random_bytes: Callable[[int], bytes]
) -> tuple[list[str], list[str]]:
    """The rid of each prompt, and what the client calls it."""
    if value is None:
        minted = [mint_rid(random_bytes) for _ in range(count)]
        return minted, minted
    if isinstance(value, (list, tuple)):
        if not is_batch:
            raise ValidationError("rid can be a list only where the prompt is one", field="rid")
        _check_length("rid", len(value), count)
        listed = [check_rid(rid) for rid in value]
        return listed, listed
    rid = check_rid(value)
    if not is_batch:
        return [rid], [rid]
    return [check_rid(f"{rid}_{index}") for index in range(count)], [rid] * count


def _check_length(field: str, length: int, count: int) -> None:
    if length != count:
        raise ValidationError(f"{field} has a wrong length: count={length}, prompts={count}", field=field)


def _each(field: str, value: object, count: int, check: Callable[[object], T], default: T) -> list[T]:
    """One checked value a prompt: the default, one for all, or a list."""
    if value is None:
        return [default] * count
    if isinstance(value, (list, tuple)):
        _check_length(field, len(value), count)
        return [default if item is None else check(item) for item in value]
    return [check(value)] * count


def check_flag(field: str, value: object) -> bool:
    """Return a bool as it is; anything else is refused, however true it may be."""
    if not isinstance(value, bool):
        raise wrong_type(field, value, "boolean")
    return value


def _flags(field: str, value: object, count: int) -> list[bool]:
    return _each(field, value, count, lambda item: check_flag(field, item), default=False)


def _integers(field: str, value: object, count: int, *, low: int, default: int) -> list[int]:
    kind = Integer(low, INT32_MAX)
    return _each(field, value, count, lambda item: kind.check(field, item), default)


def _token_ids_logprob(value: object, count: int, *, is_batch: bool) -> list[tuple[int, ...] | None]:
    """Flat: for all prompts. Nested: one list a prompt, for a batch only. Empty is as good as none."""
    field = "token_ids_logprob"
    if value is None:
        return [None] * count
    if not isinstance(value, (list, tuple)):
        raise wrong_type(field, value, "list of integers")

    def check(ids: object) -> tuple[int, ...] | None:
        if ids is None or (isinstance(ids, (list, tuple)) and not ids):
            return None
        return tuple(to_token_ids(field, ids).tolist())

    if is_batch and any(item is None or isinstance(item, (list, tuple)) for item in value):
        _check_length(field, len(value), count)
        return [check(item) for item in value]
    return [check(value)] * count
