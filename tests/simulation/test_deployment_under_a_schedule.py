"""The whole manager in one process, under a seeded schedule that decides who works, who dies and who leaves.

Rings are as small as they can be, so that everything is full now and then. Parts die between any two
pieces of work and in the midst of one, and others take their places on the same rings; the manager
notices later. Clients read slowly, go away and abort at any moment, by any name, once and twice; some ask for
what cannot be served. A scheduler tells of requests that have ended or never were, and frames
come damaged. After every step

- no request's text, ids or log probabilities are other than the beginning of what they must become,
- no request has ended twice, heard a word after its end, or failed for no reason,
- nothing of a request that ended is in the manager's tables,

and when all is quiet every request has ended, and nothing is kept of any of them anywhere.

A failing seed is in the test's name and replays by the command that it prints; see conftest.py. That
each kind of fault is found is shown in test_faults_are_found.py.
"""

from __future__ import annotations

import random

from clients import Client, wanted_of
from world import World

STEPS = 240


def ask_for_what_is_served(world: World, count: int) -> list[Client]:
    """Plain requests that nothing can be wrong with."""
    clients = []
    for number in range(count):
        ids = list(f"last words {number}".encode())
        params = {"max_new_tokens": None, "n": 1, "no_stop_trim": False, "skip_special_tokens": True}
        params["custom_params"] = {"salt": number}
        wanted = wanted_of(ids, params, None, truncates=False)
        request = {"input_ids": ids, "sampling_params": params, "stream": True}
        clients.append(world.add_client(Client(request, {(0, 0): wanted})))
    return clients


def test_every_request_ends_once_with_its_own_text(ring_name: str, seed: int) -> None:
    """Nobody hangs, nobody reads another's words, and after a year nothing is left over."""
    with World(ring_name, seed, is_stormy=True) as world:
        for _ in range(STEPS):
            world.step()
        world.settle()
        assert len(world.clients) > 5
        # and what has been through all this serves as on its first day
        last = ask_for_what_is_served(world, 5)
        world.settle()
        assert [client.end for client in last] == ["read to the end"] * 5
        assert all(single.is_whole for client in last for single in client.singles.values())


def test_without_deaths_and_aborts_every_request_has_its_whole_text(ring_name: str, seed: int) -> None:
    """Backpressure alone must cost nobody anything but time, or a refusal at the door."""
    with World(ring_name, seed, is_stormy=False) as world:
        while len(world.clients) < 20:
            world.add_client()
            for _ in range(world.rng.randrange(20)):
                world.step()
        world.settle()
        served = [client for client in world.clients if client.end == "read to the end"]
        assert served
        for client in served:
            for single in client.singles.values():
                assert single.is_whole or single.error is not None


def test_closing_at_any_moment_ends_every_request(ring_name: str, seed: int) -> None:
    """A server that is told to stop must stop, and tell everybody who waits."""
    with World(ring_name, seed, is_stormy=True) as world:
        for _ in range(random.Random(seed).randrange(120)):
            world.step()
        world.close_in_the_midst()


def test_a_seed_is_the_same_run_each_time(ring_name: str) -> None:
    """A failure that cannot be run again is a rumour."""

    def run(name: str) -> list[object]:
        with World(name, 5, is_stormy=True) as world:
            for _ in range(STEPS):
                world.step()
            world.settle()
            singles = [(single.text, single.ids, repr(single.error)) for single in world.all_singles()]
            return [singles, [client.end for client in world.clients], world.rng.random(), world.deaths]

    assert run(ring_name) == run(ring_name)
