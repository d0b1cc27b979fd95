"""Saving a training run and resuming it, on the same or another number of ranks."""

from hvkit.checkpoint.checkpoint import Checkpoint
from hvkit.checkpoint.progress import Progress

__all__ = ["Checkpoint", "Progress"]
