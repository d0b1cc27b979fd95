"""Horovod, built for the frameworks that are installed and for the MPI that is found.

From the command line to the binary::

    installer         what to do: nothing, install the cached wheel, or build it
    ├── toolchain     what is on this machine: frameworks, mpi, compilers
    ├── cuda          NVIDIA's GPUs, and the toolkit to build for NCCL with
    ├── key           everything that changes the binary; the name of its wheel
    ├── wheels        the cache, and its lock
    ├── builder       source -> edits (horovod_edits) -> cmake, environment -> wheel
    └── installed     pip, and a check that the result imports
"""

from hvkit.build.installer import Options, install_horovod

__all__ = ["Options", "install_horovod"]
