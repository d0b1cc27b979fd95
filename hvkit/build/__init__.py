"""Builds and installs Horovod for the installed frameworks and MPI.

::

    installer               does nothing, installs a wheel that is there, or builds one
    ├── ready_wheels        wheels in a folder or behind an https URL, and which of them fit
    │   └── abi             what a built Horovod needs of a machine, and whether it is there
    ├── toolchain           finds MPI, the C++ compiler and CMake; the variables of Horovod's build
    │   ├── frameworks      finds PyTorch and TensorFlow
    │   └── cuda            finds GPUs, and a CUDA toolkit for a build for NCCL
    ├── wheels              the facts inside a wheel; two joined; the cache of those built here
    └── builder             source -> patches -> compilation -> wheel
        ├── horovod_patches applies the changes to Horovod's source that are in patches/
        └── build_output    progress and causes of failure, from what the build prints
"""

from hvkit.build.installer import BuildOptions, install_horovod

__all__ = ["BuildOptions", "install_horovod"]
