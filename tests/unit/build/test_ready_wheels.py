"""Wheels from a folder or a URL: those that fit are installed, and no others."""

import base64
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fake_wheels import wheel_of

from hvkit import cli
from hvkit.build import BuildOptions, installer, ready_wheels
from hvkit.build import abi as abi_module
from hvkit.build.abi import Machine, misfits
from hvkit.build.frameworks import Framework
from hvkit.build.toolchain import Mpi
from hvkit.build.wheel_file import facts_of, join
from hvkit.build.wheel_place import require_place
from hvkit.errors import BuildError


@pytest.fixture
def machine(toolchain, tmp_path):
    """The machine that ``abi`` fits, with a system's Open MPI."""
    folder = tmp_path / "mpi" / "lib"
    folder.mkdir(parents=True)
    (folder / "libmpi.so.40").touch()
    mpi = Mpi(folder.parent / "bin" / "mpirun", "Open MPI", "5.0.11", folder)
    return Machine(toolchain.frameworks, mpi, None, {"LD_LIBRARY_PATH": str(folder)})


def installed(machine, **versions):
    """The same machine with other frameworks."""
    return replace(
        machine, frameworks=tuple(Framework(n, v, Path("/")) for n, v in versions.items())
    )


def test_a_fitting_wheel_has_no_misfit(abi, machine):
    assert misfits(abi, machine) == []


def other_mpi(machine):
    elsewhere = machine.mpi.library_dir.parent / "mpich"
    elsewhere.mkdir()
    (elsewhere / "libmpi.so.12").touch()
    return replace(machine, mpi=Mpi(elsewhere, "MPICH", "5.0.2", elsewhere))


def mpi_behind_another(machine):
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
def test_another_machine_is_named_as_the_reason(abi, machine, change, reason):
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
def test_another_wheel_is_refused_with_the_reason(abi, machine, change, reason):
    (found,) = misfits(replace(abi, **change), machine)
    assert reason in found


def wheels_apart(abi, folder, pytorch="2.13.0"):
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


def test_wheels_made_apart_are_installed_as_one(abi, machine, tmp_path):
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


def test_a_wheel_may_lie_in_the_folder_already(abi, machine, tmp_path):
    wheel = wheel_of(abi, tmp_path, "0.28.1+hvkit1")
    assert ready_wheels.add(wheel, tmp_path) == wheel
    (choice,), _ = ready_wheels.choices(str(tmp_path), machine)
    assert [one.name for one in choice.wheels] == [wheel.name]


def test_the_same_minor_version_comes_first(abi, machine, tmp_path):
    for version in ("2.12.1", "2.13.1", "2.14.0"):
        wheels_apart(abi, tmp_path / "wheels", version)
    found, _ = ready_wheels.choices(str(tmp_path / "wheels"), installed(machine, pytorch="2.13.0"))
    built = [choice.wheels[0].abi.frameworks["pytorch"] for choice in found]
    assert built == ["2.13.1", "2.12.1", "2.14.0"]


@contextmanager
def serving(handler):
    """A server on this host; yields its port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def served(tmp_path):
    """The URL of the folder ``wheels``."""
    (tmp_path / "wheels").mkdir()
    folder = str(tmp_path / "wheels")
    with serving(functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)) as port:
        yield f"http://127.0.0.1:{port}"


def test_a_changed_file_behind_a_url_is_refused(abi, machine, served, tmp_path):
    wheels_apart(abi, tmp_path / "wheels")
    (choice,), _ = ready_wheels.choices(served, machine)
    kept = ready_wheels.fetch(choice.wheels[0], served, tmp_path)
    assert kept.read_bytes() == (tmp_path / "wheels" / kept.name).read_bytes()
    with zipfile.ZipFile(tmp_path / "wheels" / kept.name, "a") as wheel:
        wheel.writestr("horovod/evil.py", "")
    with pytest.raises(BuildError, match=r"is not the file of wheels\.json: its SHA-256 is"):
        ready_wheels.fetch(choice.wheels[0], served, tmp_path)


@pytest.mark.parametrize(
    ("installed", "left_out"),
    [("pytorch", [""]), ("pytorch tensorflow", ["--without tensorflow", "--without pytorch"])],
)
def test_make_builds_a_wheel_for_each_framework_that_is_installed(tmp_path, installed, left_out):
    shutil.copy(Path(__file__).parents[3] / "Makefile", tmp_path)
    for name in ("setup.py", "constraints.txt"):
        (tmp_path / name).touch()
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, line in (("python", f"echo {installed}"), ("hvkit", 'echo "$@" >> built')):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    (tmp_path / ".venv" / "installed").touch()
    make = ["make", "wheels", "HVKIT_GPU=none", f"PYTHON={sys.executable}"]
    environ = {**os.environ, "CXX": "sh"}
    done = subprocess.run(make, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "built").read_text().splitlines() == [
        " ".join(f"install-horovod --no-install {out} --gpu none --wheel-dir build/wheels".split())
        for out in left_out
    ]


NO_ENTRIES = [
    {"name": "../horovod-1-a-b-c.whl"},
    {"name": 3},
    {"abi": {"frameworks": {"jax": "1"}}},
    {"abi": {"frameworks": {"pytorch": 2}}},
    {"abi": {"cpu": None}},
    {"abi": {"new in the next version": 1}},
    "horovod",
]


def test_an_entry_of_another_version_is_refused_alone_and_kept(abi, machine, tmp_path):
    folder = tmp_path / "wheels"
    wheels_apart(abi, folder)
    index = folder / ready_wheels.INDEX
    good = json.loads(index.read_text())
    for changes in NO_ENTRIES:
        entry = changes
        if isinstance(changes, dict):
            entry = {**good[0], **changes, "abi": {**good[0]["abi"], **changes.get("abi", {})}}
        index.write_text(json.dumps([*good, entry]))
        (choice,), refused = ready_wheels.choices(str(folder), machine)
        assert len(choice.wheels) == 2, changes
        assert len(refused) == 1, changes
    newer = {**good[0], "abi": {"new": 1}}
    index.write_text(json.dumps([newer, good[1]]))
    more = wheel_of(replace(abi, frameworks={"pytorch": "2.14.0"}), tmp_path, "0.28.1+more")
    ready_wheels.add(more, folder)
    assert [one["name"] for one in json.loads(index.read_text())] == [
        *(one["name"] for one in (newer, good[1])),
        more.name,
    ]


@pytest.mark.parametrize(
    "index", [b"{}", b"<html>\xff\xfe", b"[" * 100_000], ids=["{}", "page", "["]
)
def test_behind_a_damaged_index_horovod_is_built(steps, tmp_path, capsys, index):
    (tmp_path / "wheels.json").write_bytes(index)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        installer.install_horovod(BuildOptions(wheels=str(tmp_path)))
    assert re.search(
        r"wheels\.json in .* is damaged: it (is no list|begins with '(<html>|\[\[))"
        r".*so Horovod is built",
        capsys.readouterr().out,
    )
    # A folder to fill is checked before minutes of compiling.
    steps.clear()
    with pytest.raises(BuildError, match="is damaged"):
        installer.install_horovod(BuildOptions(wheel_dir=tmp_path))
    assert steps == []


def test_a_folder_that_cannot_be_filled_is_refused_before_the_build(steps, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="no wheel can be written there"):
        installer.install_horovod(BuildOptions(wheel_dir=tmp_path / "file" / "wheels"))
    assert steps == []


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers as the first folder of the path says."""

    asked = []

    def do_GET(self):
        self.asked.append((self.path, self.headers.get("Authorization")))
        kind = self.path.split("/")[1]
        if kind == "garbage":
            self.wfile.write(b"garbage\r\n\r\n")
            return
        self.send_response(302 if kind in ("plain", "moved", "other") else 200)
        if kind == "plain":
            self.send_header("Location", "http://user:secret@wheels.example.com/wheels.json?sig=s3")
        if kind == "moved":
            self.send_header("Location", "/there/wheels.json")
        if kind == "other":
            port = self.server.server_address[1]
            self.send_header("Location", f"http://localhost:{port}/there/wheels.json")
        self.send_header("Content-Length", "100" if kind == "cut" else "2")
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def answers():
    """The port of a server, and what it was asked for."""
    with serving(Answers) as port:
        Answers.asked.clear()
        yield port, Answers.asked


def test_a_server_leads_to_https_only_and_its_faults_are_named(answers, machine):
    for kind, why in (
        ("plain", r"leads to http://wheels\.example\.com/wheels\.json\?\.\.\., which is not https"),
        ("cut", "more expected"),
        ("garbage", "garbage"),
    ):
        with pytest.raises(BuildError, match=f"cannot fetch http://127.0.0.1:.*{why}") as caught:
            ready_wheels.choices(require_place(f"http://127.0.0.1:{answers[0]}/{kind}"), machine)
        assert "s3" not in str(caught.value)


def test_a_password_and_a_signature_reach_the_server_and_no_message(
    answers, machine, steps, capsys
):
    port, asked = answers
    given = f"http://ann:s%40cret@127.0.0.1:{port}/moved/a b/?sig=a%2Bb"
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        installer.install_horovod(BuildOptions(wheels=require_place(given)))
    right = "Basic " + base64.b64encode(b"ann:s@cret").decode()
    assert asked == [("/moved/a%20b/wheels.json?sig=a%2Bb", right), ("/there/wheels.json", right)]
    shown = capsys.readouterr().out
    assert f"no wheel in http://127.0.0.1:{port}/moved/a b/?... fits" in shown
    assert "cret" not in shown
    asked.clear()
    ready_wheels.choices(f"http://ann:s%40cret@127.0.0.1:{port}/other", machine)
    assert asked == [("/other/wheels.json", right), ("/there/wheels.json", None)]


@pytest.mark.parametrize(
    ("option", "place", "complaint"),
    [
        ("--wheels", "http://wheels.example.com", "URL, got 'http://wheels.example.com': without"),
        ("--wheels", "ftp://me:s3cret@127.0.0.1/wheels", "URL, got 'ftp://127.0.0.1/wheels'"),
        ("--wheels", "file:///wheels", "URL, got 'file:///wheels': without https"),
        ("--wheels", "https://me:s3cret@example:x/y", "this URL has no valid host"),
        ("--wheels", "", "must be a folder or an https:// URL, got ''"),
        ("--wheel-dir", "https://example.com", "must be a folder of this machine, got 'https"),
    ],
)
def test_other_places_are_refused(option, place, complaint, capsys):
    with pytest.raises(SystemExit):
        cli.main(["install-horovod", option, place])
    printed = capsys.readouterr().err
    assert complaint in printed
    assert "s3cret" not in printed


@pytest.fixture
def steps(toolchain, machine, monkeypatch, tmp_path):
    """What the installer does on ``machine``, with stand-ins for pip, ranks and the compiler."""
    taken = []

    def run(command, **options):
        taken.append("self-test")
        return subprocess.CompletedProcess(command, 1, "", "hvkit: undefined symbol")

    def no_compiler(without):
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


def test_a_wheel_that_fails_its_self_test_is_not_installed_and_horovod_built(
    abi, steps, tmp_path, capsys
):
    ready_wheels.add(wheel_of(abi, tmp_path / "built", "0.28.1+x"), tmp_path / "wheels")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        installer.install_horovod(BuildOptions(wheels=str(tmp_path / "wheels")))
    assert [step.split()[0] for step in steps] == ["self-test", "build"]
    shown = capsys.readouterr().out
    assert "its self-test fails: hvkit: undefined symbol" in shown


def test_nothing_is_installed_of_wheels_that_do_not_fit(abi, steps, tmp_path, capsys):
    other = replace(abi, frameworks={**abi.frameworks, "tensorflow": "2.20.0"})
    ready_wheels.add(wheel_of(other, tmp_path / "built", "0.28.1+x"), tmp_path / "wheels")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        installer.install_horovod(BuildOptions(wheels=str(tmp_path / "wheels")))
    assert steps == ["build"]
    assert "it is for TensorFlow 2.20.0, and 2.21.0 is installed" in capsys.readouterr().out


def test_the_tag_is_that_of_the_oldest_c_library_that_will_do():
    here = sysconfig.get_platform().rpartition("-")[2]
    old = "NEEDED libmpi.so.40\n 0x1 0x00 05 GLIBC_2.14\n 0x1 0x00 04 GLIBCXX_3.4.21\n"
    assert abi_module._platform(old) == f"manylinux_2_17_{here}"
    assert abi_module._platform(f"{old} GLIBCXX_3.4.28\n") == f"manylinux_2_31_{here}"
    # No C library here is as new: pip would refuse the wheel where it was built.
    assert abi_module._platform(f"{old} GLIBC_2.99\n") == f"linux_{here}"
