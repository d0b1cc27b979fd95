"""Lets a rank keep the memory that PyTorch frees, for the tensors of the next step.

The GNU C library returns freed memory to Linux: what exceeds 64 MiB in total, and tensors above 32
MiB at once. The next step in host memory then gets new pages from Linux, which fills each with
zeros. That takes a tenth of the step or more, and differs between processes.

TensorFlow does not need this.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping

from hvkit.host.cpus import allowance

# The parameter of mallopt, of the C library, that each variable sets.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_OPTIONS = {
    "MALLOC_TRIM_THRESHOLD_": _TRIM_THRESHOLD,
    "MALLOC_MMAP_THRESHOLD_": _MMAP_THRESHOLD,
}
_SHARE = 16
# mallopt takes a C int.
_MOST = (1 << 31) - 1
# Older versions accept no higher threshold for single tensors.
_OLDER_MOST = 1 << 25


def variables_to_keep_freed_memory(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The variables, with values, that let a rank keep a 16th of the host's memory, 2 GiB at most.

    Yields nothing if the user has configured the allocator, or with another C library.
    """
    chosen = any(name.startswith("MALLOC_") for name in environ)
    if chosen or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "") or not _is_gnu():
        return
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kept = min(min(host, allowance().memory or host) // _SHARE, _MOST)
    for variable in _OPTIONS:
        yield variable, str(kept)


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Apply the variables to this process: the C library itself reads them only at its start."""
    if not _is_gnu():
        return
    mallopt = ctypes.CDLL(None).mallopt
    for variable, option in _OPTIONS.items():
        value = environ.get(variable, "")
        if value.isdecimal() and int(value) <= _MOST:
            done = mallopt(option, int(value))
            if not done and option == _MMAP_THRESHOLD:
                mallopt(option, min(int(value), _OLDER_MOST))


def _is_gnu() -> bool:
    try:
        return "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (AttributeError, ValueError, OSError):  # not a name that this system knows
        return False
