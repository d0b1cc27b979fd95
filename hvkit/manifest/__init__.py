"""Descriptions of a run for the systems that start it: Kubernetes, Slurm, SageMaker and Azure ML.

::

    hvkit.cli.manifest          reads the options, prints one of these
    └── cli.manifest_options    the one table of options
        ├── mpijob              a Kubernetes resource for the MPI operator: mpijob.yaml
        ├── trainjob            two for the Kubeflow Trainer: trainjob.yaml
        │   └── kubernetes      what these have in common: values, and YAML
        ├── kubernetes_fields   what their options accept: secrets, labels, taints
        ├── slurm_job           a script for sbatch: slurm_job.sh
        ├── sagemaker           a request for Amazon SageMaker
        ├── azureml             a command job for Azure Machine Learning
        └── fields              what options accept: names, amounts; what ``hvkit run`` starts

All but Azure ML's start ``hvkit run``, which finds the hosts in its environment. Azure starts
``mpirun``.
"""
