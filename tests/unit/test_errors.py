"""Errors are sorted by who can act on them, and carry their facts."""

from __future__ import annotations

import copy
import errno
import inspect
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shmring
from shmring import errors

EVERY = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, shmring.ShmringError) and not kind.__name__.startswith("_")
]

MADE = [
    shmring.BadNameError("text"),
    shmring.BadCapacityError("text"),
    shmring.RecordTooLargeError("text", length=5, length_max=4),
    shmring.ClaimError("text"),
    shmring.NothingDrainedError("text"),
    shmring.ColumnError("text", "ids"),
    shmring.CorruptFrameError("text"),
    shmring.RingClosedError("text"),
    shmring.EndOfRing("text"),
    shmring.PeerLostError("text", pid=7),
    shmring.CorruptRingError("text", position=8, found=9),
    shmring.RoleTakenError("text", role="producer", holder_pid=3),
    shmring.SegmentExistsError("text", name="x", owner_pid=3),
    shmring.SegmentNotFoundError("text", name="x"),
    shmring.SegmentAccessError("text", name="x"),
    shmring.LayoutMismatchError("text", expected=1, found=2),
    shmring.NoSharedMemoryError("text", needed_bytes=2, free_bytes=1),
]


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_every_error_is_ours_public_and_explained(kind):
    """`except shmring.ShmringError` around a ring must catch all of it."""
    assert issubclass(kind, shmring.ShmringError)
    assert getattr(shmring, kind.__name__) is kind
    assert kind.__name__ in shmring.__all__
    assert kind.__doc__


@pytest.mark.parametrize(
    ("kind", "builtin", "number"),
    [
        (shmring.SegmentExistsError, FileExistsError, errno.EEXIST),
        (shmring.SegmentNotFoundError, FileNotFoundError, errno.ENOENT),
        (shmring.SegmentAccessError, PermissionError, errno.EACCES),
        (shmring.RoleTakenError, PermissionError, errno.EACCES),
        (shmring.NoSharedMemoryError, OSError, errno.ENOSPC),
    ],
)
def test_an_error_of_the_machine_is_an_oserror_with_its_number(kind, builtin, number):
    """Code that has caught FileNotFoundError or looked at errno for years goes on working."""
    (error,) = (e for e in MADE if type(e) is kind)
    assert isinstance(error, builtin)
    assert error.errno == number
    assert str(error) == "text"


@pytest.mark.parametrize(
    "kind",
    [
        shmring.BadNameError,
        shmring.BadCapacityError,
        shmring.RecordTooLargeError,
        shmring.ClaimError,
        shmring.NothingDrainedError,
        shmring.ColumnError,
        shmring.CorruptFrameError,
        shmring.RingClosedError,
    ],
)
def test_a_callers_mistake_is_a_value_error(kind):
    """A server's edge turns those into its 400s."""
    assert issubclass(kind, ValueError)


def test_the_end_and_the_loss_of_a_peer_are_what_stream_code_expects():
    """EOFError ends a read loop, ConnectionError a session."""
    assert issubclass(shmring.EndOfRing, EOFError)
    assert issubclass(shmring.PeerLostError, ConnectionError)


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_to_another_process(error):
    """A worker's error that cannot be unpickled hangs the pool that waits for it."""
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error) == "text"
        assert vars(again) == vars(error)
        assert again.args == error.args
        assert getattr(again, "errno", None) == getattr(error, "errno", None)


def test_all_of_them_are_tried_above():
    """A new error joins this list, or it may not travel."""
    assert {type(e) for e in MADE} == set(EVERY) - {shmring.ShmringError}


@pytest.mark.parametrize("answer", [a for a in errors.Answer if a < 0 and a is not errors.Answer.BAD_FRAME])
def test_every_negative_answer_becomes_an_error_that_says_why(answer):
    """An answer nobody translated would be a bare number at night."""
    error = errors.error_of(answer, 16, 4711, 100, 88)
    assert type(error) is not shmring.ShmringError
    assert str(error)


def test_an_answer_that_nobody_knows_asks_for_a_report():
    """It is our bug, and says which."""
    error = errors.error_of(-99, 0, 0, 0, 0)
    assert type(error) is shmring.ShmringError
    assert "answer=-99" in str(error)


@pytest.mark.parametrize("package", ["shmring", "manager"])
def test_a_tree_without_compiled_modules_says_what_to_do(package, tmp_path):
    """The first import in a fresh checkout should not end in the name of a file that nobody knows."""
    for folder in ("shmring", "manager"):
        source = Path(shmring.__file__).parents[1] / folder
        shutil.copytree(source, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # an editable install would find the compiled modules of its own tree for the copy's names
    alone = "import sys; sys.meta_path = [f for f in sys.meta_path if 'Editable' not in str(f)]"
    answer = subprocess.run(
        [sys.executable, "-c", f"{alone}; import {package}"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert "ImportError: compiled modules are missing: pip install ." in answer.stderr
    assert "No module named 'shmring._fast'" in answer.stderr  # the cause


def test_the_text_is_what_went_wrong_and_then_the_facts():
    """One form for all, so that a log can be searched."""
    error = errors.error_of(errors.Answer.TOO_LARGE, 0, 0, 100, 88)
    assert str(error) == "record can never fit: length=100, max=88"
    error = errors.error_of(errors.Answer.CORRUPT, 16, 4711, 0, 0)
    assert str(error) == "segment says what cannot be: position=16, found=4711"
