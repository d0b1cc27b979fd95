"""The files that are a host's own: ``/etc``, ``/run``, ``/dev/shm``, ``/proc`` and ``/sys``."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rig.errors import RigError
from rig.namespaces import Namespaces

# In memory, below a /run that the switch has of its own; hosts see them until they get a /run, too.
_LAYERS = Path("/run/layers")
# The home that hosts with the machine's files share, so that nobody's own is read or written.
HOME = Path("/run/home")
# Each host's own. In the machine's /tmp, programs that name files after process ids would meet
# their like of other hosts, where small ids are in use, too.
TMPDIR = Path("/run/tmp")
_MACHINE = Path("/")


@dataclass(frozen=True)
class File:
    """A file that a host is given.

    Attributes:
        text: what is in it.
        mode: who may read and write it.
        owner: user id.
    """

    text: str
    mode: int = 0o644
    owner: int = 0


@dataclass(frozen=True)
class Image:
    """The file system that every host has, in place of the machine's; what hosts write is lost.

    Attributes:
        folder: the file system.
        binds: what to see of the machine, read-only: absolute path there by path on the machine.
    """

    folder: Path = _MACHINE
    binds: Mapping[str, str] = field(default_factory=dict)


def make_room(switch: Namespaces) -> None:
    """Make the file system in memory that hosts' files are kept in."""
    _mount(switch, "-t", "tmpfs", "tmpfs", "/run")
    switch.call(["mkdir", str(_LAYERS), str(HOME)])


def give_machine(host: Namespaces, name: str, files: Mapping[str, File], owner: int) -> None:
    """Let a host use the machine's files, but with a ``/etc`` and the like of its own.

    Args:
        host: the host.
        name: its name.
        files: what differs from the machine's: absolute paths, all below ``/etc``.
        owner: user id of whom ``HOME`` belongs to.
    """
    layer = _prepared(host, name, files)
    _overlay(host, Path("/etc"), layer, "etc", Path("/etc"))
    host.call(["chown", str(owner), str(HOME)])
    host.call(["mkdir", str(layer / "run/home")])
    host.call(["mkdir", "--mode=1777", str(layer / "run/tmp")])
    _mount(host, "--bind", str(HOME), str(layer / "run/home"))
    _give_own(host, layer, _MACHINE)


def give_image(host: Namespaces, name: str, files: Mapping[str, File], image: Image) -> None:
    """Give a host the files of an image.

    Args:
        host: the host.
        name: its name.
        files: what differs from the image's: absolute paths.
        image: the image.

    Raises:
        RigError: something of the image is not there.
    """
    layer = _prepared(host, name, files)
    root = layer / "root"
    _overlay(host, image.folder, layer, "", root)
    host.call(["mkdir", "-p", *(str(root / folder) for folder in ("dev", "proc", "run", "sys"))])
    _mount(host, "--rbind", "/dev", str(root / "dev"))
    _mount(host, "-t", "proc", "proc", str(root / "proc"))
    for source, target in image.binds.items():
        _bind(host, Path(source), root / target.lstrip("/"))
    _give_own(host, layer, root)
    become_root = 'cd "$1" && pivot_root . . && umount --lazy .'
    host.call(["sh", "-c", become_root, "sh", str(root)])


def _prepared(host: Namespaces, name: str, files: Mapping[str, File]) -> Path:
    layer = _LAYERS / name
    parts = ("upper/etc", "work", "root", "sys", "run")
    host.call(["mkdir", "-p", *(str(layer / part) for part in parts)])
    _mount(host, "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(layer / "run"))
    host.call(["mkdir", str(layer / "run/sshd")])
    # By way of the host's mounts; in a new folder, where no link leads out to the machine.
    upper = Path(f"/proc/{host.pid}/root") / str(layer / "upper").lstrip("/")
    for path, file in files.items():
        _write(upper / path.lstrip("/"), file)
    return layer


def _write(path: Path, file: File) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(file.text)
    os.chown(path, file.owner, 0)
    path.chmod(file.mode)


def _overlay(host: Namespaces, lower: Path, layer: Path, part: str, target: Path) -> None:
    folders = f"lowerdir={lower},upperdir={layer / 'upper' / part},workdir={layer / 'work'}"
    _mount(host, "-t", "overlay", "-o", folders, "overlay", str(target))


def _bind(host: Namespaces, source: Path, target: Path) -> None:
    if not source.exists():
        raise RigError(f"binds: {source} is not on this machine")
    if source.is_dir():
        host.call(["mkdir", "-p", str(target)])
    else:
        host.call(["mkdir", "-p", str(target.parent)])
        host.call(["touch", str(target)])
    _mount(host, "--bind", str(source), str(target))
    _mount(host, "-o", "remount,bind,ro", str(target))


def _give_own(host: Namespaces, layer: Path, root: Path) -> None:
    _mount(host, "-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(root / "dev/shm"))
    # What is below /sys/class/net belongs to the network that mounts it.
    sys = layer / "sys"
    _mount(host, "-t", "sysfs", "sysfs", str(sys))
    _mount(host, "--rbind", "/sys/fs/cgroup", str(sys / "fs/cgroup"))
    _mount(host, "--move", str(sys), str(root / "sys"))
    # Last, since the layers are out of sight below it.
    _mount(host, "--move", str(layer / "run"), str(root / "run"))


def _mount(inside: Namespaces, *arguments: str) -> None:
    # Without a note of it below /run, which a move to there would hide.
    inside.call(["mount", "--no-mtab", *arguments])
