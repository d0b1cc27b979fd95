"""The patches that hvkit applies to Horovod's source.

``patches/`` holds one unified diff for each reason to change Horovod, applied in the order of their
numbers. The paragraphs on top of each say what it changes, why (what goes wrong without it), and
the upstream issue or cause.

They are applied by this module, because a machine that builds Horovod need not have ``patch`` or
``git``. The packages that apply diffs are not strict: whatthepatch accepts a hunk that has lost its
last lines, and patch-ng a file that is patched already.
"""

import hashlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hvkit.build.toolchain import Toolchain
from hvkit.errors import BuildError

VERSION = "0.28.1"
"""The Horovod release that the patches fit."""

PATCHES = Path(__file__).parent / "patches"
"""The folder of the patches."""

XLA_OPS = "horovod/tensorflow/xla_mpi_ops.cc"


def tensorflow_lacks_xla_headers(toolchain: Toolchain, source: Path) -> bool:
    """Whether TensorFlow lacks headers that ``xla_mpi_ops.cc`` includes.

    Runs the preprocessor, because a header that exists may include one that does not (TensorFlow
    2.21: ``highwayhash``).
    """
    tensorflow = toolchain.framework("tensorflow")
    if tensorflow is None:
        return False
    text = (source / XLA_OPS).read_text(encoding="utf-8")
    included = re.findall(r'^#include "tensorflow/.*"$', text, re.MULTILINE)
    headers = tensorflow.location / "tensorflow" / "include"
    command = [*toolchain.compiler.command, "-std=c++17", "-E", "-x", "c++", f"-I{headers}", "-"]
    done = subprocess.run(
        command,
        input="\n".join(included),
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return done.returncode != 0


CONDITIONS = {"02-no-xla-ops.patch": tensorflow_lacks_xla_headers}
"""The conditions of the patches that not every build needs."""


@dataclass(frozen=True)
class Hunk:
    """One place that a patch changes."""

    file: str  # relative to the root of the source
    number: int  # which hunk of this file it is, from 1
    line: int  # from 1, at which it begins in the changed file
    old: list[str]
    new: list[str]


def apply_patches(folder: Path, source: Path, toolchain: Toolchain) -> list[str]:
    """Apply the patches in ``folder`` that this build needs, in order, and return their names."""
    needed = [
        patch
        for patch in find_patches(folder)
        if patch.name not in CONDITIONS or CONDITIONS[patch.name](toolchain, source)
    ]
    for patch in needed:
        for hunk in read_hunks(patch):
            _apply(hunk, patch, source / hunk.file)
    return [patch.name for patch in needed]


def find_patches(folder: Path) -> list[Path]:
    """The patches in ``folder``, in the order in which they apply."""
    patches = sorted(folder.glob("*.patch"))
    if not patches:
        raise BuildError(f"no patches of Horovod in {folder}: install hvkit again")
    return patches


def patches_digest(folder: Path) -> str:
    """A fingerprint of all that the patches in ``folder`` change, whatever their reasons."""
    diffs = [split_reasons(patch)[1] for patch in find_patches(folder)]
    return hashlib.sha256(repr(diffs).encode()).hexdigest()[:16]


def split_reasons(patch: Path) -> tuple[str, str]:
    """The paragraphs on top of a patch, and the diff below them."""
    text = patch.read_text(encoding="utf-8")
    diff = re.search(r"^(diff |--- a/)", text, re.MULTILINE)
    if not diff or not diff.start():
        raise BuildError(f"{patch}: not a text with reasons and, below it, a diff")
    return text[: diff.start()].rstrip(), text[diff.start() :]


def read_hunks(patch: Path) -> list[Hunk]:
    """The hunks of a patch, in order."""
    hunks: list[Hunk] = []
    file, number = "", 0
    lines = iter(split_reasons(patch)[1].removesuffix("\n").split("\n"))
    for line in lines:
        if line.startswith("--- a/"):
            file, number = line.removeprefix("--- a/").partition("\t")[0], 0
        elif match := re.match(r"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", line):
            number += 1
            hunk = Hunk(file, number, int(match[2]), [], [])
            while (len(hunk.old), len(hunk.new)) != (int(match[1] or 1), int(match[3] or 1)):
                line = next(lines, "")
                if line[:1] not in (" ", "-", "+"):
                    raise _fault(patch, file, number, f"does not have as many lines as {match[0]}")
                if line[0] != "+":
                    hunk.old.append(line[1:])
                if line[0] != "-":
                    hunk.new.append(line[1:])
            if not hunk.old or not hunk.new:
                raise _fault(patch, file, number, "has no line that stays, to find its place by")
            hunks.append(hunk)
        elif not line.startswith(("diff ", "index ", "+++ b/")):
            raise _fault(patch, file, number, f"is followed by {line!r}, which is no diff")
    return hunks


def _apply(hunk: Hunk, patch: Path, path: Path) -> None:
    if not path.is_file():
        raise _fault(patch, hunk.file, hunk.number, "is for a file that is not in the source")
    lines = path.read_bytes().decode().split("\n")
    start = hunk.line - 1
    end = start + len(hunk.old)
    for number, expected in enumerate(hunk.old, start):
        found = lines[number] if number < len(lines) else None
        if found != expected:
            problem = f"expects {expected!r} in line {number + 1}, found {found!r}"
            raise _fault(patch, hunk.file, hunk.number, problem)
    lines[start:end] = hunk.new
    path.write_bytes("\n".join(lines).encode())


def _fault(patch: Path, file: str, hunk: int, problem: str) -> BuildError:
    return BuildError(
        f"patch {patch.name}, {file}: hunk {hunk} {problem}. The patches fit the official "
        f"Horovod {VERSION} only; report this as a fault of hvkit"
    )
