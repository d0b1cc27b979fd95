"""``hvkit install-horovod`` passes its options on."""

from pathlib import Path

import pytest

from hvkit import cli
from hvkit.build import BuildOptions
from hvkit.cli import installation as command
from hvkit.errors import BuildError


@pytest.fixture
def passed(monkeypatch):
    """The options that reach the installer."""
    options = []
    monkeypatch.setattr(command, "install_horovod", options.append)
    return options


def test_defaults(passed):
    assert cli.main(["install-horovod"]) == 0
    assert passed == [BuildOptions(without=[], gpu="auto")]


def test_all_options(passed):
    line = "install-horovod --force --jobs 3 --without tensorflow --gpu nccl --wheel-dir out"
    assert cli.main(line.split()) == 0
    assert passed == [BuildOptions(True, 3, ["tensorflow"], "nccl", Path("out"))]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("install-horovod --jobs 0", "must be a positive integer, got '0'"),
        ("install-horovod --jobs many", "must be a positive integer, got 'many'"),
        ("install-horovod --without mxnet", "'mxnet' (choose from"),
        ("install-horovod --gpu rccl", "'rccl' (choose from"),
        ("install-horovd", "install-horovod"),
    ],
)
def test_wrong_arguments_are_named(passed, capsys, line, complaint):
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err
    assert passed == []


def test_failure_is_one_message_and_status_1(monkeypatch, capsys):
    def fail(options):
        raise BuildError("no C++ compiler")

    monkeypatch.setattr(command, "install_horovod", fail)
    assert cli.main(["install-horovod"]) == 1
    assert capsys.readouterr().err == "hvkit: no C++ compiler\n"


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("hvkit 0.")
