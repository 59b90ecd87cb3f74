"""The manager's reading end: good frames become calls, bad ones end the requests that they name."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmring
from manager import messages
from manager.errors import InternalError, UnavailableError, ValidationError
from manager.inbox import Inbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmring import Producer


class Calls:
    """Every call, in order."""

    def __init__(self) -> None:
        self.texts: list[tuple[Any, ...]] = []
        self.fails: list[tuple[int, Exception]] = []
        self.others: list[tuple[Any, ...]] = []

    def on_text(self, request_id: int, text: str, ids: list[int], count: int, reason: Any) -> None:
        self.texts.append((request_id, text, ids, count, reason and reason.to_mapping()))

    def on_fail(self, request_id: int, error: Exception) -> None:
        self.fails.append((request_id, error))

    def on_abort_asked(self, request_id: int) -> None:
        self.others.append(("abort", request_id))

    def on_result(self, control_id: int, payload: bytes) -> None:
        self.others.append(("result", control_id, payload))


class Post:
    def __init__(self, name: str) -> None:
        self.ring = shmring.create(name, 1 << 16)
        self.worker: Producer = self.ring.producer()
        self.reader = self.ring.consumer(takeover=True, poison=True)
        self.calls = Calls()
        self.inbox = Inbox(self.reader, self.calls)

    def text(self, *rows: tuple[int, bytes, list[int]], codes: list[int] | None = None, **more: Any) -> None:
        count = len(rows)
        assert messages.TEXT.push(
            self.worker,
            count,
            np.array([row[0] for row in rows], np.uint64),
            *messages.pack_bytes([row[1] for row in rows]),
            np.array([len(row[2]) for row in rows], np.uint32),
            np.array([i for row in rows for i in row[2]], np.int32),
            np.array([len(row[2]) for row in rows], np.uint32),
            np.array(codes or [0] * count, np.uint8),
            more.get("values"),
            *more.get("details", (None, None)),
        )


@pytest.fixture
def post(ring_name: str) -> Iterator[Post]:
    post = Post(ring_name)
    yield post
    post.worker.close()
    post.reader.close()
    post.ring.close()


def test_rows_go_to_their_requests(post: Post) -> None:
    """A shifted column is one client's text at another's."""
    post.text(
        (1, "世界".encode(), [5, 6]), (2, b"", []), (3, b"x", [7]),
        codes=[0, 3, 2], values=np.array([0, 9, 7], np.int64),
    )  # fmt: skip
    assert post.inbox.do_work(8) == 1
    assert post.calls.texts == [
        (1, "世界", [5, 6], 2, None),
        (2, "", [], 0, {"type": "length", "length": 9}),
        (3, "x", [7], 1, {"type": "stop", "matched": 7}),
    ]


def test_details_of_one_row_leave_the_others_alone(post: Post) -> None:
    """One odd end in a batch must not change its neighbours'."""
    details = messages.pack_bytes([b"", b"\x81\xa4type\xa3odd", b""])
    post.text((1, b"a", []), (2, b"b", []), (3, b"c", []), codes=[1, 255, 0], details=details)
    post.inbox.do_work(8)
    assert [row[4] for row in post.calls.texts] == [{"type": "stop"}, {"type": "odd"}, None]


@pytest.mark.parametrize(
    "bad",
    [
        {"codes": [0, 99]},
        {"codes": [0, 1], "values": np.array([0, 5], np.int64)},
        {"codes": [0, 255]},
        {"codes": [0, 255], "details": messages.pack_bytes([b"", b"\xc1"])},
        {"codes": [0, 1], "details": messages.pack_bytes([b"", b"\x80"])},
    ],
)
def test_a_bad_row_rejects_its_frame_whole(post: Post, bad: dict[str, Any]) -> None:
    """Half of a frame delivered, and the other half failed, is a text that nobody sent."""
    post.text((1, b"a", [1]), (2, b"b", [2]), **bad)
    post.text((3, b"c", [3]))
    assert post.inbox.do_work(8) == 2
    assert post.calls.texts == [(3, "c", [3], 1, None)]
    assert [request_id for request_id, _ in post.calls.fails] == [1, 2]
    assert all(type(error) is InternalError for _, error in post.calls.fails)
    assert ("abort", 1) in post.calls.others
    assert post.inbox.rejected_frames == 1


def test_text_that_is_no_utf8_rejects_its_frame(post: Post) -> None:
    """A text with replaced characters would be wrong in silence."""
    post.text((1, b"good", []), (2, b"\xe4\xb8", []))
    post.inbox.do_work(8)
    assert post.calls.texts == []
    assert [request_id for request_id, _ in post.calls.fails] == [1, 2]


def test_errors_keep_their_class(post: Post) -> None:
    """What the client did wrong is a 400; what it may try again a 503; the rest is ours."""
    assert messages.FAIL.push(
        post.worker, 4, np.array([1, 2, 3, 4], np.uint64), np.array([400, 500, 503, 777], np.uint16),
        *messages.pack_bytes([b"bad", b"broken \xff", b"full", b""]),
    )  # fmt: skip
    post.inbox.do_work(8)
    kinds = [type(error) for _, error in post.calls.fails]
    assert kinds == [ValidationError, InternalError, UnavailableError, InternalError]
    assert [str(error) for _, error in post.calls.fails[:2]] == ["bad", "broken \N{REPLACEMENT CHARACTER}"]


def test_aborts_and_results_pass(post: Post) -> None:
    """The other two kinds of replies."""
    assert messages.ABORT_ASKED.push(post.worker, 2, np.array([2**64 - 1, 5], np.uint64))
    assert messages.REPLY_RESULT.push(post.worker, 1, np.array([9], np.uint64), *messages.pack_bytes([b"\0"]))
    post.inbox.do_work(8)
    assert post.calls.others == [("abort", 2**64 - 1), ("abort", 5), ("result", 9, b"\0")]


def test_junk_is_skipped_and_told(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    """The loop that reads all replies of a shard must not end with one of them."""
    for kind in (0, 1, 2, 3, 4, 9, 255):
        assert post.worker.try_push(b"junk", kind)
        assert post.worker.try_push(b"", kind)
    post.text((1, b"a", []))
    with caplog.at_level(logging.ERROR):
        assert post.inbox.do_work(100) == 15
    assert post.calls.texts == [(1, "a", [], 0, None)]
    assert post.inbox.rejected_frames == 14
    assert len(caplog.records) == 14


def test_no_more_records_than_the_limit_are_taken(post: Post) -> None:
    """An event loop that reads without end serves nobody else."""
    for request_id in range(10):
        post.text((request_id, b"a", []))
    assert post.inbox.do_work(3) == 3
    assert post.inbox.do_work(100) == 7
    assert post.inbox.do_work(100) == 0
    assert len(post.calls.texts) == 10


def test_a_chunk_that_cannot_be_ends_its_request_alone(post: Post) -> None:
    """What a receiver refuses must not cost the records behind it: they are not read again."""

    def refuse(*_: Any) -> None:
        post.calls.on_text = keep  # type: ignore[method-assign]
        raise InternalError("event is impossible in this state")

    keep = post.calls.on_text
    post.calls.on_text = refuse  # type: ignore[method-assign]
    post.text((1, b"a", []))
    post.text((2, b"b", []))
    assert post.inbox.do_work(8) == 2
    assert [row[0] for row in post.calls.texts] == [2]
    assert [request_id for request_id, _ in post.calls.fails] == [1]
