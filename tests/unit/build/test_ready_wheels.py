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

from hvkit.build import BuildOptions, installer, ready_wheels
from hvkit.build.abi import Abi
from hvkit.build.wheels import facts_of, join
from hvkit.errors import BuildError


def wheels_apart(abi, folder, pytorch="2.13.0"):
    """Fill a folder with a wheel for each framework."""
    modules = {"torch": ("pytorch", pytorch), "tensorflow": ("tensorflow", "2.21.0")}
    for module, (name, version) in modules.items():
        facts = replace(abi, frameworks={name: version})
        local = f"0.28.1+hvkit{name}{version}"
        wheel = wheel_of(facts, folder.parent / "built", local, **{module: name.encode()})
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
    of_pytorch = replace(machine, frameworks=machine.frameworks[:1])
    found, _ = ready_wheels.choices(str(tmp_path / "wheels"), of_pytorch)
    built = [choice.wheels[0].abi.frameworks["pytorch"] for choice in found]
    assert built == ["2.13.1", "2.12.1", "2.14.0"]


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
    {"abi": {"cuda": 0}},
    {"abi": {"cuda": []}},
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
    with pytest.raises(BuildError, match="no wheel can be written there"):
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
