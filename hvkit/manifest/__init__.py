"""Descriptions of a run for the systems that start it: Kubernetes and Slurm.

::

    hvkit.cli.manifest          reads the options, builds one of these, prints its text
    ├── mpijob.MPIJob           a Kubernetes resource for the MPI operator, as YAML
    ├── slurm_job.SlurmJob      a script for sbatch
    └── fields                  what both consist of: size, names, amounts; each checks its text

Both start ``hvkit run``, which finds the hosts in the environment of the operator or of Slurm.
"""

from hvkit.manifest.fields import Size
from hvkit.manifest.mpijob import MPIJob
from hvkit.manifest.slurm_job import SlurmJob

__all__ = ["MPIJob", "Size", "SlurmJob"]
