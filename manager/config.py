"""Every setting of a deployment, checked before anything is started.

One frozen object, declared once: a bound stands beside its default, and an error names the
setting and the bound.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from manager.errors import ConfigError, ValidationError
from manager.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Bytes of shmring's own bound, less the longest suffix of a ring's name (".register.63").
DEPLOYMENT_NAME_LENGTH_MAX: Final = 187
WORKERS_MAX: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")
_CAPACITY_MIN: Final = 1 << 12
_CAPACITY_MAX: Final = 1 << 34

#: name -> (smallest, largest) of the numbers below
BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "workers": (1, WORKERS_MAX),
    "context_length": (2, 1 << 24),
    "vocab_size": (1, 1 << 31),
    "reserved_tokens": (0, 1 << 20),
    "text_length_max": (1, 1 << 31),
    "attachments_length_max": (0, 1 << 30),
    "requests_max": (1, 1 << 20),
    "tokenizer_threads": (1, 64),
    "ingress_capacity_bytes": (_CAPACITY_MIN, _CAPACITY_MAX),
    "egress_capacity_bytes": (_CAPACITY_MIN, _CAPACITY_MAX),
    "register_capacity_bytes": (_CAPACITY_MIN, _CAPACITY_MAX),
    "reply_capacity_bytes": (_CAPACITY_MIN, _CAPACITY_MAX),
    "check_interval_s": (0.01, 2.0),
    "stalled_after_s": (0.5, 3600.0),
    "stop_timeout_s": (0.1, 600.0),
    "restarts_max": (0, 1000),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a deployment is started with. Sizes in bytes, times in seconds, lengths in tokens."""

    name: str
    """The name that schedulers and workers attach by."""
    tokenizer: Path | None = None
    """A `tokenizer.json`, or a folder with one. None: the small one that ships with the package."""
    has_tokenizer: bool = True
    """False: token ids in and token ids out, no text; `vocab_size` must then be given."""
    vocab_size: int | None = None
    """None: as many ids as the tokenizer has."""
    eos_token_ids: tuple[int, ...] | None = None
    """Ids that end a text. None: what the tokenizer's own files say."""
    workers: int = 1
    """Detok workers; each is a process, and each request belongs to one of them."""
    context_length: int = 8192
    """Prompt and output together."""
    text_length_max: int | None = None
    """Characters of a prompt's text, looked at before it is tokenized. None: 64 for each token of the
    context; text has about 4, and encoding what can never fit would keep others waiting."""
    attachments_length_max: int | None = None
    """Bytes of what one request carries for the engine alone. None: a quarter of the ingress ring."""
    reserved_tokens: int = 0
    """Slots of every request that the engine keeps for itself; they count as prompt."""
    allow_auto_truncate: bool = False
    """Cut what is too long for the context instead of refusing it."""
    requests_max: int = 16384
    """Requests in flight; one more is refused (503)."""
    hidden_states_enabled: bool = False
    """Whether requests may ask for hidden states; the scheduler must be able to give them."""
    accumulated_output: bool = False
    """Whether each piece of a stream holds all of its output so far, where the request does not say."""
    tokenizer_threads: int = 2
    """Threads that encode prompts; they hold no GIL meanwhile."""
    ingress_capacity_bytes: int = 1 << 23
    """Room for about this many bytes of waiting prompts, 4 bytes a token and 400 a request."""
    egress_capacity_bytes: int = 1 << 22
    """Of each worker's: what the scheduler may be ahead of it."""
    register_capacity_bytes: int = 1 << 20
    """Of each worker's: registrations that it has not seen yet, about 200 bytes a request."""
    reply_capacity_bytes: int = 1 << 22
    """Of each worker's: what it may be ahead of the manager."""
    check_interval_s: float = 0.25
    """How often each part's life is looked at."""
    stalled_after_s: float = 4.0
    """A part that lives and has shown no pulse for so long is unhealthy; its requests go on."""
    stop_timeout_s: float = 5.0
    """How long parts may take to end by themselves before they are ended."""
    restarts_max: int = 5
    """How often a part that we started and that died is started again, in one minute."""
    preferred_sampling: Mapping[str, Any] | None = None
    """Sampling parameters of a request that does not name them; what a request names wins."""
    cores: tuple[int, ...] | None = None
    """Cores for the parts that we start, one each: the scheduler's first, then the workers'. With fewer
    cores than parts nothing is pinned, and a warning says so. None: nothing is pinned."""

    def __post_init__(self) -> None:
        for setting, (low, high) in BOUNDS.items():
            value = getattr(self, setting)
            if value is None and setting in ("vocab_size", "text_length_max", "attachments_length_max"):
                continue
            _check_number(setting, value, low, high, is_float=isinstance(low, float))
        for setting in ("ingress_capacity_bytes", "egress_capacity_bytes", "register_capacity_bytes"):
            _check_power_of_two(setting, getattr(self, setting))
        _check_power_of_two("reply_capacity_bytes", self.reply_capacity_bytes)
        check_deployment_name(self.name)
        self._check_types()
        self._check_preferred_sampling()
        self._check_cores()
        if not self.has_tokenizer and self.vocab_size is None:
            raise ConfigError("vocab_size is needed where there is no tokenizer", setting="vocab_size")
        needed = 4 * self.context_length + 4096 + (self.attachments_length_max or 0)
        if self.ingress_capacity_bytes < needed:
            raise ConfigError(
                "ingress ring cannot hold one prompt of the full context and its attachments: "
                f"ingress_capacity_bytes={self.ingress_capacity_bytes}, min={needed}",
                setting="ingress_capacity_bytes",
            )

    def _check_types(self) -> None:
        if self.tokenizer is not None and not isinstance(self.tokenizer, Path):
            raise ConfigError(
                f"tokenizer must be a pathlib.Path: value={self.tokenizer!r}", setting="tokenizer"
            )
        for setting in (
            "has_tokenizer",
            "allow_auto_truncate",
            "hidden_states_enabled",
            "accumulated_output",
        ):
            if not isinstance(getattr(self, setting), bool):
                raise ConfigError(
                    f"{setting} must be true or false: value={getattr(self, setting)!r}", setting=setting
                )
        if any(token_id < 0 for token_id in _int_tuple("eos_token_ids", self.eos_token_ids or ())):
            raise ConfigError(
                f"eos_token_ids is out of range: value={self.eos_token_ids}, min=0", setting="eos_token_ids"
            )

    def _check_preferred_sampling(self) -> None:
        if self.preferred_sampling is None:
            return
        try:
            SamplingParams.from_mapping(self.preferred_sampling)
        except ValidationError as error:
            raise ConfigError(
                f"preferred_sampling cannot work: {error}", setting="preferred_sampling"
            ) from error

    def _check_cores(self) -> None:
        if self.cores is None:
            return
        allowed = os.sched_getaffinity(0)
        wrong = [core for core in self.cores if isinstance(core, bool) or core not in allowed]
        if wrong or len(set(self.cores)) != len(self.cores) or not self.cores:
            raise ConfigError(
                f"cores must be different cores of this process: value={list(self.cores)}, "
                f"allowed={sorted(allowed)}",
                setting="cores",
            )

    @property
    def attachments_bytes_max(self) -> int:
        """Bytes of one request's attachments, whether they were set or not."""
        if self.attachments_length_max is None:
            return self.ingress_capacity_bytes // 4
        return self.attachments_length_max

    @property
    def capacity_bytes(self) -> int:
        """All rings together, without their headers."""
        per_worker = self.egress_capacity_bytes + self.register_capacity_bytes + self.reply_capacity_bytes
        return self.ingress_capacity_bytes + self.workers * per_worker

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> Settings:
        """Build from plain data, as from a file. Raises ConfigError for a name that is no setting."""
        known = {field.name for field in fields(cls)}
        for setting in mapping:
            if setting not in known:
                raise ConfigError(f"unknown setting: setting={setting}", setting=str(setting))
        if "name" not in mapping:
            raise ConfigError("name is needed", setting="name")
        values = dict(mapping)
        if isinstance(values.get("tokenizer"), str):
            values["tokenizer"] = Path(values["tokenizer"])
        for setting in ("eos_token_ids", "cores"):
            if values.get(setting) is not None:
                values[setting] = _int_tuple(setting, values[setting])
        return cls(**values)

    @classmethod
    def from_file(cls, path: Path, defaults: dict[str, Any] | None = None, **overrides: object) -> Settings:
        """Read a `.json` or `.toml` file of settings.

        `defaults` are for settings that the file does not name; `overrides` that are not None win over
        it. Raises ConfigError that names the file, or the setting in it.
        """
        given = {setting: value for setting, value in overrides.items() if value is not None}
        return cls.from_mapping((defaults or {}) | _read_file(path) | given)


def _int_tuple(setting: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or any(type(item) is not int for item in value):
        raise ConfigError(f"{setting} must be a list of integers: value={value!r}", setting=setting)
    return tuple(value)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            # by name: the module is there from Python 3.11 on
            values = importlib.import_module("tomllib").loads(text)
        else:
            values = json.loads(text)
    except ModuleNotFoundError:
        raise ConfigError(f"a .toml file needs Python 3.11: config={path}", setting="config") from None
    except (OSError, ValueError, RecursionError) as error:
        read = "" if path.suffix in (".json", ".toml") else " (.json and .toml are read)"
        raise ConfigError(
            f"config file cannot be read{read}: config={path}, why={error}", setting="config"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"config file holds no object: config={path}", setting="config")
    return values


def check_deployment_name(name: str) -> str:
    """Return `name`, or raise ConfigError that says what is wrong with it."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise ConfigError(
            f"name may hold letters, digits, '_', '-', '.' and starts with none of '-.': name={name!r}",
            setting="name",
        )
    if len(name) > DEPLOYMENT_NAME_LENGTH_MAX:
        raise ConfigError(
            f"name is too long: length={len(name)}, max={DEPLOYMENT_NAME_LENGTH_MAX}", setting="name"
        )
    return name


def _check_number(setting: str, value: object, low: float, high: float, *, is_float: bool) -> None:
    kinds = (int, float) if is_float else int
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ConfigError(f"{setting} must be a number: value={value!r}", setting=setting)
    if math.isnan(value) or not low <= value <= high:
        raise ConfigError(f"{setting} is out of range: value={value}, min={low}, max={high}", setting=setting)


def _check_power_of_two(setting: str, value: int) -> None:
    if value & (value - 1):
        raise ConfigError(f"{setting} must be a power of two: value={value}", setting=setting)
