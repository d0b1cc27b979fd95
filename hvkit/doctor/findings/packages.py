"""Packages that are missing or do not fit together."""

from collections.abc import Iterator

from hvkit.doctor.findings.finding import Finding, problem
from hvkit.doctor.packages import Packages


def package_findings(packages: Packages) -> Iterator[Finding]:
    """What is wrong with the packages."""
    versions = packages.versions
    if versions["torch"] is None and versions["tensorflow"] is None:
        yield problem(
            "neither PyTorch nor TensorFlow is installed",
            "`pip install torch` or `pip install tensorflow-cpu keras`, then "
            "`hvkit install-horovod`",
        )
    if len(packages.tensorflows) > 1:
        listed = " and ".join(packages.tensorflows)
        yield problem(
            f"{listed} are installed over each other",
            f"`pip uninstall {' '.join(one.split()[0] for one in packages.tensorflows)}`, then "
            "install one of them",
        )
    for lack in packages.unmet:
        there = f"{lack.installed} is installed" if lack.installed else "it is not installed"
        yield problem(
            f"{lack.package} needs {lack.requirement}, but {there}",
            f"`pip install '{lack.requirement}'`",
        )
