"""Wheels of Horovod: what they need of a machine, and the cache of those built here.

A build depends on much, which ``Key`` lists. The cache keeps each wheel under the key, whose digest
is part of the wheel's version, so that an installed Horovod shows which build it is.

A wheel that is built already needs less: its ``Abi``. These facts lie inside each wheel, in
``horovod/hvkit.json``, and in the index of a folder of wheels.
"""

import base64
import hashlib
import json
import os
import platform
import re
import shutil
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from packaging.tags import sys_tags

from hvkit.build.frameworks import NAMES, InstalledFramework, title
from hvkit.build.horovod_patches import PATCHES, VERSION, patches_digest
from hvkit.build.toolchain import (
    Mpi,
    Toolchain,
    cpu_features,
    rpath_of,
    run_time_paths,
    user_build_options,
)
from hvkit.errors import BuildError
from hvkit.host.system import cache_dir, run

FILE = "hvkit.json"
"""The file of the facts, in Horovod's package."""

_ARCHITECTURE = "HOROVOD_BUILD_ARCH_FLAGS"
# The first C library whose distributions have a libstdc++ with these symbols, by PEP 600: the
# numbers that auditwheel checks.
_GLIBC_OF_LIBSTDCXX = ((24, 17), (28, 31), (29, 34), (30, 35), (33, 39))
_NO_ZIP = (zipfile.BadZipFile, zlib.error, EOFError)
_EXECUTABLE = 0o100755 << 16
_LIBRARY = re.compile(r"horovod/\w+/mpi_lib[^/]*\.so")


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _maps_texts(value: Any) -> bool:
    return isinstance(value, dict) and _are_texts([*value, *value.values()])


@dataclass(frozen=True)
class Abi:
    """What the libraries of a wheel were built for, and what they need."""

    horovod: str  # the version of Horovod's source
    patches: str  # the digest of hvkit's patches
    python: str  # the ABI of Python, ``cpython-311-x86_64-linux-gnu``
    platform: str  # the platform tag of the wheel, ``manylinux_2_35_x86_64``
    cpu: tuple[str, ...]  # the instruction sets that it was compiled for
    frameworks: Mapping[str, str]  # that it has libraries for, with the versions compiled for
    mpi: str  # the file of the MPI library, ``libmpi.so.40``
    search: tuple[str, ...]  # the folders where the libraries look for MPI and NCCL first
    cuda: str | None = None  # the CUDA version of a build for NCCL; ``None`` for one without GPUs
    options: Mapping[str, str] = field(default_factory=dict)  # variables that changed the build

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Abi":
        """The facts of a parsed ``text``, which anybody may have written; else a BuildError."""
        try:
            lists = {name: tuple(facts[name]) for name in ("cpu", "search")}
            found = cls(**{**facts, **lists})
        except (TypeError, KeyError) as error:
            raise BuildError(f"facts of another version of hvkit: {error}") from error
        texts = ("horovod", "patches", "python", "platform", "mpi")
        fits = {name: isinstance(getattr(found, name), str) for name in texts}
        fits |= {name: _are_texts(values) for name, values in lists.items()}
        fits |= {
            "frameworks": _maps_texts(found.frameworks) and found.frameworks.keys() <= {*NAMES},
            "cuda": found.cuda is None or isinstance(found.cuda, str),
            "options": _maps_texts(found.options),
        }
        if wrong := [name for name, fit in fits.items() if not fit]:
            raise BuildError(f"facts of another version of hvkit: {', '.join(wrong)}")
        return found


@dataclass(frozen=True)
class Machine:
    """The software on this machine that a wheel has to fit."""

    frameworks: tuple[InstalledFramework, ...]  # the frameworks to serve
    mpi: Mpi  # the MPI that starts ranks here
    cuda: str | None  # the CUDA version that Horovod should support; ``None`` for none
    environ: Mapping[str, str]  # the environment

    def framework(self, name: str) -> InstalledFramework | None:
        return next((found for found in self.frameworks if found.name == name), None)


def abi_of(libraries: Sequence[Path], toolchain: Toolchain, environ: Mapping[str, str]) -> Abi:
    """The facts of the libraries, one for each framework, that a toolchain has built."""
    headers = [_header(library) for library in libraries]
    text = "\n".join(headers)
    options = user_build_options(environ)
    flags = options.pop(_ARCHITECTURE, None)
    cpu = cpu_features() if flags is None else sorted(re.findall(r"-m(\S+)", flags))
    mpi = re.search(r"NEEDED\s+(libmpi\S*)", text)
    return Abi(
        horovod=VERSION,
        patches=patches_digest(PATCHES),
        python=str(sysconfig.get_config_var("SOABI")),
        platform=_platform(text),
        cpu=tuple(cpu),
        frameworks={one.name: one.version for one in toolchain.frameworks},
        mpi=mpi[1] if mpi else "none",
        search=tuple(run_time_paths(toolchain, environ)),
        cuda=toolchain.cuda.version if toolchain.cuda else None,
        options=options,
    )


def misfits(abi: Abi, machine: Machine) -> list[str]:
    """Why a wheel does not fit a machine; empty if it does."""
    frameworks = (_framework(name, built, machine) for name, built in abi.frameworks.items())
    others = (_mpi(abi, machine), _gpu(abi, machine), _options(abi, machine))
    return [*_of_host(abi), *filter(None, [*frameworks, *others])]


def _of_host(abi: Abi) -> Iterator[str]:
    here, features = str(sysconfig.get_config_var("SOABI")), cpu_features()
    if abi.horovod != VERSION:
        yield f"it is Horovod {abi.horovod}, this hvkit takes {VERSION}"
    elif abi.patches != patches_digest(PATCHES):
        yield "another version of hvkit built it, with other patches"
    if abi.python != here:
        yield f"it is for Python's ABI {abi.python}, this is {here}"
    elif abi.platform not in {tag.platform for tag in sys_tags()}:
        yield f"it needs {abi.platform}, which the C library here is too old for"
    if lacking := [feature for feature in abi.cpu if feature not in features]:
        yield f"it uses {', '.join(lacking)}, which this processor lacks"


def _framework(name: str, built: str, machine: Machine) -> str | None:
    installed = machine.framework(name)
    if installed is None:
        return f"it is for {title(name)} as well, which is not installed or left out"
    distance = minors_between(built, installed.version)
    # TensorFlow's C++ interface changes with each minor version. Of PyTorch's, what Horovod uses
    # was the same in neighbouring ones; the self-test then shows whether it still is.
    allowed = {"pytorch": 1, "tensorflow": 0}[name]
    if distance is None or distance > allowed:
        return f"it is for {title(name)} {built}, and {installed.version} is installed"
    return None


def minors_between(one: str, other: str) -> int | None:
    """How many minor versions lie between two versions; ``None`` if the major ones differ."""
    first, second = (re.match(r"(\d+)\.(\d+)", version) for version in (one, other))
    if first is None or second is None or first[1] != second[1]:
        return None
    return abs(int(first[2]) - int(second[2]))


def _mpi(abi: Abi, machine: Machine) -> str | None:
    mpi = machine.mpi
    if not (mpi.library_dir / abi.mpi).exists():
        return f"it needs {abi.mpi}, which {mpi} does not have"
    origin = Path(sysconfig.get_path("platlib")) / "horovod" / "torch"
    named = machine.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    folders = [*filter(None, named), *(p.replace("$ORIGIN", str(origin)) for p in abi.search)]
    for folder in map(os.path.realpath, folders):
        if os.path.exists(os.path.join(folder, abi.mpi)):
            right = folder == os.path.realpath(mpi.library_dir)
            return None if right else f"it would load the MPI in {folder} instead of {mpi}"
    if rpath_of(mpi) is not None:
        return f"it would not find {mpi}: set LD_LIBRARY_PATH to {mpi.library_dir}"
    return None


def _gpu(abi: Abi, machine: Machine) -> str | None:
    if machine.cuda and not abi.cuda:
        return "it is built without NCCL"
    if abi.cuda and not machine.cuda:
        return "it is built for NCCL"
    if abi.cuda and machine.cuda and abi.cuda.split(".")[0] != machine.cuda.split(".")[0]:
        return f"it is built for CUDA {abi.cuda}, the frameworks here for {machine.cuda}"
    return None


def _options(abi: Abi, machine: Machine) -> str | None:
    here = user_build_options(machine.environ)
    names = [n for n in sorted({*here, *abi.options}) if here.get(n) != abi.options.get(n)]
    why = "the environment changes the build, and it was built with other values"
    return f"{why}: {', '.join(names)}" if names else None


def _header(library: Path) -> str:
    output = run(["objdump", "-p", str(library)], timeout=60)
    if output is None or output.status != 0:
        raise BuildError(
            f"`objdump -p {library}` fails, which shows what a library needs. It is a part of "
            "binutils (Debian and Ubuntu: `apt install binutils`)"
        )
    return output.stdout


def _platform(header: str) -> str:
    """The platform tag: the oldest C library, and libstdc++, that have what the libraries need."""
    machine = sysconfig.get_platform().rpartition("-")[2]
    glibc = max((int(minor) for minor in re.findall(r"\bGLIBC_2\.(\d+)", header)), default=17)
    needed = max((int(minor) for minor in re.findall(r"\bGLIBCXX_3\.4\.(\d+)", header)), default=0)
    # A compiler may be newer than any distribution's with this C library.
    its_glibc = next((libc for cxx, libc in _GLIBC_OF_LIBSTDCXX if needed <= cxx), 10**6)
    tag = f"manylinux_2_{max(glibc, its_glibc)}_{machine}"
    return tag if tag in {each.platform for each in sys_tags()} else f"linux_{machine}"


def facts_of(wheel: Path) -> Abi:
    """The facts inside a wheel."""
    try:
        with zipfile.ZipFile(wheel) as opened:
            return Abi.of(json.loads(opened.read(f"horovod/{FILE}")))
    # Of zipfile, too: NotImplementedError and RuntimeError, which RecursionError is as well.
    except (OSError, LookupError, ValueError, RuntimeError, *_NO_ZIP) as error:
        raise BuildError(f"{wheel} is no wheel of Horovod from hvkit: {error}") from error


def with_facts(wheel: Path, toolchain: Toolchain, environ: Mapping[str, str]) -> Path:
    """Put the facts of a fresh build into its wheel, and its platform into the wheel's tag.

    The wheel is replaced by the one that is returned, in the same folder.
    """
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as opened:
        members = {name: opened.read(name) for name in opened.namelist() if name[-1] != "/"}
        libraries = [Path(opened.extract(n, folder)) for n in filter(_LIBRARY.fullmatch, members)]
        abi = abi_of(libraries, toolchain, environ)
    about = next(name for name in members if name.endswith(".dist-info/WHEEL"))
    python = re.search(rb"^Tag: ([^-]+-[^-]+)-", members[about], re.MULTILINE)
    assert python is not None
    tag = f"{python[1].decode()}-{abi.platform}"
    members[about] = re.sub(rb"(?m)^Tag: .*$", b"Tag: " + tag.encode(), members[about])
    members[f"horovod/{FILE}"] = abi.text.encode()
    record = about.removesuffix("WHEEL") + "RECORD"
    members.pop(record, None)
    listed = [f"{name},sha256={_hash(data)},{len(data)}" for name, data in members.items()]
    members[record] = "\n".join([*listed, f"{record},,", ""]).encode()
    wheel.unlink()
    name, version, *_ = wheel.name.split("-")
    path = wheel.with_name(f"{name}-{version}-{tag}.whl")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as written:
        for name, data in members.items():
            # Without times, so that the same files make the same wheel.
            member = zipfile.ZipInfo(name)
            member.external_attr = _EXECUTABLE if _LIBRARY.fullmatch(name) else 0o100644 << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            written.writestr(member, data)
    return path


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@dataclass(frozen=True)
class Key:
    """Everything that a wheel was built from, by name, as readable text."""

    ingredients: Mapping[str, str]

    @property
    def digest(self) -> str:
        """A short hash of all the ingredients."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @property
    def version(self) -> str:
        """Horovod's version, with the digest as its local part."""
        return f"{VERSION}+hvkit{self.digest}"

    @property
    def text(self) -> str:
        return json.dumps(dict(self.ingredients), indent=2) + "\n"


def key_of(toolchain: Toolchain, environ: Mapping[str, str] = os.environ) -> Key:
    """The key of the wheel that this toolchain builds."""
    mpi, compiler = toolchain.mpi, toolchain.compiler
    return Key(
        {
            "horovod": VERSION,
            "patches": patches_digest(PATCHES),
            "python": str(sysconfig.get_config_var("SOABI")),
            "platform": sysconfig.get_platform(),
            "libc": " ".join(platform.libc_ver()),
            "cpu": " ".join(cpu_features()),
            **{name: _framework_version(toolchain, name) for name in NAMES},
            "mpi": f"{mpi.flavour} {mpi.version}",
            "compiler": " ".join([compiler.version.partition("\n")[0], *compiler.command[1:]]),
            "gpu": f"NCCL, CUDA {toolchain.cuda.version}" if toolchain.cuda else "none",
            "run-time paths": ":".join(run_time_paths(toolchain, environ)),
            **user_build_options(environ),
        }
    )


def _framework_version(toolchain: Toolchain, name: str) -> str:
    return framework.version if (framework := toolchain.framework(name)) else "none"


def wheels_dir() -> Path:
    folder = cache_dir() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def find_wheel(key: Key) -> Path | None:
    """The cached wheel with this key; ``None`` if there is none."""
    return next(wheels_dir().glob(f"horovod-{key.version}-*.whl"), None)


def store_wheel(wheel: Path, key: Key) -> Path:
    """Copy a wheel into the cache, with its ingredients; it appears completely or not at all."""
    target = wheels_dir() / wheel.name
    ingredients = target.with_suffix(".json")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        text = Path(folder, ingredients.name)
        text.write_text(key.text)
        os.replace(text, ingredients)
        os.replace(shutil.copyfile(wheel, Path(folder, wheel.name)), target)
    return target


def stored_ingredients(version: str) -> dict[str, str] | None:
    """The ingredients of a wheel that this cache has, or had, by the wheel's version."""
    file = next((cache_dir() / "wheels").glob(f"horovod-{version}-*.json"), None)
    ingredients: dict[str, str] | None = json.loads(file.read_text()) if file else None
    return ingredients


def lock(key: Key, when_waiting: Callable[[], None]) -> AbstractContextManager[object]:
    """Keep other processes of this user from building and installing the same wheel."""
    file = FileLock(wheels_dir() / f"{key.digest}.lock")
    try:
        return file.acquire(blocking=False)
    except Timeout:
        when_waiting()
        return file.acquire()
