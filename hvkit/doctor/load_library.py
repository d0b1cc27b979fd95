"""A program: loads one of Horovod's libraries and prints the features it was built with, as JSON.

It runs in a process of its own because the library also loads the framework's libraries: those of
two frameworks may conflict, and loading may crash. It runs as a file and imports nothing of hvkit;
without the framework's Python part it takes half a second.
"""

import ctypes
import json
import os
import sys

_FEATURES = ("mpi", "gloo", "nccl", "ddl", "ccl", "cuda", "rocm")
_LONGEST_VERSION = 8192


def main(path: str) -> None:
    """Load the library at ``path`` as Python's import does, and print its features and MPI."""
    # RTLD_NOW reports a missing symbol here instead of in the middle of training.
    library = ctypes.CDLL(path, mode=os.RTLD_NOW)
    features = [name for name in _FEATURES if getattr(library, f"horovod_{name}_built")()]
    found = {"features": features, "mpi": _mpi_version(library) if "mpi" in features else None}
    sys.stdout.write(f"hvkit:{json.dumps(found)}\n")
    sys.stdout.flush()
    # Libraries may crash when Python unloads them in an unexpected order.
    os._exit(0)


def _mpi_version(library: ctypes.CDLL) -> str:
    text, length = ctypes.create_string_buffer(_LONGEST_VERSION), ctypes.c_int()
    library.MPI_Get_library_version(text, ctypes.byref(length))
    return text.value.decode(errors="replace")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OSError as error:
        sys.exit(str(error))
