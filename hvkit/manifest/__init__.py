"""Descriptions of a run for the systems that start it: Kubernetes and Slurm.

::

    hvkit.cli.manifest          reads the options, builds one of these, prints its text
    ├── mpijob.MPIJob           a Kubernetes resource for the MPI operator, as YAML
    ├── batch_script.SlurmJob   a script for sbatch
    └── fields                  what both consist of: size, names, amounts; each checks its text

Both start ``hvkit run``, which finds the hosts in the environment of the operator or of Slurm.
"""

from hvkit.manifest.batch_script import SlurmJob
from hvkit.manifest.fields import Size
from hvkit.manifest.mpijob import MPIJob

__all__ = ["MPIJob", "Size", "SlurmJob"]
