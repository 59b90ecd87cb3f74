"""A whole engine loop against a deployment: python examples/scheduler.py NAME.

The "model" here draws every next token from the prompt's own ids. Replace `next_tokens`.
"""

import random
import sys

import numpy as np

from manager import DeploymentEndedError, FinishCode, SchedulerPort


class Running:
    """One request: what it may still generate, and from what."""

    def __init__(self, prompt: list[int], max_new_tokens: int) -> None:
        self.prompt, self.left, self.done = prompt, max_new_tokens, 0


def next_tokens(batch: list[Running]) -> list[int]:
    """One decode step: one new token of each running request."""
    return [random.choice(request.prompt) for request in batch]  # noqa: S311


def serve(port: SchedulerPort) -> None:
    """Serve until the deployment ends."""
    running: dict[int, Running] = {}
    while True:
        if not running:
            port.wait()  # asleep until a request comes
        arrivals = port.drain(max_requests=64)
        prompts = np.split(arrivals.prompt_ids, np.cumsum(arrivals.prompt_counts)[:-1])
        limits = arrivals.sampling["max_new_tokens"].tolist()  # -1: as long as the context allows
        for request_id, prompt, limit in zip(arrivals.request_ids.tolist(), prompts, limits, strict=False):
            room = port.context_length - len(prompt)
            running[request_id] = Running(prompt.tolist(), room if limit < 0 else min(limit, room))
        for request_id in arrivals.aborts.tolist():
            running.pop(request_id, None)
        if not running:
            continue
        ids, batch = list(running), list(running.values())
        codes = np.zeros(len(ids), np.uint8)
        values = np.zeros(len(ids), np.int64)
        for row, request in enumerate(batch):
            request.done += 1
            if request.done >= request.left:
                codes[row], values[row] = FinishCode.LENGTH, request.done
                del running[ids[row]]
        port.push_batch(ids, np.ones(len(ids), np.uint32), next_tokens(batch), codes, values)


if __name__ == "__main__":
    with SchedulerPort.attach(sys.argv[1], timeout_s=None) as port:
        try:
            serve(port)
        except DeploymentEndedError as ended:
            print(ended)
