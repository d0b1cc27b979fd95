"""How many files to compile at once: as many as there are cores, and memory for."""

import os
import re
from pathlib import Path

# The largest translation units include all of TensorFlow's or PyTorch's headers.
_BYTES_PER_JOB = 2 * 1024**3


def default_jobs() -> int:
    """The number of compile jobs that this machine takes; at least one."""
    return max(1, min(len(os.sched_getaffinity(0)), free_memory() // _BYTES_PER_JOB))


def free_memory(
    meminfo: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")
) -> int:
    """Bytes of memory that this process may still use, within its container's limit."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    free = int(available[1]) * 1024 if available else _BYTES_PER_JOB
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        free = min(free, int(text))
    return free
