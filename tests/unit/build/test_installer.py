"""The command and the steps of the installation, with stand-ins for the compiler and for pip."""

import errno
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from unittest.mock import Mock

import pytest
from fake_wheels import wheel_of

from hvkit import cli
from hvkit.build import BuildOptions, install_horovod, installer, ready_wheels, wheels
from hvkit.build.cuda import Toolkit
from hvkit.errors import BuildError


class Computer:
    """Records builds and installations instead of making them."""

    def __init__(self, toolchain, abi, folder):
        self.toolchain, self.abi, self.folder = toolchain, abi, folder
        self.version = None
        self.done = []

    def build(self, toolchain, key, jobs):
        self.done.append("build")
        return wheels.store_wheel(wheel_of(self.abi, self.folder, key.version), key)

    def install(self, wheel):
        self.done.append("install")
        self.version = wheel.name.split("-")[1]

    def run(self, **options):
        """Run the command and return the steps that it took."""
        self.done = []
        install_horovod(BuildOptions(**options))
        return self.done


@pytest.fixture
def computer(toolchain, abi, tmp_path, monkeypatch):
    stand_in = Computer(toolchain, abi, tmp_path)
    toolkits = {"auto": None, "none": None, "nccl": Toolkit(tmp_path, "13.0")}
    for name, replaced in {
        "find_toolchain": lambda without: stand_in.toolchain,
        "toolkit_for": lambda choice, frameworks: toolkits[choice],
        "build": stand_in.build,
        "installed_version": lambda: stand_in.version,
        "install": stand_in.install,
        "check": lambda toolchain: stand_in.done.append("check"),
    }.items():
        monkeypatch.setattr(installer, name, replaced)
    return stand_in


ALL = ["build", "install", "check"]


def test_the_second_call_does_nothing(computer, capsys):
    assert computer.run() == ALL
    assert computer.run() == []
    assert "is installed already" in capsys.readouterr().out


@pytest.mark.parametrize("version", [None, "0.28.1", "0.28.1+hvkit000000000000", "0.21.0"])
def test_the_cached_wheel_replaces_horovod_of_another_build_or_none(computer, version):
    computer.run()
    computer.version = version
    assert computer.run() == ["install", "check"]


def test_force_and_changed_ingredients_rebuild(computer):
    computer.run()
    assert computer.run(force=True) == ALL
    assert computer.run(gpu="nccl") == ALL
    assert computer.run(gpu="none") == ["install", "check"]
    computer.toolchain = replace(computer.toolchain, frameworks=computer.toolchain.frameworks[:1])
    assert computer.run() == ALL


def test_it_waits_for_another_process_that_installs_into_this_python(computer, monkeypatch):
    holds = (
        "import sys; from hvkit.host.system import claim\n"
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
            assert computer.run() == ALL
    assert "another process is installing Horovod into this Python; waiting" in said


def test_wheel_dir_gets_the_wheel_also_when_it_is_installed_already(computer, tmp_path):
    computer.run()
    folder = tmp_path / "a" / "b"
    assert computer.run(wheel_dir=folder) == []
    (wheel,) = folder.glob("*.whl")
    (listed,) = json.loads((folder / ready_wheels.INDEX).read_text())
    assert (
        listed["name"] == wheel.name == f"horovod-{computer.version}-cp311-cp311-linux_x86_64.whl"
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/tmp/x"),
            r"the disk is full: .*'/tmp/x'.*TMPDIR",
        ),
        (BuildError("compiling Horovod failed"), "compiling"),
    ],
)
def test_failed_build_is_explained_and_leaves_the_installed_horovod(
    computer, monkeypatch, error, message
):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(installer, "build", fail)
    computer.version = "0.28.1"
    with pytest.raises(BuildError, match=message):
        computer.run()
    assert computer.version == "0.28.1"


def test_a_cache_that_cannot_be_written_is_named_before_the_build(computer, cache):
    cache.touch()
    with pytest.raises(
        BuildError, match=rf"Not a directory: .*set HVKIT_CACHE_DIR \(now {cache}\)"
    ):
        computer.run()
    assert computer.done == []


def test_a_folder_that_cannot_be_made_far_below_another_is_named(computer, monkeypatch):
    far_below = "/proc/hvkit/two/levels"
    monkeypatch.setenv("HVKIT_CACHE_DIR", far_below)
    with pytest.raises(BuildError, match=rf"'/proc/hvkit': .*\(now {far_below}\)"):
        computer.run()
    with pytest.raises(BuildError, match=r"'/proc/hvkit': .*or --wheel-dir, to a folder"):
        computer.run(wheel_dir=Path(far_below))


def test_of_errors_those_of_locks_and_of_these_folders_are_the_folders(computer, monkeypatch):
    for error, raised in (
        (OSError(errno.ENOLCK, "No locks available"), BuildError),
        (PermissionError(errno.EACCES, "Permission denied", "/elsewhere"), PermissionError),
        (NotImplementedError("in a wheel"), NotImplementedError),
    ):
        monkeypatch.setattr(installer, "lock", Mock(side_effect=error))
        with pytest.raises(raised):
            computer.run()


def test_the_installed_horovod_is_imported_and_must_have_the_engines(
    toolchain, tmp_path, monkeypatch
):
    module = tmp_path / "site" / "horovod" / "torch" / "__init__.py"
    module.parent.mkdir(parents=True)
    (module.parent.parent / "__init__.py").touch()
    module.write_text("print('noise')\nmpi_built = lambda: True\nnccl_built = lambda: 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    of_pytorch = replace(toolchain, frameworks=toolchain.frameworks[:1])
    installer.check(of_pytorch)
    with pytest.raises(BuildError, match=r"horovod\.torch was built without nccl"):
        installer.check(replace(of_pytorch, cuda=Toolkit(tmp_path, "13.0")))
    module.write_text("raise ImportError('libmpi.so.40: cannot open shared object file')")
    with pytest.raises(BuildError, match=r"(?s)importing it failed.*libmpi\.so\.40: cannot open"):
        installer.check(of_pytorch)


@pytest.fixture
def passed(monkeypatch):
    """The options that reach the installer."""
    options = []
    monkeypatch.setattr("hvkit.cli.installation.install_horovod", options.append)
    return options


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("", BuildOptions(without=[])),
        (
            "--force --jobs 3 --without tensorflow --gpu nccl --wheel-dir out",
            BuildOptions(True, 3, ["tensorflow"], "nccl", Path("out")),
        ),
    ],
)
def test_the_command_passes_its_options_on(passed, line, options):
    assert cli.main(["install-horovod", *line.split()]) == 0
    assert passed == [options]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--jobs 0", "must be a positive integer, got '0'"),
        ("--without mxnet", "'mxnet' (choose from"),
        ("--gpu rccl", "'rccl' (choose from"),
    ],
)
def test_wrong_arguments_are_named(passed, capsys, line, complaint):
    with pytest.raises(SystemExit) as caught:
        cli.main(["install-horovod", *line.split()])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err
    assert passed == []


def test_failure_is_one_message_and_status_1(monkeypatch, capsys):
    def fail(options):
        raise BuildError("no C++ compiler")

    monkeypatch.setattr("hvkit.cli.installation.install_horovod", fail)
    assert cli.main(["install-horovod"]) == 1
    assert capsys.readouterr().err == "hvkit: no C++ compiler\n"
