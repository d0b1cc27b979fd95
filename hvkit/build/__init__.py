"""Builds and installs Horovod for the installed frameworks and MPI.

::

    installer               does nothing, installs a wheel that is there, or builds one
    ├── ready_wheels        wheels in a folder or behind an https URL, and which of them fit
    ├── toolchain           finds MPI, the C++ compiler and CMake; the variables of Horovod's build
    │   ├── frameworks      finds PyTorch and TensorFlow
    │   └── cuda            finds GPUs, and a CUDA toolkit for a build for NCCL
    ├── wheels              what a wheel needs of a machine; the cache of those built here
    └── builder             source -> patches -> compilation -> wheel
        ├── horovod_patches applies the changes to Horovod's source that are in patches/
        └── build_output    progress and causes of failure, from what the build prints
"""

from hvkit.build.installer import BuildOptions, install_horovod

__all__ = ["BuildOptions", "install_horovod"]
