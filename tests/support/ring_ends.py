"""What tests of rings do with the ends again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import shmring


def take_all(consumer: shmring.Consumer) -> list[bytes]:
    """Every record that is there."""
    records = []
    while (record := consumer.try_pop()) is not None:
        records.append(record)
    return records
