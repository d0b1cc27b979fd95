"""Loads one of Horovod's libraries and prints what it was built with, as JSON.

A program of its own, run as a file: the library brings a framework's with it, some of which do
not go together in one process, and one that does not fit may crash. Without the framework's Python
part that takes half a second.
"""

import ctypes
import json
import os
import sys

_FEATURES = ("mpi", "gloo", "nccl", "ddl", "ccl", "cuda", "rocm")
_LONGEST_VERSION = 8192


def main(path: str) -> None:
    """Load the library at ``path`` as Python itself does, and print."""
    # RTLD_NOW: a symbol that is missing is told here, not in the middle of training.
    library = ctypes.CDLL(path, mode=os.RTLD_NOW)
    features = [name for name in _FEATURES if getattr(library, f"horovod_{name}_built")()]
    answer = {"features": features, "mpi": _mpi_version(library) if "mpi" in features else None}
    sys.stdout.write(f"hvkit:{json.dumps(answer)}\n")
    sys.stdout.flush()
    # Libraries that are torn down in an order that they do not expect crash.
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
