"""Wheels from a folder or a URL: those that fit are installed, and no others."""

import functools
import http.server
import json
import re
import subprocess
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_wheels import wheel_of

from hvkit import cli
from hvkit.build import BuildOptions, installer, ready_wheels
from hvkit.build import abi as abi_module
from hvkit.build.abi import Abi, Machine, misfits
from hvkit.build.frameworks import Framework
from hvkit.build.toolchain import Mpi, Toolchain
from hvkit.build.wheel_file import facts_of, join
from hvkit.errors import BuildError


@pytest.fixture
def machine(toolchain: Toolchain, tmp_path: Path) -> Machine:
    """The machine that ``abi`` fits, with a system's Open MPI."""
    folder = tmp_path / "mpi" / "lib"
    folder.mkdir(parents=True)
    (folder / "libmpi.so.40").touch()
    mpi = Mpi(folder.parent / "bin" / "mpirun", "Open MPI", "5.0.11", folder)
    return Machine(toolchain.frameworks, mpi, None, {"LD_LIBRARY_PATH": str(folder)})


def installed(machine: Machine, **versions: str) -> Machine:
    """The same machine with other frameworks."""
    return replace(
        machine, frameworks=tuple(Framework(n, v, Path("/")) for n, v in versions.items())
    )


def test_a_fitting_wheel_has_no_misfit(abi: Abi, machine: Machine) -> None:
    assert misfits(abi, machine) == []


def other_mpi(machine: Machine) -> Machine:
    elsewhere = machine.mpi.library_dir.parent / "mpich"
    elsewhere.mkdir()
    (elsewhere / "libmpi.so.12").touch()
    return replace(machine, mpi=Mpi(elsewhere, "MPICH", "5.0.2", elsewhere))


def mpi_behind_another(machine: Machine) -> Machine:
    elsewhere = machine.mpi.library_dir.parent / "second"
    elsewhere.mkdir()
    (elsewhere / "libmpi.so.40").touch()
    return replace(machine, mpi=replace(machine.mpi, library_dir=elsewhere))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: installed(m, pytorch="2.15.0"), "for PyTorch 2.13.0, and 2.15.0 is installed"),
        (
            lambda m: installed(m, pytorch="2.13.0", tensorflow="2.20.0"),
            "for TensorFlow 2.21.0, and 2.20.0 is installed",
        ),
        (lambda m: installed(m, pytorch="2.13.0"), "TensorFlow as well, which is not installed"),
        (lambda m: replace(m, cuda="13.0"), "built without NCCL"),
        (lambda m: replace(m, environ={**m.environ, "CXXFLAGS": "-m64"}), "values: CXXFLAGS"),
        (other_mpi, "needs libmpi.so.40, which MPICH 5.0.2 .* does not have"),
        (mpi_behind_another, "it would load the MPI in .*lib instead of Open MPI 5.0.11"),
        (lambda m: replace(m, environ={}), "it would not find Open MPI .*LD_LIBRARY_PATH to"),
    ],
)
def test_another_machine_is_named_as_the_reason(
    abi: Abi, machine: Machine, change: Callable[[Machine], Machine], reason: str
) -> None:
    assert re.search(reason, " ".join(misfits(abi, change(machine))))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"patches": "0"}, "another version of hvkit built it"),
        ({"python": "cpython-39"}, "it is for Python's ABI cpython-39, this is"),
        ({"platform": "manylinux_2_99_x86_64"}, "needs manylinux_2_99_x86_64, which the C library"),
        ({"cpu": ("avx9",)}, "it uses avx9, which this processor lacks"),
        ({"cuda": "13.0"}, "it is built for NCCL"),
    ],
)
def test_another_wheel_is_refused_with_the_reason(
    abi: Abi, machine: Machine, change: dict[str, Any], reason: str
) -> None:
    (found,) = misfits(replace(abi, **change), machine)
    assert reason in found


def wheels_apart(abi: Abi, folder: Path, pytorch: str = "2.13.0") -> None:
    """Fill a folder with a wheel for each framework."""
    for name, version, module in (
        ("pytorch", pytorch, "torch"),
        ("tensorflow", "2.21.0", "tensorflow"),
    ):
        wheel = wheel_of(
            replace(abi, frameworks={name: version}),
            folder.parent / "built",
            f"0.28.1+hvkit{name}{version}",
            **{module: name.encode()},
        )
        ready_wheels.add(wheel, folder)


def test_wheels_made_apart_are_installed_as_one(abi: Abi, machine: Machine, tmp_path: Path) -> None:
    wheels_apart(abi, tmp_path / "wheels")
    (choice,), refused = ready_wheels.choices(str(tmp_path / "wheels"), machine)
    assert refused == []
    both = join([tmp_path / "wheels" / one.name for one in choice.wheels], tmp_path / "joined")
    assert facts_of(both).frameworks == {"pytorch": "2.13.0", "tensorflow": "2.21.0"}
    # pip checks the names, the versions and the list of files.
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, str(both)], check=True)
    libraries = {file.parent.name: file.read_bytes() for file in target.rglob("mpi_lib.so")}
    assert libraries == {"torch": b"pytorch", "tensorflow": b"tensorflow"}
    about = next(target.glob("*.dist-info/METADATA")).read_text()
    assert "Requires-Dist: needed-by-torch\n" in about
    assert "Requires-Dist: needed-by-tensorflow\n" in about
    assert json.loads((target / "horovod/metadata.json").read_text())["pytorch"] == "2.13.0"


def test_the_same_minor_version_comes_first(abi: Abi, machine: Machine, tmp_path: Path) -> None:
    for version in ("2.12.1", "2.13.1", "2.14.0"):
        wheels_apart(abi, tmp_path / "wheels", version)
    found, _ = ready_wheels.choices(str(tmp_path / "wheels"), installed(machine, pytorch="2.13.0"))
    built = [choice.wheels[0].abi.frameworks["pytorch"] for choice in found]
    assert built == ["2.13.1", "2.12.1", "2.14.0"]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The URL of the folder ``wheels``."""
    (tmp_path / "wheels").mkdir()
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "wheels")
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_changed_file_behind_a_url_is_refused(
    abi: Abi, machine: Machine, served: str, tmp_path: Path
) -> None:
    wheels_apart(abi, tmp_path / "wheels")
    (choice,), _ = ready_wheels.choices(served, machine)
    kept = ready_wheels.fetch(choice.wheels[0], served, tmp_path)
    assert kept.read_bytes() == (tmp_path / "wheels" / kept.name).read_bytes()
    with zipfile.ZipFile(tmp_path / "wheels" / kept.name, "a") as wheel:
        wheel.writestr("horovod/evil.py", "")
    with pytest.raises(BuildError, match=r"is not the file of wheels\.json: its SHA-256 is"):
        ready_wheels.fetch(choice.wheels[0], served, tmp_path)


def test_an_index_names_files_of_its_folder_only(
    abi: Abi, machine: Machine, tmp_path: Path
) -> None:
    wheels_apart(abi, tmp_path / "wheels")
    index = tmp_path / "wheels" / ready_wheels.INDEX
    index.write_text(index.read_text().replace('"horovod-', '"../horovod-'))
    with pytest.raises(BuildError, match=r"lists '\.\./horovod-.*which names no wheel"):
        ready_wheels.choices(str(tmp_path / "wheels"), machine)


@pytest.mark.parametrize("place", ["http://wheels.example.com", "ftp://127.0.0.1/wheels"])
def test_a_url_that_can_be_changed_on_the_way_is_refused(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["install-horovod", "--wheels", place])
    assert f"must be a folder or an https:// URL, got '{place}'" in capsys.readouterr().err


@pytest.fixture
def steps(
    toolchain: Toolchain, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[str]:
    """What the installer does on ``machine``, with stand-ins for pip, ranks and the compiler."""
    taken: list[str] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        taken.append("self-test")
        return subprocess.CompletedProcess(command, 1, "", "hvkit: undefined symbol")

    def no_compiler(without: object) -> Toolchain:
        taken.append("build")
        raise BuildError("no C++ compiler")

    monkeypatch.setattr(installer, "find_launching_mpi", lambda: machine.mpi)
    monkeypatch.setattr(installer, "this_machine", lambda *_: machine)
    monkeypatch.setattr(installer, "installed_abi", lambda: None)
    monkeypatch.setattr(installer, "install", lambda wheel: taken.append(f"install {wheel.name}"))
    monkeypatch.setattr(installer.subprocess, "run", run)
    monkeypatch.setattr(installer, "run_pip", lambda words, summary: taken.append(words[0]))
    monkeypatch.setattr(installer, "find_toolchain", no_compiler)
    return taken


def test_a_wheel_that_fails_its_self_test_is_removed_and_horovod_built(
    abi: Abi, steps: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready_wheels.add(wheel_of(abi, tmp_path / "built", "0.28.1+x"), tmp_path / "wheels")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        installer.install_horovod(BuildOptions(wheels=str(tmp_path / "wheels")))
    assert [step.split()[0] for step in steps] == ["install", "self-test", "uninstall", "build"]
    shown = capsys.readouterr().out
    assert "its self-test fails: hvkit: undefined symbol" in shown


def test_nothing_is_installed_of_wheels_that_do_not_fit(
    abi: Abi, steps: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(abi, frameworks={**abi.frameworks, "tensorflow": "2.20.0"})
    ready_wheels.add(wheel_of(other, tmp_path / "built", "0.28.1+x"), tmp_path / "wheels")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        installer.install_horovod(BuildOptions(wheels=str(tmp_path / "wheels")))
    assert steps == ["build"]
    assert "it is for TensorFlow 2.20.0, and 2.21.0 is installed" in capsys.readouterr().out


def test_the_tag_is_that_of_the_oldest_c_library_that_will_do() -> None:
    here = sysconfig.get_platform().rpartition("-")[2]
    old = "NEEDED libmpi.so.40\n 0x1 0x00 05 GLIBC_2.14\n 0x1 0x00 04 GLIBCXX_3.4.21\n"
    assert abi_module._platform(old) == f"manylinux_2_17_{here}"
    assert abi_module._platform(f"{old} GLIBCXX_3.4.28\n") == f"manylinux_2_31_{here}"
    # No C library here is as new: pip would refuse the wheel where it was built.
    assert abi_module._platform(f"{old} GLIBC_2.99\n") == f"linux_{here}"
