"""Splitting data among ranks: ``hvkit.shard``."""

from hvkit.data.shard import shard

__all__ = ["shard"]
