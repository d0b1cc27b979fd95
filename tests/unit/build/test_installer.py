"""The steps of the installation, with stand-ins for the compiler and for pip."""

import errno
import json
import subprocess
import sys
from dataclasses import replace
from subprocess import PIPE

import pytest
from fake_wheels import wheel_of

from hvkit.build import BuildOptions, install_horovod, installer, ready_wheels, wheel_cache
from hvkit.build.cuda import Toolkit
from hvkit.errors import BuildError


class Machine:
    """A machine that records builds and installations instead of making them."""

    def __init__(self, toolchain, abi, folder):
        self.toolchain = toolchain
        self.abi = abi
        self.folder = folder
        self.version = None
        self.done = []

    def build(self, toolchain, key, jobs):
        self.done.append("build")
        return wheel_cache.store_wheel(wheel_of(self.abi, self.folder, key.version), key)

    def install(self, wheel):
        self.done.append("install")
        self.version = wheel.name.split("-")[1]

    def check(self, toolchain):
        self.done.append("check")

    def run(self, options=None):
        """Run the command and return the steps that it took."""
        self.done = []
        install_horovod(options or BuildOptions())
        return self.done


@pytest.fixture
def machine(toolchain, abi, tmp_path, monkeypatch):
    stand_in = Machine(toolchain, abi, tmp_path)
    monkeypatch.setattr(installer, "find_toolchain", lambda without: stand_in.toolchain)
    toolkits = {"auto": None, "none": None, "nccl": Toolkit(tmp_path, "13.0")}
    monkeypatch.setattr(installer, "toolkit_for", lambda choice, frameworks: toolkits[choice])
    monkeypatch.setattr(installer, "build", stand_in.build)
    monkeypatch.setattr(installer, "installed_version", lambda: stand_in.version)
    monkeypatch.setattr(installer, "install", stand_in.install)
    monkeypatch.setattr(installer, "check", stand_in.check)
    return stand_in


def test_first_call_builds_installs_and_checks(machine):
    assert machine.run() == ["build", "install", "check"]


def test_second_call_does_nothing(machine, capsys):
    machine.run()
    assert machine.run() == []
    assert "is installed already" in capsys.readouterr().out


def test_other_environment_takes_the_cached_wheel(machine):
    machine.run()
    machine.version = None
    assert machine.run() == ["install", "check"]


@pytest.mark.parametrize("version", ["0.28.1", "0.28.1+hvkit000000000000", "0.21.0"])
def test_horovod_of_another_build_is_replaced(machine, version):
    machine.run()
    machine.version = version
    assert machine.run() == ["install", "check"]


def test_changed_framework_rebuilds(machine):
    machine.run()
    machine.toolchain = replace(machine.toolchain, frameworks=machine.toolchain.frameworks[:1])
    assert machine.run() == ["build", "install", "check"]


def test_builds_with_and_without_nccl_are_kept_apart(machine):
    machine.run()
    assert machine.run(BuildOptions(gpu="nccl")) == ["build", "install", "check"]
    assert machine.run(BuildOptions(gpu="none")) == ["install", "check"]
    assert machine.run(BuildOptions(gpu="nccl")) == ["install", "check"]


def test_it_waits_for_another_process_that_installs_into_this_python(machine, monkeypatch):
    holds = (
        "import sys; from hvkit.host.process_lock import claim\n"
        f"print(claim({installer.claim_of_environment()!r}), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holds]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        said = []

        def announce(text):
            said.append(text)
            other.communicate()

        with monkeypatch.context() as patched:
            patched.setattr(installer, "announce", announce)
            assert machine.run() == ["build", "install", "check"]
    assert "another process is installing Horovod into this Python; waiting" in said


def test_force_rebuilds(machine):
    machine.run()
    assert machine.run(BuildOptions(force=True)) == ["build", "install", "check"]


def test_wheel_dir_gets_the_wheel_also_when_it_is_installed_already(machine, tmp_path):
    machine.run()
    folder = tmp_path / "a" / "b"
    assert machine.run(BuildOptions(wheel_dir=folder)) == []
    (wheel,) = folder.glob("*.whl")
    (listed,) = json.loads((folder / ready_wheels.INDEX).read_text())
    assert listed["name"] == wheel.name == f"horovod-{machine.version}-cp311-cp311-linux_x86_64.whl"


def test_full_disk_is_explained(machine, monkeypatch):
    def fill(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")

    monkeypatch.setattr(installer, "build", fill)
    with pytest.raises(BuildError, match=r"the disk is full: .*'/tmp/x'.*TMPDIR"):
        machine.run()


def test_a_cache_that_cannot_be_written_is_named_before_the_build(machine, cache):
    cache.touch()
    with pytest.raises(BuildError, match=rf"{cache}, cannot be written to .*set HVKIT_CACHE_DIR"):
        machine.run()
    assert machine.done == []


def test_failed_build_leaves_the_installed_horovod(machine, monkeypatch):
    def fail(*arguments):
        raise BuildError("compiling Horovod failed")

    monkeypatch.setattr(installer, "build", fail)
    machine.version = "0.28.1"
    with pytest.raises(BuildError, match="compiling"):
        machine.run()
    assert machine.version == "0.28.1"


@pytest.fixture
def pytorch_only(toolchain):
    return replace(toolchain, frameworks=toolchain.frameworks[:1])


@pytest.fixture
def horovod(tmp_path, monkeypatch):
    """A stand-in for horovod.torch; returns its file."""
    module = tmp_path / "site" / "horovod" / "torch" / "__init__.py"
    module.parent.mkdir(parents=True)
    (module.parent.parent / "__init__.py").touch()
    module.write_text("print('noise')\nmpi_built = lambda: True\nnccl_built = lambda: 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return module


def test_working_horovod(pytorch_only, horovod):
    installer.check(pytorch_only)


def test_failed_import_is_shown(pytorch_only, horovod):
    horovod.write_text("raise ImportError('libmpi.so.40: cannot open shared object file')")
    with pytest.raises(BuildError, match=r"(?s)importing it failed.*libmpi\.so\.40: cannot open"):
        installer.check(pytorch_only)


def test_missing_engine_is_named(pytorch_only, horovod, tmp_path):
    with pytest.raises(BuildError, match=r"horovod\.torch was built without nccl"):
        installer.check(replace(pytorch_only, cuda=Toolkit(tmp_path, "13.0")))
