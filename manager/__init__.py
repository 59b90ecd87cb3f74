"""The tokenizer manager of an LLM server, built on shared-memory rings.

An engine imports `SchedulerPort`; whoever serves clients imports `TokenizerManager`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import shmring  # noqa: F401 - first: it says so where the compiled modules are missing
from manager.attachments import decode_attachments
from manager.config import Settings
from manager.errors import (
    ConfigError,
    DeploymentEndedError,
    DisconnectedError,
    InternalError,
    ManagerError,
    PartLostError,
    QueueFullError,
    UnavailableError,
    ValidationError,
)
from manager.extras import OPTIONS_DTYPE, BatchExtras, LogprobColumn, Logprobs
from manager.finish import FinishCode, FinishKind, FinishReason
from manager.request import GenerateRequest
from manager.running_batch import Finished, RowOrder, RunningBatch
from manager.sampling import SAMPLING_DTYPE, SamplingParams, decode_extras
from manager.scheduler_port import Arrivals, Control, SchedulerPort

if TYPE_CHECKING:
    from manager.output import GenerateOutput
    from manager.tokenizer_manager import TokenizerManager
    from manager.watch import PartHealth, PartState

_LATER = {
    "GenerateOutput": "manager.output",
    "PartHealth": "manager.watch",
    "PartState": "manager.watch",
    "TokenizerManager": "manager.tokenizer_manager",
}


def __getattr__(name: str) -> object:
    """Import the manager's own side only for those who use it: a scheduler needs no tokenizer library."""
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'manager' has no attribute {name!r}")


__all__ = [
    "OPTIONS_DTYPE",
    "SAMPLING_DTYPE",
    "Arrivals",
    "BatchExtras",
    "ConfigError",
    "Control",
    "DeploymentEndedError",
    "DisconnectedError",
    "FinishCode",
    "FinishKind",
    "FinishReason",
    "Finished",
    "GenerateOutput",
    "GenerateRequest",
    "InternalError",
    "LogprobColumn",
    "Logprobs",
    "ManagerError",
    "PartHealth",
    "PartLostError",
    "PartState",
    "QueueFullError",
    "RowOrder",
    "RunningBatch",
    "SamplingParams",
    "SchedulerPort",
    "Settings",
    "TokenizerManager",
    "UnavailableError",
    "ValidationError",
    "decode_attachments",
    "decode_extras",
]
