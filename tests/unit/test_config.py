"""Settings: every bound at both of its sides, and an error that names the setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shmring
from manager.config import BOUNDS, DEPLOYMENT_NAME_LENGTH_MAX, Settings, check_deployment_name
from manager.deployment import ring_names
from manager.errors import ConfigError

#: What a bound needs of other settings to be reached.
HELP: dict[str, dict[str, Any]] = {
    "context_length": {"ingress_capacity_bytes": 1 << 27},
    "ingress_capacity_bytes": {"context_length": 2},
    "attachments_length_max": {"ingress_capacity_bytes": 1 << 31},
}


def refused(**settings: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Settings(**{"name": "x", **settings})
    return caught.value


@pytest.mark.parametrize("setting", BOUNDS)
def test_a_number_is_taken_at_its_bounds_and_refused_beyond_them(setting: str) -> None:
    """A bound that is off by one is found by whoever needs just that value."""
    low, high = BOUNDS[setting]
    helped = HELP.get(setting, {})
    if setting == "ingress_capacity_bytes":
        low = 8192  # the smallest that holds a prompt of the shortest context
    for value in (low, high):
        assert getattr(Settings(name="x", **{**helped, setting: value}), setting) == value
    low, high = BOUNDS[setting]
    step = 0.001 if isinstance(low, float) else 1
    for value in (low - step, high + step, -high, 0 if low > 0 else -1):
        error = refused(**{**helped, setting: value})
        assert error.setting == setting
        assert setting in str(error)
        assert f"min={low}" in str(error)
        assert f"max={high}" in str(error)


@pytest.mark.parametrize("setting", BOUNDS)
@pytest.mark.parametrize("value", [True, "1", None, [1], float("nan"), float("inf"), 1.5j])
def test_what_is_no_number_is_refused(setting: str, value: object) -> None:
    """A mistake in a configuration file must be named at the start, not at the first request."""
    if value is None and setting in ("vocab_size", "text_length_max", "attachments_length_max"):
        assert getattr(Settings(name="x"), setting) is None
        return
    assert refused(**{setting: value}).setting == setting


@pytest.mark.parametrize("setting", [name for name in BOUNDS if name.endswith("_bytes")])
def test_capacities_are_powers_of_two(setting: str) -> None:
    """A ring has no other sizes."""
    error = refused(**{setting: (1 << 20) + 4096})
    assert error.setting == setting
    assert "power of two" in str(error)


def test_an_ingress_ring_holds_one_prompt_of_the_full_context() -> None:
    """Or a request that the bounds allow would be refused by the ring, for ever."""
    error = refused(context_length=2000, ingress_capacity_bytes=8192)
    assert error.setting == "ingress_capacity_bytes"
    assert "min=12096" in str(error)


def test_a_deployment_without_a_tokenizer_needs_a_vocabulary() -> None:
    """Ids could not be checked, and one that is too large ends the scheduler."""
    assert refused(has_tokenizer=False).setting == "vocab_size"
    assert Settings(name="x", has_tokenizer=False, vocab_size=10).vocab_size == 10


@pytest.mark.parametrize("name", ["a", "_", "0", "a.b-c_d", "x" * DEPLOYMENT_NAME_LENGTH_MAX])
def test_names_that_can_be(name: str) -> None:
    """What reads well in a listing of /dev/shm."""
    assert check_deployment_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "/", "a/b", "a b", "-a", ".a", "~a", "é", "a\n", "a\0", "x" * 188, None, 5, b"x"]
)
def test_names_that_cannot_be(name: Any) -> None:
    """A slash would leave the folder, a newline spoil every listing."""
    with pytest.raises(ConfigError) as caught:
        check_deployment_name(name)
    assert caught.value.setting == "name"
    assert "\n" not in str(caught.value)


def test_the_longest_name_has_room_for_all_of_its_rings(ring_name: str) -> None:
    """A bound of ours that lets in what shared memory refuses is a start that fails half way."""
    name = ring_name + "x" * (DEPLOYMENT_NAME_LENGTH_MAX - len(ring_name))
    longest = max(ring_names(name, 64), key=len)
    with shmring.create(longest, 4096):
        pass


def test_settings_from_a_file() -> None:
    """Plain data in, the same settings out; a name that is none is an error, not a default."""
    settings = Settings.from_mapping(
        {"name": "x", "tokenizer": "/t.json", "eos_token_ids": [1], "workers": 3}
    )
    assert settings == Settings(name="x", tokenizer=Path("/t.json"), eos_token_ids=(1,), workers=3)
    with pytest.raises(ConfigError, match="worker_count") as caught:
        Settings.from_mapping({"name": "x", "worker_count": 3})
    assert caught.value.setting == "worker_count"
    with pytest.raises(ConfigError) as caught:
        Settings.from_mapping({})
    assert caught.value.setting == "name"


def test_a_file_of_another_kind_is_told_which_kinds_are_read(tmp_path: Path) -> None:
    """A parser's complaint about line 1 does not say that YAML was never an option."""
    path = tmp_path / "c.yaml"
    for text in (None, "name: x\n"):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=r"\.json and \.toml are read.*c\.yaml") as caught:
            Settings.from_file(path)
        assert caught.value.setting == "config"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tokenizer", 5),
        ("eos_token_ids", 5),
        ("eos_token_ids", ["a"]),
        ("eos_token_ids", [-1]),
        ("eos_token_ids", "12"),
        ("has_tokenizer", "no"),
        ("accumulated_output", 1),
        ("allow_auto_truncate", 1),
    ],
)
def test_settings_of_the_wrong_type_are_named(setting: str, value: object) -> None:
    """What a file holds is whatever somebody wrote into it."""
    with pytest.raises(ConfigError) as caught:
        Settings.from_mapping({"name": "x", setting: value})
    assert caught.value.setting == setting


def test_all_rings_together() -> None:
    """What an operator must find room for in shared memory."""
    settings = Settings(
        name="x",
        workers=3,
        context_length=2,
        ingress_capacity_bytes=1 << 14,
        egress_capacity_bytes=1 << 13,
        register_capacity_bytes=1 << 12,
        reply_capacity_bytes=1 << 15,
    )
    assert settings.capacity_bytes == (1 << 14) + 3 * ((1 << 13) + (1 << 12) + (1 << 15))
