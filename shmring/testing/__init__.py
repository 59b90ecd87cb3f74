"""For tests, ours and those of our users: states of a ring that are hard to come by, on demand.

A full ring (`fill`), a dead peer (`lose_producer`, `lose_consumer`), a stuck one (`stuck_consumer`),
a damaged segment (`damage`), positions about to pass 2**32 or 2**64 (`ring_at`). Two programs
besides, each replayable by its seed:

    python -m shmring.testing chaos --kills 300    # ends killed at random moments; nothing is lost
    python -m shmring.testing fuzz --count 20000   # damaged segments; nothing but errors comes of it
"""

from shmring.testing.states import damage, fill, lose_consumer, lose_producer, ring_at, stuck_consumer

__all__ = ["damage", "fill", "lose_consumer", "lose_producer", "ring_at", "stuck_consumer"]
