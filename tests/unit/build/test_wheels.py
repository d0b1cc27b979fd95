"""Everything that changes the binary changes its key; the cache of wheels, and its lock."""

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fake_wheels import wheel_of

from hvkit.build import wheels
from hvkit.build.cuda import Toolkit
from hvkit.build.toolchain import Compiler
from hvkit.build.wheels import Key, cpu_features, key_of

NOTHING = {}


def changed_pytorch(found):
    pytorch, tensorflow = found.frameworks
    return {"frameworks": (replace(pytorch, version="2.14.0+cpu"), tensorflow)}


@pytest.mark.parametrize(
    "change",
    [
        lambda found: {"frameworks": found.frameworks[:1]},
        changed_pytorch,
        lambda found: {"mpi": replace(found.mpi, version="5.0.11")},
        lambda found: {"mpi": replace(found.mpi, flavour="MPICH")},
        lambda found: {"mpi": replace(found.mpi, library_dir=Path("/usr/local/lib"))},
        lambda found: {"compiler": Compiler(("/usr/bin/c++",), "c++ 13.1.0")},
        lambda found: {"compiler": Compiler(("/usr/bin/c++", "-m64"), found.compiler.version)},
        lambda found: {"cuda": Toolkit(Path("/usr/local/cuda"), "13.0")},
    ],
)
def test_each_part_of_the_toolchain_changes_the_key(toolchain, change):
    before = key_of(toolchain, NOTHING)
    assert key_of(replace(toolchain, **change(toolchain)), NOTHING).digest != before.digest


def test_cuda_version_changes_the_key_and_where_programs_lie_does_not(toolchain):
    def key(home, version):
        return key_of(replace(toolchain, cuda=Toolkit(Path(home), version)), NOTHING)

    assert key("/usr/local/cuda", "13.0") == key("/home/me/.cache/hvkit/cuda/13.0", "13.0")
    assert key("/usr/local/cuda", "13.0").digest != key("/usr/local/cuda", "13.1").digest
    moved = replace(toolchain, compiler=Compiler(("/opt/c++",), toolchain.compiler.version))
    assert key_of(moved, NOTHING) == key_of(toolchain, NOTHING)


@pytest.mark.parametrize(
    ("variable", "counts"),
    [
        ("HOROVOD_DEBUG", True),
        ("HOROVOD_BUILD_ARCH_FLAGS", True),
        ("CXXFLAGS", True),
        ("HOROVOD_NCCL_HOME", True),
        # The machine's toolkit does not count in a build without GPUs.
        ("CUDA_HOME", False),
        ("HOROVOD_CUDA_HOME", False),
        # Options of the run, not of the build.
        ("HOROVOD_FUSION_THRESHOLD", False),
        ("HOME", False),
    ],
)
def test_build_options_in_the_environment_change_the_key(toolchain, variable, counts):
    before = key_of(toolchain, NOTHING)
    assert (key_of(toolchain, {variable: "1"}).digest != before.digest) is counts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VERSION", "0.29.0"),
        ("patches_digest", lambda folder: "another"),
        ("cpu_features", lambda: ["sse"]),
    ],
)
def test_source_patches_and_cpu_change_the_key(toolchain, monkeypatch, name, value):
    before = key_of(toolchain, NOTHING)
    monkeypatch.setattr(wheels, name, value)
    assert key_of(toolchain, NOTHING).digest != before.digest


def test_version_is_horovods_with_the_digest_as_local_part(toolchain):
    key = key_of(toolchain, NOTHING)
    assert re.fullmatch(r"0\.28\.1\+hvkit[0-9a-f]{12}", key.version)


def test_cpu_features_are_those_that_the_build_uses(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu sse2 fma avx avx2\n")
    assert cpu_features(cpuinfo) == ["avx", "fma"]
    assert cpu_features(tmp_path / "nowhere") == []


def test_pip_installs_a_wheel_with_its_facts_and_its_platform(
    abi, toolchain, tmp_path, monkeypatch
):
    fresh = wheel_of(abi, tmp_path, "0.28.1+hvkit1", torch=b"library")
    facts, read = replace(abi, platform="manylinux_2_17_x86_64"), []
    monkeypatch.setattr(wheels, "abi_of", lambda libraries, *_: read.extend(libraries) or facts)
    wheel = wheels.with_facts(fresh, toolchain, NOTHING)
    assert [Path(each).name for each in read] == ["mpi_lib.so"]
    assert wheel.name == "horovod-0.28.1+hvkit1-cp311-cp311-manylinux_2_17_x86_64.whl"
    assert wheels.facts_of(wheel) == facts
    assert not fresh.exists()
    # pip checks the name, the version, the tag and the list of files.
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    subprocess.run([*pip, str(wheel)], check=True)
    library = site / "horovod" / "torch" / "mpi_lib.so"
    assert library.read_bytes() == b"library"
    assert os.access(library, os.X_OK)
    (about,) = site.glob("*.dist-info")
    assert "Tag: cp311-cp311-manylinux_2_17_x86_64\n" in (about / "WHEEL").read_text()


KEY = Key({"horovod": "0.28.1", "pytorch": "2.13.0"})
OTHER = Key({"horovod": "0.28.1", "pytorch": "2.14.0"})


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / f"horovod-{KEY.version}-cp311-cp311-linux_x86_64.whl"
    path.write_bytes(b"wheel")
    return path


def test_stored_wheel_is_found_under_its_key_only_with_its_ingredients(wheel):
    assert wheels.find_wheel(KEY) is None
    stored = wheels.store_wheel(wheel, KEY)
    assert stored.read_bytes() == b"wheel"
    assert wheels.find_wheel(KEY) == stored
    assert wheels.find_wheel(OTHER) is None
    assert json.loads(stored.with_suffix(".json").read_text()) == KEY.ingredients


def test_nothing_half_written_is_left(wheel, monkeypatch):
    def fail(source, target):
        target.write_bytes(b"wh")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", fail)
    with pytest.raises(OSError, match="No space"):
        wheels.store_wheel(wheel, KEY)
    assert wheels.find_wheel(KEY) is None
    assert not list(wheels.wheels_dir().glob("**/*.whl"))


def test_held_lock_is_waited_for_unless_it_is_another_wheels():
    waited = []
    held = (wheels.wheels_dir() / f"{KEY.digest}.lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)

    def release():
        waited.append(True)
        held.close()

    with wheels.lock(OTHER, when_waiting=lambda: pytest.fail("another wheel's lock")):
        pass
    # Releases the lock in any case: a fault then fails this test instead of hanging it.
    late = threading.Timer(5, held.close)
    late.start()
    with wheels.lock(KEY, when_waiting=release):
        late.cancel()
        assert waited == [True]


def test_lock_is_exclusive_while_held():
    with (
        wheels.lock(KEY, when_waiting=lambda: pytest.fail("waited")),
        (wheels.wheels_dir() / f"{KEY.digest}.lock").open("w") as second,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
