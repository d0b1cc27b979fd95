"""The user that commands run as and that ssh logs in."""

import re
from dataclasses import dataclass
from pathlib import Path

from rig.errors import RigError
from rig.files import File


@dataclass(frozen=True)
class User:
    """A user of a host.

    Attributes:
        name: the user's name.
        uid: user id.
        gid: id of the user's first group.
        home: home folder.
    """

    name: str
    uid: int
    gid: int
    home: str


def user(name: str, root: Path) -> User:
    """The user of this name in the file system below ``root``.

    Raises:
        RigError: there is none.
    """
    for line in _passwd(root).splitlines():
        fields = line.split(":")
        if fields[0] == name:
            return User(name, int(fields[2]), int(fields[3]), fields[5])
    raise RigError(f"user: {name!r} is not in {root / 'etc/passwd'}")


def files(user: User, root: Path) -> dict[str, File]:
    """What has to differ from the files below ``root`` for ssh to let this user into ``user.home``.

    A user without a password is often marked with ``!``, which ``sshd`` without PAM takes for
    "not by any means".
    """
    start = f"^{re.escape(user.name)}:"
    home = re.compile(f"({start}(?:[^:]*:){{4}})[^:]*", re.MULTILINE)
    locked = re.compile(f"({start})!+", re.MULTILINE)
    shadow = (root / "etc/shadow").read_text()
    return {
        "/etc/passwd": File(home.sub(rf"\g<1>{user.home}", _passwd(root))),
        "/etc/shadow": File(locked.sub(r"\g<1>*", shadow), 0o600),
    }


def _passwd(root: Path) -> str:
    return (root / "etc/passwd").read_text()
