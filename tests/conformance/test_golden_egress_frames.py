"""Every kept record of an egress ring: its bytes, and what a manager hears of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import egress_frames
import numpy as np
import pytest
from tokenizers import Tokenizer

import shmring
from manager import messages
from manager.detokenize import DecoderKind, load_decoder
from manager.inbox import Inbox
from manager.shard import DetokShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from manager.errors import ManagerError
    from manager.extras import Extras
    from manager.finish import FinishReason

#: Every byte is an id of its own.
TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[1] / "data/detok/bytelevel_tiny.json"))
NAMES = egress_frames.names()
SOUND = [name for name in NAMES if not name.startswith("bad_")]


class Listener:
    """A worker, and a manager that writes down what it hears."""

    def __init__(self, name: str, kind: DecoderKind) -> None:
        self._ends = contextlib.ExitStack()
        enter = self._ends.enter_context
        egress, register, reply = (enter(shmring.create(f"{name}.{ring}", 1 << 16)) for ring in "egr")
        self.scheduler = enter(egress.producer())
        self._manager = enter(register.producer())
        self._inbox = Inbox(enter(reply.consumer(poison=True)), self)
        self.shard = DetokShard(
            egress=enter(egress.consumer(poison=True)),
            register=enter(register.consumer()),
            reply=enter(reply.producer()),
            decoder=load_decoder(TOKENIZER, kind=kind),
        )
        self.heard: list[dict[str, Any]] = []

    def close(self) -> None:
        self._ends.close()

    def open(self, request_ids: list[int], *, want_texts: bool, prompt: list[int]) -> None:
        count = len(request_ids)
        assert messages.REGISTER.push(
            self._manager,
            count,
            np.array(request_ids, np.uint64),
            np.array([(0, True, True, False, want_texts)] * count, messages.OUTPUT_DTYPE),
            np.full(count, len(prompt), np.uint32),
            np.array(prompt * count, np.int32),
            *messages.pack_bytes([b""] * count),
        )

    def work(self) -> None:
        while self.shard.do_work(8) or self._inbox.do_work(8):
            pass

    def on_text(
        self, request_id: int, text: str, token_ids: list[int], count: int, reason: FinishReason | None
    ) -> None:
        self.heard.append(
            {
                "text": text,
                "request": request_id,
                "token_ids": token_ids,
                "completion_tokens": count,
                "finish_reason": None if reason is None else reason.to_mapping(),
            }
        )

    def on_extras(self, request_id: int, extras: Extras) -> None:
        families: dict[str, Any] = {name: part for name, part in vars(extras.logprobs).items() if part}
        if extras.hidden_states:
            families["hidden_states"] = [state.tolist() for state in extras.hidden_states]
        self.heard.append({"extras": families, "request": request_id})

    def on_fail(self, request_id: int, error: ManagerError) -> None:
        self.heard.append({"fail": str(error), "request": request_id, "status": error.status})

    def on_abort_asked(self, request_id: int) -> None:
        self.heard.append({"abort": request_id})

    def on_result(self, control_id: int, payload: bytes) -> None:
        self.heard.append({"result": payload.hex(), "control": control_id})


@pytest.fixture(params=DecoderKind, ids=lambda kind: kind.value)
def listener(ring_name: str, request: pytest.FixtureRequest) -> Iterator[Listener]:
    made = Listener(ring_name, request.param)
    yield made
    made.close()


def plain(value: Any) -> Any:
    """As JSON has it: lists for tuples."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def shortened(heard: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was heard, with texts cut where the file has only their beginning."""
    short = [dict(event) for event in heard]
    for event, pattern in zip(short, wanted, strict=False):
        beginning = str(pattern.get("fail", "")).removesuffix("...")
        if str(pattern.get("fail", "")).endswith("...") and str(event.get("fail", "")).startswith(beginning):
            event["fail"] = pattern["fail"]
    return short


def test_the_frames_are_there() -> None:
    """Frames that are not found test nothing."""
    assert len(SOUND) >= 18
    assert len(NAMES) - len(SOUND) >= 30
    assert {path.stem for path in egress_frames.FOLDER.glob("*.hex")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_kept_record_is_heard_as_its_file_says(listener: Listener, name: str) -> None:
    """A scheduler of last month is understood; a bad record is rejected whole, and nobody hangs for it."""
    described = egress_frames.describe(name)
    is_bad = "named" in described
    listener.open(
        described["open"],
        want_texts=described.get("want_texts", False),
        prompt=described.get("prompt", []),
    )
    record = egress_frames.golden_bytes(name)
    assert listener.scheduler.try_push(record, described["record_type"], described["flags"])
    listener.work()
    assert plain(shortened(listener.heard, described["heard"])) == described["heard"]
    counters = listener.shard.counters
    assert counters.rejected_frames == is_bad
    # what counts as a sign of life is a batch that was taken, and nothing else
    assert counters.batches == (not is_bad and described["record_type"] == messages.EgressType.BATCH)
    if is_bad:
        assert messages.recover_request_ids(record) == described["named"]
        failed = [event["request"] for event in described["heard"] if "fail" in event]
        assert listener.shard.open_count == len(set(described["open"]) - set(failed))
    # the loop lives
    listener.heard.clear()
    listener.open([1000], want_texts=False, prompt=[])
    assert listener.scheduler.try_push(_a_last_row(), messages.EgressType.BATCH)
    listener.work()
    assert [event["text"] for event in listener.heard] == ["z"]


def _a_last_row() -> bytes:
    columns = {
        "request_ids": [1000],
        "token_counts": [1],
        "token_ids": [ord("z")],
        "finish_codes": [3],
        "finish_values": [1],
    }
    return egress_frames.frame_bytes({"schema": "batch", "rows": 1, "columns": columns})


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_are_what_the_layouts_document_makes_of_the_description(name: str) -> None:
    """Or the description explains other bytes than those that are kept."""
    assert egress_frames.frame_bytes(egress_frames.describe(name)) == egress_frames.golden_bytes(name)


@pytest.mark.parametrize("name", SOUND)
def test_what_is_written_today_is_what_was_kept(ring_name: str, name: str) -> None:
    """A worker of last month understands a scheduler of today."""
    described = egress_frames.describe(name)
    schema = egress_frames.SCHEMAS[described["schema"]]
    assert schema.record_type == described["record_type"]
    columns = [
        egress_frames.column_of(schema, column, described["columns"][column])
        if column in described["columns"]
        else None
        for column in schema.names
    ]
    with shmring.create(ring_name, 4096) as ring, ring.producer() as producer, ring.consumer() as consumer:
        assert schema.push(producer, described["rows"], *columns, flags=described["flags"])
        [record] = consumer.drain(1)
        written = bytes(record)
    golden = egress_frames.golden_bytes(name)
    assert len(written) == len(golden)
    assert egress_frames.without_padding(written) == egress_frames.without_padding(golden)
