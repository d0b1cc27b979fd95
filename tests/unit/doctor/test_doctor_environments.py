"""The command in real environments: a complete one, and ones with missing or extra parts."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import cases
from prepared import rest_of_path

from hvkit.communication.engines import built_for

Program = Callable[[str, str], Path]

# Names that end in .invalid never resolve.
NO_HOST = "nowhere.invalid"


def without_horovod(environment):
    for place in environment.packages.glob("horovod*"):
        place.unlink()


def test_a_complete_environment_has_no_problems(environment):
    report = environment.doctor()
    assert report.problems_of_software() == []
    assert report.status == (1 if report.contents["problems"] else 0)
    libraries = report.contents["horovod"]["libraries"]
    assert [one["framework"] for one in libraries] == built_for()
    for library in libraries:
        assert library["error"] is None
        assert "mpi" in library["controllers"]
        # Horovod loads the library of the launcher on PATH.
        assert library["mpi"]["flavour"] == report.contents["mpi"]["flavour"]
        assert library["mpi"]["version"] == report.contents["mpi"]["version"]


def test_no_horovod(environment):
    without_horovod(environment)
    report = environment.doctor()
    assert report.status == 1
    assert report.contents["horovod"] is None
    assert report.fix_of("Horovod is not installed").startswith("`hvkit install-horovod`")


def test_no_horovod_and_nothing_to_build_one_with(environment):
    without_horovod(environment)
    nothing = environment.folder / "nothing"
    nothing.mkdir()
    report = environment.doctor(path=str(nothing))
    fix = report.fix_of("Horovod is not installed")
    assert re.search(r"after fixing this: no C\+\+ compiler.*apt install g\+\+", fix)


@pytest.mark.skipif(len(built_for()) < 2, reason="Horovod is not built for both frameworks here")
def test_horovod_without_torch(environment):
    horovod = environment.packages / "horovod"
    original = horovod.resolve()
    horovod.unlink()
    # Links to files in a real folder, so that the test can remove some.
    shutil.copytree(original, horovod, copy_function=os.symlink)
    for library in (horovod / "torch").glob("mpi_lib*"):
        library.unlink()
    report = environment.doctor()
    assert report.status == 1
    fix = report.fix_of("Horovod is built for TensorFlow only, but PyTorch")
    assert fix.startswith("`hvkit install-horovod`")
    assert [one["framework"] for one in report.contents["horovod"]["libraries"]] == ["tensorflow"]


@pytest.mark.parametrize("first", cases([True, False]), ids=["the other first", "the other last"])
def test_two_mpis_on_path(environment, program, first):
    other = program("mpirun", "echo 'mpirun (Open MPI) 3.1.6'").parent
    own = [str(environment.folder / "bin"), *rest_of_path()]
    folders = [str(other), *own] if first else [*own, str(other)]
    report = environment.doctor(path=os.pathsep.join(folders))
    assert report.status == 1
    used = report.contents["horovod"]["libraries"][0]["mpi"]
    fix = report.fix_of("MPIs are on PATH")
    assert fix.startswith(f"keep {used['flavour']} {used['version']} (Horovod uses it)")
    assert f"take {other} off PATH" in fix
    # The first mpirun on PATH starts Horovod's ranks.
    assert first == (
        f"{other}/mpirun belongs to Open MPI 3.1.6" in str(report.problems_of_software())
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the hostname of a process")
def test_a_hostname_that_does_not_resolve(environment):
    command = ["unshare", "--uts", "sh", "-c", f'hostname {NO_HOST}; exec "$@"', "sh"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this container forbids changing the hostname")
    report = environment.doctor(*command)
    assert report.status == 1
    assert report.contents["hostname"] == NO_HOST
    assert report.contents["addresses"] == []
    fix = report.fix_of(f"the hostname {NO_HOST} does not resolve")
    assert re.match(rf"put the line `[\d.]+ {NO_HOST}` into /etc/hosts", fix)


def test_a_library_that_does_not_load_is_a_problem(environment):
    horovod = environment.packages / "horovod"
    original = horovod.resolve()
    horovod.unlink()
    shutil.copytree(original, horovod, copy_function=os.symlink)
    library = next((horovod / built_for()[0]).glob("mpi_lib*"))
    library.unlink()
    library.write_bytes(b"not a library")
    report = environment.doctor()
    assert report.status == 1
    assert any("does not load" in what for what in report.problems_of_software())


def test_the_changes_since_horovod_was_built_are_named(environment):
    (metadata,) = environment.packages.glob("horovod-*.dist-info")
    text = (metadata / "METADATA").read_text()
    metadata.unlink()
    version = "0.28.1+hvkit0"
    metadata = environment.packages / f"horovod-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        re.sub(r"^Version: .*", f"Version: {version}", text, flags=re.MULTILINE)
    )
    wheels = environment.folder / "cache" / "wheels"
    wheels.mkdir(parents=True)
    (wheels / f"horovod-{version}-cp311.json").write_text('{"mpi": "MPICH 4.2.0"}')
    report = environment.doctor(environ={"HVKIT_CACHE_DIR": str(wheels.parent)})
    horovod = report.contents["horovod"]
    assert horovod["version"] == version
    assert horovod["fits"] is False
    assert any(one.startswith("mpi: MPICH 4.2.0 -> ") for one in horovod["differences"])
    assert any(
        "hvkit would build this Horovod differently now" in n["what"]
        for n in report.contents["notes"]
    )
    assert report.problems_of_software() == []


def test_values_of_variables_are_not_in_the_report(environment):
    secret = "hunter2"
    variables = {
        "OMPI_MCA_x": secret,
        "HOROVOD_X": secret,
        "OMP_NUM_THREADS": secret,
        "TOKEN": secret,
    }
    report = environment.doctor(environ=variables)
    assert secret not in str(report.contents)
    assert {"OMPI_MCA_x", "HOROVOD_X"} <= set(report.contents["environment"])
    assert "TOKEN" not in str(report.contents)


def test_the_home_directory_is_a_tilde(environment):
    report = environment.doctor(environ={"HOME": str(environment.folder)})
    assert report.contents["python"] == "~/bin/python"
    assert str(environment.folder) not in str(report.contents)
