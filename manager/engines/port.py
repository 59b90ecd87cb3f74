"""What the engines' loop needs of the scheduler's end of a deployment.

The real one reads and writes rings; a test gives a fake. All arrays are little-endian numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from manager.extras import BatchExtras


class Arrivals(Protocol):
    """What one drain brought: n requests as aligned columns, and aborts.

    The arrays may be views of the ring: they are good until the next drain.
    """

    @property
    def request_ids(self) -> NDArray[np.uint64]:
        """(n,) unique for the life of the deployment."""
        ...

    @property
    def prompt_counts(self) -> NDArray[np.uint32]:
        """(n,) token ids of each prompt."""
        ...

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """(sum of prompt_counts,) the prompts one after the other."""
        ...

    @property
    def sampling(self) -> NDArray[np.void]:
        """(n,) of `manager.sampling.SAMPLING_DTYPE`."""
        ...

    @property
    def stop_token_counts(self) -> NDArray[np.uint32]:
        """(n,) stop token ids of each request."""
        ...

    @property
    def stop_token_ids(self) -> NDArray[np.int32]:
        """(sum of stop_token_counts,) one request's after the other's."""
        ...

    @property
    def options(self) -> NDArray[np.void]:
        """(n,) of `manager.extras.OPTIONS_DTYPE`."""
        ...

    @property
    def token_id_logprob_counts(self) -> NDArray[np.uint32]:
        """(n,) ids whose log probabilities each request wants."""
        ...

    @property
    def token_ids_logprob(self) -> NDArray[np.int32]:
        """(sum of token_id_logprob_counts,) one request's after the other's."""
        ...

    @property
    def extras(self) -> Sequence[bytes]:
        """(n,) rare fields as msgpack, b"" for none."""
        ...

    @property
    def attachments(self) -> Sequence[bytes]:
        """(n,) what the requests carry for an engine that knows it, b"" for nothing."""
        ...

    @property
    def aborts(self) -> NDArray[np.uint64]:
        """(m,) requests to drop.

        May name requests that are not known any more, and requests of this same drain, which then
        are not to be started.
        """
        ...

    @property
    def controls(self) -> Sequence[Control]:
        """Questions to be answered with `push_result`."""
        ...


class Control(Protocol):
    """A question to the scheduler."""

    @property
    def control_id(self) -> int:
        """What the answer must name."""
        ...

    @property
    def payload(self) -> bytes:
        """The question; an embedded engine has one answer to all."""
        ...


class ModelFacts(Protocol):
    """What an engine must know of the deployment it is made for."""

    @property
    def vocab_size(self) -> int:
        """Ids of the deployment's tokenizer."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together."""
        ...

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Ids that end a text."""
        ...


class Port(Protocol):
    """The scheduler's end of a deployment."""

    @property
    def vocab_size(self) -> int:
        """Ids of the deployment's tokenizer."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        ...

    def wait(self, timeout_s: float | None) -> bool:
        """Park until there is something to drain (True) or the time is over (False)."""
        ...

    def drain(self, max_requests: int) -> Arrivals:
        """Take at most so many requests, and the aborts that came with them; never waits."""
        ...

    def push_batch(
        self,
        request_ids: NDArray[np.uint64],
        token_counts: NDArray[np.uint32],
        token_ids: NDArray[np.int32],
        finish_codes: NDArray[np.uint8],
        finish_values: NDArray[np.int64],
        *,
        extras: BatchExtras | None = None,
    ) -> object:
        """Send one step: n rows, of which row i has token_counts[i] of the token_ids. Waits while full.

        What it returns, if anything, is not looked at.
        """
        ...

    def push_error(self, request_id: int, message: str) -> object:
        """End one request with an error."""
        ...

    def push_result(self, control_id: int, payload: bytes) -> object:
        """Answer a control request."""
        ...
