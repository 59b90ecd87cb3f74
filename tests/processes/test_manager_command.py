"""The command `python -m manager` as somebody at a terminal uses it."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)

TEXTS = {
    "english": "The quick brown fox jumps over the lazy dog. It's 3.14, isn't it?",
    "chinese": "人人生而自由，在尊严和权利上一律平等。",  # noqa: RUF001
    "korean": "모든 인간은 태어날 때부터 자유로우며",
    "arabic": "يولد جميع الناس أحرارًا متساوين في الكرامة",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 1️⃣ 🇰🇷",
    "code": "def f(x):\n    return {'a': x ** 2}  # ünïcode\n",
}


@pytest.mark.parametrize("language", TEXTS)
def test_an_echo_prints_the_prompt_back(commands: Any, deployment_name: str, language: str) -> None:
    """Text in, text out: a character lost on the way is lost for every user of that language."""
    text = TEXTS[language]
    command = commands.manager(
        "generate", "--name", deployment_name, "--engine", "echo", "--workers", "2", text
    )
    assert command.wait() == 0
    assert command.out == text + "\n"
    assert command.err.startswith("requests: 1, tokens: ")
    assert command.err.count("\n") == 1


def test_the_ngram_engine_writes_the_same_text_for_the_same_seed(commands: Any, deployment_name: str) -> None:
    """Without that nobody can show anybody else what went wrong."""
    outputs = set()
    for _ in range(2):
        command = commands.manager(
            "generate", "--name", deployment_name, "--workers", "2", "--seed", "7", "--json", "Once upon"
        )
        assert command.wait() == 0
        line = json.loads(command.out)
        assert line["completion_tokens"] == len(line["output_ids"]) > 0
        outputs.add(line["text"])
    assert len(outputs) == 1
    assert outputs.pop()


def test_log_probabilities_are_shown_if_asked_for(commands: Any, deployment_name: str) -> None:
    """The quickest look at what a model finds likely."""
    command = commands.manager(
        "generate", "--name", deployment_name, "--max-new-tokens", "3", "--logprobs", "2", "--json", "Once"
    )
    assert command.wait() == 0
    answer = json.loads(command.out)
    assert [token_id for _, token_id, _ in answer["logprobs"]] == answer["output_ids"]
    assert "".join(text for _, _, text in answer["logprobs"]) == answer["text"]
    assert [1 <= len(top) <= 2 for top in answer["top_logprobs"]] == [True] * len(answer["output_ids"])


def test_every_line_of_a_file_is_answered(commands: Any, deployment_name: str, tmp_path: Path) -> None:
    """A prompt that gets no answer is lost without a word."""
    prompts = [f"prompt number {i} 世界" for i in range(50)]
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(prompts) + "\r\n", encoding="utf-8")
    command = commands.manager(
        "generate", "--name", deployment_name, "--engine", "echo", "--json", "--file", str(file)
    )
    assert command.wait() == 0
    lines = [json.loads(line) for line in command.out.splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(50))
    assert all(line["text"] == prompts[line["index"]] for line in lines)
    assert all(line["finish_reason"]["type"] == "stop" for line in lines)


def test_prompts_come_from_standard_input_as_they_are_typed(
    commands: Any, deployment_name: str, until: Callable[..., None]
) -> None:
    """Who pipes a slow writer in would wait for its end before the first answer."""
    read_end, write_end = os.pipe()
    command = commands.manager("generate", "--name", deployment_name, "--engine", "echo", stdin=read_end)
    os.close(read_end)
    os.write(write_end, b"first line\n")
    until(lambda: "first line" in command.out, "an answer before the end of the input")
    os.write(write_end, b"second line\n")
    os.close(write_end)
    assert command.wait() == 0
    assert command.out == "[0] first line\n[1] second line\n"


def test_stop_strings_end_the_text_before_them(commands: Any, deployment_name: str) -> None:
    """A stop string that leaks into the answer breaks whoever parses it."""
    for options, text in (((), "one two "), (("--no-stop-trim",), "one two three")):
        command = commands.manager(
            "generate",
            "--name",
            deployment_name,
            "--engine",
            "echo",
            "--stop",
            "three",
            *options,
            "--json",
            "one two three four",
        )
        assert command.wait() == 0
        line = json.loads(command.out)
        assert line["text"] == text
        assert line["finish_reason"] == {"type": "stop", "matched": "three"}


def test_samples_of_one_prompt_come_apart(commands: Any, deployment_name: str) -> None:
    """With n samples, one that takes another's place is lost."""
    command = commands.manager(
        "generate", "--name", deployment_name, "--n", "5", "--json", "Once upon a time"
    )
    assert command.wait() == 0
    lines = [json.loads(line) for line in command.out.splitlines()]
    assert sorted(line["sample"] for line in lines) == [0, 1, 2, 3, 4]
    assert len({line["rid"] for line in lines}) == 5


# What is found out only once a deployment is there; the rest is in tests/unit.
BAD_INPUT = {
    "prompt and output beyond the context": (
        ("--context-length", "16", "--max-new-tokens", "16"),
        ["context_length=16", "input tokens="],
    ),
    "prompt beyond the context": (("--context-length", "2"), ["input", "context_length=2"]),
    "stop token outside of the vocabulary": (
        ("--stop-token-id", "99999999"),
        ["stop_token_ids", "allowed=0.."],
    ),
    "two grammars": (("--sampling", '{"regex": "a", "ebnf": "b"}'), ["regex", "ebnf"]),
    "grammar that the engine has not": (("--sampling", '{"regex": "a"}'), ["regex"]),
    "log probabilities as text": (("--logprobs", "2"), ["--json"]),
    "no such file": (("--file", "/nowhere/prompts"), ["/nowhere/prompts"]),
    "folder for a file": (("--file", "/"), ["'/'"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_that_says_what_is_wrong(
    commands: Any, deployment_name: str, case: str
) -> None:
    """A traceback tells an operator nothing; a code of 0 tells a script that all is well."""
    options, words = BAD_INPUT[case]
    name = () if "--name" in options else ("--name", deployment_name)
    command = commands.manager("generate", *name, *options, "a prompt of some words")
    assert command.wait() == 1
    errors = [line for line in command.err.splitlines() if not line.startswith("requests:")]
    assert len(errors) == 1, command.err
    assert errors[0].startswith("error: ")
    for word in words:
        assert word in errors[0]


def test_prompts_that_are_no_text_are_refused(commands: Any, deployment_name: str, tmp_path: Path) -> None:
    """Bytes of another encoding would come back as other characters."""
    file = tmp_path / "latin1.txt"
    file.write_bytes("schön\n".encode("latin-1"))
    command = commands.manager("generate", "--name", deployment_name, "--file", str(file))
    assert command.wait() == 1
    assert "is not UTF-8" in command.err
    assert "Traceback" not in command.err


def test_a_name_in_use_is_refused_and_its_owner_goes_on(
    commands: Any, deployment_name: str, until: Callable[..., None]
) -> None:
    """Two deployments of one name would eat each other's tokens."""
    read_end, write_end = os.pipe()
    first = commands.manager("generate", "--name", deployment_name, "--engine", "echo", stdin=read_end)
    os.close(read_end)
    os.write(write_end, b"one\n")
    until(lambda: "one" in first.out, "the first deployment answers")
    second = commands.manager("generate", "--name", deployment_name, "--engine", "echo", "hello")
    assert second.wait() == 1
    assert second.err == (
        f"error: name is in use by a living deployment: name={deployment_name}, owner_pid={first.pid}\n"
    )
    os.write(write_end, b"two\n")
    until(lambda: "two" in first.out, "the first deployment still answers")
    os.close(write_end)
    assert first.wait() == 0


SIGNALS = {
    "Ctrl-C": ([signal.SIGINT], 130),
    "SIGTERM": ([signal.SIGTERM], 143),
    "Ctrl-C twice": ([signal.SIGINT, signal.SIGINT], 130),
    "SIGTERM and Ctrl-C": ([signal.SIGTERM, signal.SIGINT, signal.SIGTERM], 143),
}


@pytest.mark.parametrize("case", SIGNALS)
def test_a_signal_in_the_middle_leaves_nothing(
    commands: Any,
    deployment_name: str,
    case: str,
    until: Callable[..., None],
    pids_of: Callable[[str], list[int]],
    names_left: Callable[[str], list[str]],
) -> None:
    """What is left in shared memory or in the process table is there until somebody notices."""
    numbers, code = SIGNALS[case]
    options = ("--ignore-eos", "--max-new-tokens", "8000", "--workers", "2", "Once upon a time")
    command = commands.manager("generate", "--name", deployment_name, *options)
    until(lambda: command.out, "text")
    for number in numbers:
        command.signal(number)
    assert command.wait() == code
    assert "Traceback" not in command.err
    assert "error" not in command.err
    assert pids_of(deployment_name) == []
    assert names_left(deployment_name) == []


def test_a_signal_while_others_are_awaited_leaves_nothing(
    commands: Any,
    deployment_name: str,
    until: Callable[..., None],
    names_left: Callable[[str], list[str]],
) -> None:
    """Whoever starts the manager first and thinks better of it presses Ctrl-C here."""
    options = ("--engine", "none", "--external-workers", "hello")
    command = commands.manager("generate", "--name", deployment_name, *options)
    until(lambda: command.err.count("\n") == 2, "word of the missing parts")
    command.signal(signal.SIGINT)
    assert command.wait() == 130
    assert names_left(deployment_name) == []


def test_a_signal_while_input_is_awaited_ends_the_command(
    commands: Any, deployment_name: str, until: Callable[..., None]
) -> None:
    """A read of a terminal cannot be cancelled, and must not keep the command alive."""
    read_end, write_end = os.pipe()
    command = commands.manager("generate", "--name", deployment_name, "--engine", "echo", stdin=read_end)
    os.close(read_end)
    os.write(write_end, b"hello\n")
    until(lambda: "hello" in command.out, "an answer")
    command.signal(signal.SIGINT)
    assert command.wait() == 130
    os.close(write_end)
    assert "Traceback" not in command.err
    assert "Fatal" not in command.err


def test_a_reader_that_goes_away_ends_the_command_quietly(commands: Any, deployment_name: str) -> None:
    """`generate | head -1` is an ordinary thing to do."""
    script = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-m', 'manager', *sys.argv[1:]], stdout=subprocess.PIPE)\n"
        "p.stdout.readline()\n"
        "p.stdout.close()\n"
        "sys.exit(p.wait())\n"
    )
    options = ("--ignore-eos", "--max-new-tokens", "4000", "one", "two", "three")
    command = commands.python("-c", script, "generate", "--name", deployment_name, *options)
    assert command.wait() == 141
    assert "Traceback" not in command.err
    assert "BrokenPipe" not in command.err


def test_parts_run_by_hand_in_any_order(
    commands: Any, deployment_name: str, until: Callable[..., None]
) -> None:
    """Whatever a supervisor starts first must wait for the others, and end with them."""
    scheduler = commands.manager("scheduler", "--name", deployment_name, "--engine", "echo")
    first = commands.manager("worker", "--name", deployment_name, "--shard", "0")
    until(lambda: "waiting for a manager" in scheduler.err, "word of the scheduler that it waits")
    options = ("--engine", "none", "--external-workers", "--workers", "2", "--json", "one", "two", "three")
    manager = commands.manager("generate", "--name", deployment_name, *options)
    until(lambda: "worker 1" in manager.err, "word of the manager that a worker is missing")
    assert f"python -m manager worker --name {deployment_name} --shard 1" in manager.err
    second = commands.manager("worker", "--name", deployment_name, "--shard", "1")
    assert manager.wait() == 0
    assert sorted(json.loads(line)["text"] for line in manager.out.splitlines()) == ["one", "three", "two"]
    assert [part.wait() for part in (scheduler, first, second)] == [0, 0, 0]
    assert "Traceback" not in scheduler.err + first.err + second.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("part", [("scheduler", "--engine", "echo"), ("worker", "--shard", "0")])
def test_a_part_that_waits_for_its_manager_ends_at_a_signal(
    commands: Any, deployment_name: str, until: Callable[..., None], part: tuple[str, ...], number: int
) -> None:
    """A part that only a SIGKILL ends is one that supervisors give up on."""
    command = commands.manager(*part, "--name", deployment_name)
    until(lambda: "waiting for a manager" in command.err, "word that it waits")
    command.signal(number)
    assert command.wait() == 0


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (("worker", "--shard", "5"), ["shard=5", "shards=1"]),
        (("worker", "--shard", "-1"), ["shard=-1"]),
        (("worker", "--shard", "0"), ["another process is"]),
        (("scheduler", "--engine", "echo"), ["has a scheduler already"]),
        (("scheduler", "--engine", "echo", "--chunk", "0"), ["chunk=0"]),
    ],
)
def test_a_part_that_is_not_wanted_is_refused(
    commands: Any, deployment_name: str, until: Callable[..., None], part: tuple[str, ...], words: list[str]
) -> None:
    """A second scheduler or worker would take every other record of the first."""
    read_end, write_end = os.pipe()
    engine = "none" if "--chunk" in part else "echo"
    manager = commands.manager("generate", "--name", deployment_name, "--engine", engine, stdin=read_end)
    os.close(read_end)
    if engine == "echo":
        os.write(write_end, b"one\n")
        until(lambda: "one" in manager.out, "the deployment answers")
    else:
        until(lambda: "waiting" in manager.err, "the deployment waits")
    command = commands.manager(*part, "--name", deployment_name)
    assert command.wait() == 1
    for word in words:
        assert word in command.err
    assert "Traceback" not in command.err
    if engine == "echo":
        os.write(write_end, b"two\n")
        until(lambda: "two" in manager.out, "the deployment still answers")
        os.close(write_end)
        assert manager.wait() == 0
    else:
        os.close(write_end)
        manager.signal(signal.SIGTERM)
        assert manager.wait() == 143
