"""Commands on the hosts of a Slurm allocation, where ssh may be forbidden: Slurm's own ``srun``."""

import shutil
from collections.abc import Sequence

from hvkit.launch.hosts import Host
from hvkit.launch.ssh import RemoteShell

# srun exports all there is otherwise, secrets among it.
_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME")
_ERROR = "srun: error:"


def srun() -> RemoteShell | None:
    """What takes commands to hosts by ``srun``; ``None`` if there is none on PATH."""
    return RemoteShell(_command, _explain) if shutil.which("srun") else None


def _command(host: Host, command: Sequence[str], timeout: float) -> list[str]:
    # The step may share the cores with others, such as the batch script that this runs in.
    export = "--export=" + ",".join(_EXPORTED)
    one_task = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}"]
    return ["srun", "--quiet", export, *one_task, *command]


def _explain(host: Host, status: int | None, stderr: str) -> str | None:
    errors = [line for line in stderr.splitlines() if line.startswith(_ERROR)]
    # srun also tells so of a command that ended badly: then its host has been reached.
    if status == 0 or not errors or any("Exited with exit code" in line for line in errors):
        return None
    return f"Slurm starts nothing there ({errors[0].removeprefix(_ERROR).strip()}): ask `sinfo -R`"
