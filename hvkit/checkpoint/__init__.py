"""Saving a training run and resuming it, on the same or another number of ranks."""

from hvkit.checkpoint.checkpoint import Checkpoint, Progress

__all__ = ["Checkpoint", "Progress"]
