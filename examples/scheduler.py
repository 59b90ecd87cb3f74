"""A whole engine loop against a deployment: python examples/scheduler.py NAME. Replace `next_tokens`."""

import random
import sys

import numpy as np

from manager import Arrivals, DeploymentEndedError, FinishCode, SchedulerPort, decode_extras


class Running:
    """One request: from what it goes on, and where it ends."""

    def __init__(self, port: SchedulerPort, wanted: np.void, prompt: list[int], stops: list[int]) -> None:
        room, most = port.context_length - len(prompt), int(wanted["max_new_tokens"])
        self.prompt, self.done, self.least = prompt, 0, int(wanted["min_new_tokens"])
        self.most = room if most < 0 else min(most, room)  # -1: as long as the context allows
        self.ends_at = {*stops, *(() if wanted["ignore_eos"] else port.eos_token_ids)}

    def finish(self, token: int) -> tuple[int, int]:
        """The code and the value of a step that brought `token`."""
        self.done += 1
        if token in self.ends_at and self.done >= self.least:
            return FinishCode.STOP_TOKEN, token
        return (FinishCode.LENGTH, self.done) if self.done >= self.most else (FinishCode.NONE, 0)


def refused(arrivals: Arrivals, row: int) -> str:
    """What the request wants and this engine cannot do; empty: nothing."""
    options, rare = arrivals.options[row], decode_extras(arrivals.extras[row])
    wants = {
        "attachments": arrivals.attachments[row],
        "log probabilities": options["return_logprob"],
        "hidden states": options["return_hidden_states"],
    } | {name: rare.get(name) for name in ("json_schema", "regex", "ebnf", "structural_tag")}
    names = ", ".join(name for name, is_wanted in wants.items() if is_wanted)
    return names and f"not served by this engine: {names}"


def next_tokens(batch: list[Running]) -> list[int]:
    """One decode step, a new token of each running request; here it is one of the prompt's own."""
    return [random.choice(request.prompt) for request in batch]  # noqa: S311 -- a toy, no secret


def serve(port: SchedulerPort) -> None:
    running: dict[int, Running] = {}
    while True:
        if not running:
            port.wait()  # asleep until a request comes
        arrivals = port.drain(max_requests=64)
        prompts = np.split(arrivals.prompt_ids, np.cumsum(arrivals.prompt_counts)[:-1])
        stops = np.split(arrivals.stop_token_ids, np.cumsum(arrivals.stop_token_counts)[:-1])
        rows = zip(arrivals.request_ids.tolist(), arrivals.sampling, prompts, stops, strict=False)
        for row, (request_id, wanted, prompt, stop_ids) in enumerate(rows):
            if refusal := refused(arrivals, row):
                port.push_error(request_id, refusal)
            elif wanted["max_new_tokens"] == 0:  # nothing to generate: it ends without a token
                port.push_batch([request_id], [0], [], [FinishCode.LENGTH], [0])
            else:
                running[request_id] = Running(port, wanted, prompt.tolist(), stop_ids.tolist())
        for request_id in arrivals.aborts.tolist():  # may name one that another scheduler had
            running.pop(request_id, None)
        for control in arrivals.controls:  # `TokenizerManager.ask_scheduler` waits for an answer
            port.push_result(control.control_id, f"{len(running)} run".encode())
        if running:
            ids, tokens = list(running), next_tokens(list(running.values()))
            ends = [running[i].finish(token) for i, token in zip(ids, tokens, strict=True)]
            port.push_batch(ids, np.ones(len(ids), np.uint32), tokens, *zip(*ends, strict=True))
            running = {i: running[i] for i, (code, _) in zip(ids, ends, strict=True) if not code}


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) == 2 else sys.exit("usage: python examples/scheduler.py NAME")
    with SchedulerPort.attach(name, timeout_s=None) as port:
        try:
            serve(port)
        except DeploymentEndedError as ended:
            print(ended)
