"""Descriptions of a run for the systems that start it: Kubernetes and Slurm."""

from hvkit.manifest.mpijob import MPIJob
from hvkit.manifest.size import Size
from hvkit.manifest.slurm import SlurmJob

__all__ = ["MPIJob", "Size", "SlurmJob"]
