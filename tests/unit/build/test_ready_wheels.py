"""Wheels of a folder: those that fit are installed, and no others; its index."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fake_wheels import wheel_of
from scripts import write_program

from hvkit.build import BuildOptions, installer, ready_wheels
from hvkit.build.wheels import Abi
from hvkit.errors import BuildError

BOTH = {"pytorch": "2.13.0", "tensorflow": "2.21.0"}


def add(abi, folder, **frameworks):
    """Add a wheel for these versions to a folder of wheels."""
    version = f"0.28.1+hvkit{''.join(frameworks.values())}"
    facts = replace(abi, frameworks=frameworks)
    return ready_wheels.add(wheel_of(facts, folder.parent / "built", version), folder)


def test_a_machine_takes_the_wheel_for_just_its_frameworks(abi, machine, tmp_path):
    for frameworks in (BOTH, {"pytorch": "2.13.0"}, {"tensorflow": "2.21.0"}):
        add(abi, tmp_path / "wheels", **frameworks)
    for number in (1, 2):
        fewer = replace(machine, frameworks=machine.frameworks[:number])
        (wheel,), refused = ready_wheels.fitting(str(tmp_path / "wheels"), fewer)
        assert [*wheel.abi.frameworks] == [each.name for each in fewer.frameworks]
        assert len(refused) == 2
    assert [each.partition(": ")[2] for each in refused] == [
        "it is not for TensorFlow",
        "it is not for PyTorch",
    ]


def test_a_wheel_may_lie_in_the_folder_already(abi, machine, tmp_path):
    wheel = wheel_of(abi, tmp_path, "0.28.1+hvkit1")
    assert ready_wheels.add(wheel, tmp_path) == wheel
    (one,), _ = ready_wheels.fitting(str(tmp_path), machine)
    assert one.name == wheel.name


def test_the_same_minor_version_comes_first(abi, machine, tmp_path):
    for version in ("2.12.1", "2.13.1", "2.14.0"):
        add(abi, tmp_path / "wheels", pytorch=version)
    of_pytorch = replace(machine, frameworks=machine.frameworks[:1])
    found, _ = ready_wheels.fitting(str(tmp_path / "wheels"), of_pytorch)
    assert [one.abi.frameworks["pytorch"] for one in found] == ["2.13.1", "2.12.1", "2.14.0"]


@pytest.mark.parametrize(
    ("installed", "left_out"),
    [("pytorch", [""]), ("pytorch tensorflow", ["", "--without pytorch", "--without tensorflow"])],
)
def test_make_builds_a_wheel_for_all_frameworks_and_one_for_each(tmp_path, installed, left_out):
    shutil.copy(Path(__file__).parents[3] / "Makefile", tmp_path)
    for name in ("setup.py", "constraints.txt"):
        (tmp_path / name).touch()
    for name, line in (("python", f"echo {installed}"), ("hvkit", 'echo "$@" >> built')):
        write_program(tmp_path / ".venv" / "bin" / name, line)
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
    {"abi": {"cuda": 0}},
    {"abi": {"cuda": []}},
    {"abi": {"new in the next version": 1}},
    "horovod",
]


def test_an_entry_of_another_version_is_refused_alone_and_kept(abi, machine, tmp_path):
    folder = tmp_path / "wheels"
    add(abi, folder, **BOTH)
    index = folder / ready_wheels.INDEX
    good = json.loads(index.read_text())
    for changes in NO_ENTRIES:
        entry = changes
        if isinstance(changes, dict):
            entry = {**good[0], **changes, "abi": {**good[0]["abi"], **changes.get("abi", {})}}
        index.write_text(json.dumps([*good, entry]))
        found, refused = ready_wheels.fitting(str(folder), machine)
        assert (len(found), len(refused)) == (1, 1), changes
    newer = {**good[0], "abi": {"new": 1}}
    index.write_text(json.dumps([newer]))
    more = wheel_of(replace(abi, frameworks={"pytorch": "2.14.0"}), tmp_path, "0.28.1+more")
    ready_wheels.add(more, folder)
    assert [one["name"] for one in json.loads(index.read_text())] == [newer["name"], more.name]


def test_the_facts_that_are_wrong_are_named(abi):
    wrong = {**asdict(abi), "mpi": 5, "cpu": [1], "cuda": 0, "options": {"CXX": None}}
    with pytest.raises(BuildError, match=r"another version of hvkit: mpi, cpu, cuda, options$"):
        Abi.of(wrong)


def test_a_wheel_with_other_facts_than_the_index_is_refused(abi, tmp_path):
    folder = tmp_path / "wheels"
    made = ready_wheels.add(wheel_of(abi, tmp_path, "0.28.1+hvkit1"), folder)
    (entry,) = json.loads((folder / ready_wheels.INDEX).read_text())
    entry["abi"]["search"] = ["/elsewhere"]
    wheel = ready_wheels.ReadyWheel.of(entry)
    says = rf"{re.escape(made.name)} in {folder} holds other facts than wheels\.json says\. Make"
    with pytest.raises(BuildError, match=says):
        ready_wheels.fetch(wheel, str(folder), tmp_path)


def install_from(folder):
    """Ends in the build, which has no compiler."""
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        installer.install_horovod(BuildOptions(wheels=str(folder)))


@pytest.mark.parametrize(
    "index", [b"{}", b"<html>\xff\xfe", b"[" * 100_000], ids=["{}", "page", "["]
)
def test_behind_a_damaged_index_horovod_is_built(steps, tmp_path, capsys, index):
    (tmp_path / "wheels.json").write_bytes(index)
    install_from(tmp_path)
    assert re.search(
        r"wheels\.json in .* is damaged: it (is no list|begins with '(<html>|\[\[))"
        r".*so Horovod is built",
        capsys.readouterr().out,
    )


def test_a_folder_that_cannot_be_filled_is_refused_before_the_build(steps, tmp_path):
    (tmp_path / "wheels.json").write_bytes(b"{}")
    with pytest.raises(BuildError, match="is damaged"):
        installer.install_horovod(BuildOptions(wheel_dir=tmp_path))
    with pytest.raises(BuildError, match=r"Not a directory: .*or --wheel-dir, to a folder that"):
        installer.install_horovod(BuildOptions(wheel_dir=tmp_path / "wheels.json" / "wheels"))
    assert steps == []


@pytest.mark.parametrize(
    ("tensorflow", "taken", "reason"),
    [
        ("2.21.0", ["self-test", "build"], "its self-test fails: hvkit: undefined symbol"),
        ("2.20.0", ["build"], "it is for TensorFlow 2.20.0, and 2.21.0 is installed"),
    ],
)
def test_wheels_that_fail_or_do_not_fit_are_not_installed(
    abi, steps, tmp_path, capsys, tensorflow, taken, reason
):
    facts = replace(abi, frameworks={**abi.frameworks, "tensorflow": tensorflow})
    ready_wheels.add(wheel_of(facts, tmp_path / "built", "0.28.1+x"), tmp_path / "wheels")
    install_from(tmp_path / "wheels")
    assert steps == taken
    assert reason in capsys.readouterr().out
