"""The command line as far as it goes without a process: options, printing, prompts."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest

import shmring
from manager.cli import main
from manager.cli.printing import Figures, JsonPrinter, PlainPrinter
from manager.errors import InternalError, ValidationError
from manager.extras import Logprobs
from manager.finish import FinishReason
from manager.output import GenerateOutput

if TYPE_CHECKING:
    from pathlib import Path

BAD_INPUT = {
    "no tokenizer file": (("--tokenizer", "/nowhere/tokenizer.json"), ["tokenizer", "/nowhere"]),
    "name with a slash": (("--name", "a/b"), ["name", "a/b"]),
    "name too long": (("--name", "x" * 188), ["name", "188", "max=187"]),
    "no workers": (("--workers", "0"), ["workers", "min=1", "max=64"]),
    "too many workers": (("--workers", "65"), ["workers", "65", "max=64"]),
    "context too short": (("--context-length", "1"), ["context_length", "min=2"]),
    "context beyond the ring": (("--context-length", "16777216"), ["ingress_capacity_bytes", "min="]),
    "top_p above its bound": (("--top-p", "2"), ["top_p", "2", "1]"]),
    "temperature below its bound": (("--temperature", "-1"), ["temperature", "-1"]),
    "temperature no number": (("--temperature", "warm"), ["temperature", "warm"]),
    "fraction for a count": (("--top-k", "1.5"), ["top_k"]),
    "top_k of zero": (("--top-k", "0"), ["top_k"]),
    "n of zero": (("--n", "0"), ["n "]),
    "unknown parameter": (("--sampling", '{"temprature": 1}'), ["temprature"]),
    "bad JSON": (("--sampling", '{"temperature": 1'), ["sampling", "JSON"]),
    "JSON that is no object": (("--sampling", "[1]"), ["sampling", "object"]),
    "empty stop": (("--stop", ""), ["stop"]),
    "concurrency of zero": (("--concurrency", "0"), ["concurrency", "min=1"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_that_says_what_is_wrong(
    ring_name: str, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """A traceback tells an operator nothing; a code of 0 tells a script that all is well."""
    options, words = BAD_INPUT[case]
    name = () if "--name" in options else ("--name", ring_name)
    assert main(["generate", *name, *options, "a prompt"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    for word in words:
        assert word in captured.err
    assert not [info for info in shmring.list_rings() if info.name.startswith(ring_name)]


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": "1.0", "mod', b"\xff\xfe", b"[]", b'{"a": 1}'])
def test_a_damaged_tokenizer_file_is_named(
    ring_name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes
) -> None:
    """A download that broke off must be told from a fault of the server, at once."""
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    assert main(["generate", "--name", ring_name, "--tokenizer", str(file), "hello"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: tokenizer file cannot be read: tokenizer={file}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["generate", "--frobnicate"], ["dance"], [], ["generate", "--engine", "x"]]
)
def test_words_that_no_command_has_end_with_the_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """Exit code 2: what every command line does."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: " in capsys.readouterr().err


def test_a_part_without_a_manager_ends_when_its_time_is_over(
    ring_name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bound on the wait, a script learns that nobody came."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for part in (["scheduler", "--engine", "echo"], ["worker", "--shard", "0"]):
        assert main([*part, "--name", ring_name, "--timeout", "0.05"]) == 1
        assert (
            f"error: no deployment of that name, start its manager: name={ring_name}"
            in capsys.readouterr().err
        )
        assert main([*part, "--name", "a/b", "--timeout", "0.05"]) == 1
        assert "error: name may hold" in capsys.readouterr().err


def piece(text: str, index: int = 0, sample: int = 0, **more: Any) -> GenerateOutput:
    fields: dict[str, Any] = {
        "output_ids": [1],
        "prompt_tokens": 2,
        "completion_tokens": 1,
        "finish_reason": None,
    }
    return GenerateOutput(index=index, sample=sample, rid="r", text=text, **{**fields, **more})


END = FinishReason.length(1)


def test_one_prompts_text_is_printed_as_it_comes() -> None:
    """Nothing but the text: it may be piped into something."""
    out = io.StringIO()
    printer = PlainPrinter(out, is_single=True)
    for text in ("one ", "", "two\n"):
        printer.piece(0, piece(text))
    printer.piece(0, piece("世", finish_reason=END))
    assert out.getvalue() == "one two\n世\n"


def test_several_texts_are_told_apart_by_line() -> None:
    """Interleaved streams that run into each other cannot be read."""
    out = io.StringIO()
    printer = PlainPrinter(out, is_single=False)
    printer.piece(0, piece("a\nb"))
    printer.piece(1, piece("c" * 100))
    printer.piece(1, piece("", sample=1, finish_reason=END))
    printer.piece(0, piece("", finish_reason=END))
    printer.piece(1, piece(" d", finish_reason=END))
    lines = out.getvalue().splitlines()
    assert lines[0] == "[0] a"
    assert "[0] b" in lines
    assert "".join(line[4:] for line in lines if line.startswith("[1] ")) == "c" * 100 + " d"
    assert all(len(line) <= 80 for line in lines)


def test_json_has_one_object_for_each_request(capsys: pytest.CaptureFixture[str]) -> None:
    """What a script reads: whole texts, each with its place, and errors as objects."""
    out = io.StringIO()
    printer = JsonPrinter(out)
    printer.piece(0, piece("a"))
    printer.piece(1, piece("x", sample=1, output_ids=[7]))
    printer.piece(0, piece("\u2028b\n", output_ids=[2], finish_reason=END))
    printer.piece(1, piece("", sample=1, output_ids=[], error=InternalError("broken")))
    printer.failure(2, ValidationError("bad", field="text"))
    first, second, third = (json.loads(line) for line in out.getvalue().split("\n")[:-1])
    assert (first["index"], first["text"], first["output_ids"]) == (0, "a\u2028b\n", [1, 2])
    assert first["finish_reason"] == {"type": "length", "length": 1}
    assert (second["index"], second["sample"], second["text"], second["output_ids"]) == (1, 1, "x", [7])
    assert second["error"] == {"status": 500, "message": "broken", "field": None}
    assert third == {"index": 2, "error": {"status": 400, "message": "bad", "field": "text"}}
    assert capsys.readouterr().err == ""


def test_json_has_the_log_probabilities_of_all_pieces_of_a_request_that_has_any() -> None:
    """The same numbers as in Python, in the same order."""
    out = io.StringIO()
    printer = JsonPrinter(out)
    said = [(-1.5, 97, "a"), (None, 98, "b")]
    printer.piece(0, piece("a", logprobs=Logprobs(output=said[:1], output_top=[said])))
    printer.piece(0, piece("b", logprobs=Logprobs(output=said[1:], output_top=[None]), finish_reason=END))
    printer.piece(1, piece("c", finish_reason=END))
    first, second = map(json.loads, out.getvalue().splitlines())
    assert first["logprobs"] == [[-1.5, 97, "a"], [None, 98, "b"]]
    assert first["top_logprobs"] == [[[-1.5, 97, "a"], [None, 98, "b"]], None]
    assert "logprobs" not in second


def test_figures_of_no_tokens_are_no_division_by_zero() -> None:
    """A run in which everything failed still ends with its line."""
    figures = Figures(requests=2, failed=2)
    assert figures.line().startswith("requests: 2, failed: 2, tokens: 0, ")
    figures = Figures(requests=3, tokens=5, first_token_s=[0.3, 0.1, 0.2])
    assert "time to first token: 200.0 ms (p99 300.0 ms)" in figures.line()
