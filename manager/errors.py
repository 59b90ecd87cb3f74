"""Every error of the manager, sorted by who can act on it.

`status` is the class that an HTTP edge would answer with: 400 the caller's mistake,
499 the caller went away, 500 our fault, 503 try again later. Facts are attributes;
the text is `what went wrong: name=value, name=value`.
"""

from __future__ import annotations


class ManagerError(Exception):
    """Base of all errors of the manager; `status` is its HTTP class."""

    status: int = 500


class ValidationError(ManagerError, ValueError):
    """The request can never be served as it is. `field` names what is wrong with it."""

    status = 400

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ConfigError(ManagerError, ValueError):
    """A setting cannot work. `setting` names it."""

    status = 400

    def __init__(self, message: str, *, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting


class DisconnectedError(ManagerError):
    """The client went away, or the request was aborted on its behalf."""

    status = 499


class UnavailableError(ManagerError):
    """No capacity, or a part that is needed is not there: try again later."""

    status = 503


class QueueFullError(UnavailableError):
    """A bounded queue is full."""


class PartLostError(UnavailableError):
    """A process that held the request died. `part` names it ("scheduler", "worker 1")."""

    def __init__(self, message: str, *, part: str) -> None:
        super().__init__(message)
        self.part = part


class InternalError(ManagerError):
    """A fault of ours, or of a part that broke the protocol."""


class TokenizeError(InternalError):
    """The tokenizer failed on valid input."""


class DetokenizeError(InternalError):
    """The decoder failed on ids that it should accept."""


class CodecError(InternalError):
    """A frame does not say what its header promises."""


class DeploymentEndedError(ManagerError):
    """The manager that owned the deployment has gone. `orderly` tells how."""

    status = 503

    def __init__(self, message: str, *, orderly: bool) -> None:
        super().__init__(message)
        self.orderly = orderly


def error_of_status(status: int, message: str) -> ManagerError:
    """The error class of an abort that the scheduler gave a status."""
    for kind in (ValidationError, DisconnectedError, UnavailableError):
        if status == kind.status:
            return kind(message)
    return ValidationError(message) if 400 <= status < 500 else InternalError(message)
