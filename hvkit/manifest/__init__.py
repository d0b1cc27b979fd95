"""Descriptions of a run for the systems that start it: Kubernetes, Slurm, SageMaker and Azure ML.

::

    hvkit.cli.manifest    the one table of options; prints one of these
    ├── fields            what options accept: names, amounts, secrets, volumes
    └── systems           what each system refuses; fills in its template: ``templates/*.j2``, or a
                          cluster's own

All but Azure ML's start ``hvkit run``, which finds the hosts in its environment. Azure starts
``mpirun``.
"""
