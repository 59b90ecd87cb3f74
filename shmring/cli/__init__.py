"""The command `shmring`: what goes on in the rings of this machine, without touching who uses them.

Everything is read through read-only mappings; `sweep` alone changes something, and only what
dead owners left behind.
"""

from shmring.cli.command import main

__all__ = ["main"]
