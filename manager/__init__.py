"""The tokenizer manager of an LLM server, built on shared-memory rings.

An engine imports `SchedulerPort`; whoever serves clients imports `TokenizerManager`.
"""

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
from manager.finish import FinishCode, FinishReason
from manager.request import GenerateRequest
from manager.sampling import SAMPLING_DTYPE, SamplingParams, decode_extras
from manager.scheduler_port import Arrivals, Control, SchedulerPort
from manager.tokenizer_manager import GenerateOutput, TokenizerManager

__all__ = [
    "SAMPLING_DTYPE",
    "Arrivals",
    "ConfigError",
    "Control",
    "DeploymentEndedError",
    "DisconnectedError",
    "FinishCode",
    "FinishReason",
    "GenerateOutput",
    "GenerateRequest",
    "InternalError",
    "ManagerError",
    "PartLostError",
    "QueueFullError",
    "SamplingParams",
    "SchedulerPort",
    "Settings",
    "TokenizerManager",
    "UnavailableError",
    "ValidationError",
    "decode_extras",
]
