"""Which MPI a program or a library belongs to, as it tells itself."""

import re
from dataclasses import dataclass

# How launchers (--version) and libraries (MPI_Get_library_version) say what they are.
_FLAVOURS = (
    ("Open MPI", r"\(?(?:Open MPI|OpenRTE|PRRTE)\)? v?(\d\S*?)(?=[,\s]|$)"),
    ("Intel MPI", r"Intel\(R\) MPI Library\D*?(?:, Version)? (\d[\d.]*)"),
    ("MPICH", r"(?:HYDRA build details:\s+Version|MPICH Version):\s+(\S+)"),
)


@dataclass(frozen=True)
class MpiVersion:
    """An MPI, by name and version: ``Open MPI``, ``5.0.11``."""

    flavour: str
    version: str

    def __str__(self) -> str:
        return f"{self.flavour} {self.version}"


def identify(text: str) -> MpiVersion | None:
    """Which MPI speaks so of itself."""
    for flavour, pattern in _FLAVOURS:
        if match := re.search(pattern, text):
            return MpiVersion(flavour, match[1])
    return None
