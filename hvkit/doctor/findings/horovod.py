"""A Horovod that is missing, or was built for something else."""

from collections.abc import Iterator

from hvkit.doctor.findings.finding import Finding, note, problem
from hvkit.doctor.horovod import Horovod, Library
from hvkit.doctor.packages import Packages

_TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
_BUILD = "`hvkit install-horovod`"


def horovod_findings(horovod: Horovod, packages: Packages) -> Iterator[Finding]:
    """What is wrong with Horovod."""
    installed = {name: version for name in _TITLES if (version := packages.versions[name])}
    if not installed:
        # There is nothing to build Horovod for, which is told already.
        return
    if horovod.version is None:
        yield problem("Horovod is not installed", _build(horovod))
        return
    yield from _left_out(horovod, installed)
    wrong = [found for one in horovod.libraries for found in _library(one, horovod, installed)]
    yield from wrong
    if horovod.fits is False and not wrong:
        yield note(
            f"this Horovod is not the build that hvkit would make now ({_since(horovod)})",
            f"{_BUILD} rebuilds it; as long as the self-test passes, nothing has to be done",
        )


def _build(horovod: Horovod) -> str:
    if horovod.cannot_build is None:
        return _BUILD
    return f"{_BUILD}, after this is mended: {' '.join(horovod.cannot_build.split())}"


def _since(horovod: Horovod) -> str:
    return "; ".join(horovod.differences) or "another MPI, compiler, hvkit or build option"


def _left_out(horovod: Horovod, installed: dict[str, str]) -> Iterator[Finding]:
    built = [_TITLES[one.framework] for one in horovod.libraries]
    for name, version in installed.items():
        if _TITLES[name] not in built:
            whom = f"{' and '.join(built)} alone" if built else "no framework"
            yield problem(
                f"Horovod is built for {whom}, but {_TITLES[name]} {version} is installed",
                f"{_build(horovod)} builds it for all that is installed; if you do not train "
                f"with {_TITLES[name]}, uninstall it",
            )


def _library(library: Library, horovod: Horovod, installed: dict[str, str]) -> Iterator[Finding]:
    title = _TITLES[library.framework]
    version = installed.get(library.framework)
    if version is None:
        yield note(
            f"Horovod is built for {title} too, which is not installed",
            f"nothing, or install {title} {library.built_for}",
        )
    elif library.built_for and library.built_for != version:
        yield problem(
            f"Horovod is built for {title} {library.built_for}, but {version} is installed",
            f"{_build(horovod)}, or `pip install '{library.framework}=={library.built_for}'`",
        )
    elif library.error:
        # Where the build is the right one, only force makes another.
        force = " --force" if horovod.fits else ""
        yield problem(
            f"Horovod's library for {title} does not load: {library.error}",
            f"`hvkit install-horovod{force}`, with LD_LIBRARY_PATH unset",
        )
