"""What a request carries for its engine alone: it arrives as it was given, or is refused in words."""

from __future__ import annotations

import math
import sys
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from manager_world import LENGTH, Client, World, run

from manager import ConfigError, Settings, decode_attachments
from manager.attachments import pack_attachments
from manager.errors import CodecError, ValidationError
from manager.limits import Limits
from manager.request import BROADCAST_BYTES_MAX, GenerateRequest, fan_out

#: What a server of prefill and decode nodes hands on, with the largest room that there is.
BOOTSTRAP = {
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 8998,
    "bootstrap_room": 2**63 - 1,
    "bootstrap_pair_key": None,
}


@pytest.mark.parametrize(
    "given",
    [
        {},
        BOOTSTRAP,
        {"image": bytes(range(256)) * 1000, "shape": [3, 224, 224], "dtype": "float16"},
        {"deep": {"a": [{"b": [None, True, -1, 1.5, "é", b"\0"]}]}, "": 2**64 - 1, "low": -(2**63)},
    ],
)
def test_what_is_given_comes_out(given: dict[str, Any]) -> None:
    """To the engine it is as if it had been called by the client itself."""
    found = decode_attachments(pack_attachments(given))
    assert found == given
    assert list(found) == list(given)
    assert pack_attachments(MappingProxyType(given)) == pack_attachments(given)


def test_floats_keep_every_bit() -> None:
    """NaN and infinity are the caller's business."""
    found = decode_attachments(pack_attachments({"x": [math.nan, -math.inf, -0.0]}))["x"]
    assert math.isnan(found[0])
    assert found[1] == -math.inf
    assert math.copysign(1, found[2]) == -1


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def around_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["again"] = value
    return value


@pytest.mark.parametrize(
    "given",
    [
        b"bytes",
        "text",
        7,
        {1: "a"},
        {"array": np.zeros(2)},
        {"large": 2**64},
        {"object": object()},
        {"text": "\ud800"},
        {"deep": nested(100_000)},
        {"deep": nested(sys.getrecursionlimit() - 150)},
        around_itself(),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_cannot_travel_is_refused_with_the_field(given: Any) -> None:
    """Half of it, or an engine that dies of it, would be worse."""
    with pytest.raises(ValidationError) as caught:
        fan_out(GenerateRequest(text="x", attachments=given))
    assert caught.value.field == "attachments"


@pytest.mark.parametrize(
    "data", [b"\xff", b"\x81", b"\x90", b"\x81\x01\x02", b"\x81\xa1\xff\x01", b"\x91" * 5000]
)
def test_damaged_bytes_are_an_error_of_ours(data: bytes) -> None:
    """Whatever a scheduler finds in its ring, it is told by one kind of error."""
    with pytest.raises(CodecError, match="attachments are damaged"):
        decode_attachments(data)


def attached(*prompts: str, **request: Any) -> list[dict[str, Any]]:
    return [
        decode_attachments(single.attachments)
        for single in fan_out(GenerateRequest(text=list(prompts), **request))
    ]


def test_one_for_all_prompts_or_one_each() -> None:
    """An image belongs to its prompt; the host of a cache to all of them."""
    assert attached("a", "b", attachments=BOOTSTRAP) == [BOOTSTRAP] * 2
    assert attached("a", "b", attachments=[{"image": b"1"}, None]) == [{"image": b"1"}, {}]
    assert attached("a", "b") == [{}, {}]
    of_samples = attached("a", "b", attachments=[{"x": 1}, {"x": 2}], sampling_params={"n": 2})
    assert of_samples == [{"x": 1}, {"x": 1}, {"x": 2}, {"x": 2}]
    with pytest.raises(ValidationError, match="attachments has a wrong length"):
        attached("a", "b", attachments=[{}])


def test_copies_for_many_prompts_are_bounded() -> None:
    """A small request that stands for gigabytes is refused before the first of them is made."""
    image = {"image": bytes(BROADCAST_BYTES_MAX // 10)}
    assert len(attached("a", attachments=image)) == 1
    assert len(attached(*"abcdefghi", attachments=image)) == 9
    with pytest.raises(ValidationError, match="grows too large") as caught:
        attached(*"abcdefghij", attachments=image)
    assert caught.value.field == "attachments"


def test_what_is_longer_than_the_setting_is_refused() -> None:
    """To the byte: the packed length counts."""
    (single,) = fan_out(GenerateRequest(text="x", attachments={"a": bytes(100)}))
    length = len(single.attachments)
    for length_max in (None, length):
        Limits(vocab_size=10, context_length=10, attachments_length_max=length_max).validate(single)
    with pytest.raises(ValidationError, match=f"length={length}, max={length - 1}") as caught:
        Limits(vocab_size=10, context_length=10, attachments_length_max=length - 1).validate(single)
    assert caught.value.field == "attachments"


def test_the_setting_must_fit_the_ring() -> None:
    """A bound that no ring holds would promise what cannot be."""
    settings = Settings(name="x")
    assert settings.attachments_bytes_max == settings.ingress_capacity_bytes // 4
    assert Settings(name="x", attachments_length_max=0).attachments_bytes_max == 0
    with pytest.raises(ConfigError, match="attachments"):
        Settings(name="x", attachments_length_max=1 << 23)


def test_attachments_arrive_at_the_scheduler_untouched(ring_name: str) -> None:
    """Beside neighbours without any, each at its own request."""

    async def work() -> None:
        async with World(ring_name) as world:
            clients = [
                Client(world.manager, text="x", rid="a", attachments=BOOTSTRAP),
                Client(world.manager, text="x", rid="b"),
                Client(world.manager, input_ids=[1], rid="c", attachments={"image": bytes(1000)}),
            ]
            await world.arrive("a", "b", "c")
            assert world.attachments == {"a": BOOTSTRAP, "b": {}, "c": {"image": bytes(1000)}}
            for rid in ("a", "b", "c"):
                world.push(rid, "y", LENGTH(1))
            assert [(await client.end()).text for client in clients] == ["y"] * 3

    run(work())


def test_attachments_that_do_not_fit_are_a_bad_request(ring_name: str) -> None:
    """By the setting, or by the ring together with their prompt: nothing of it is left anywhere."""

    async def work() -> None:
        settings: dict[str, Any] = {"ingress_capacity_bytes": 1 << 14, "context_length": 3000}
        async with World(ring_name, **settings) as world:
            for length, ids, why in ((4087, 1, "max=4096"), (4086, 2999, "does not fit a ring")):
                client = Client(
                    world.manager,
                    input_ids=[1] * ids,
                    sampling_params={"max_new_tokens": 1},
                    attachments={"image": bytes(length)},
                )
                await client.end()
                assert isinstance(client.error, ValidationError)
                assert client.error.field == "attachments"
                assert why in str(client.error)
            await world.settle()
            assert world.requests == {}
            assert world.is_empty()

    run(work())
