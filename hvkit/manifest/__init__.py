"""Descriptions of a run for the systems that start it: Kubernetes and Slurm.

::

    hvkit.cli.manifest          the table of options; reads them, prints one of these
    ├── mpijob                  a Kubernetes resource for the MPI operator: values for mpijob.yaml
    ├── slurm_job               a script for sbatch: values for slurm_job.sh
    └── fields                  what options accept: names, amounts; what ``hvkit run`` starts

Both start ``hvkit run``, which finds the hosts in the environment of the operator or of Slurm.
"""
