"""Settings of hypothesis; Slurm's programs, replaced by scripts that run on this host."""

import os
from pathlib import Path

import lighter_keras  # noqa: F401
import pytest
from hypothesis import settings
from scripts import write_program

# A busy machine fails no test for being slow.
settings.register_profile("hvkit", deadline=None)
settings.load_profile("hvkit")

# Expands the lists that tests use, as the real scontrol of Slurm 22.05 prints them.
SCONTROL = """#!/bin/sh
[ "$1 $2 $#" = "show hostnames 3" ] || exit 1
case $3 in
    'gpu[1-2]') names='gpu1 gpu2' ;;
    'gpu[01-03],login1') names='gpu01 gpu02 gpu03 login1' ;;
    'gpu[3-1]')
        echo 'scontrol: error: _parse_single_range: Invalid range: `3-1'\\''' >&2
        echo 'Invalid hostlist: gpu[3-1]' >&2
        exit 0 ;;
    'gpu[1-2') names='gpu]' ;;
    *) IFS=,; names=$3 ;;
esac
[ -z "$names" ] || printf '%s\\n' $names
"""
# Runs the command on this host, and writes the host that was named to the file `asked`.
SRUN = """#!/bin/sh
while :; do
    case $1 in
        --nodelist=*) echo "${1#--nodelist=}" >> "$(dirname "$0")/asked"; shift ;;
        -*) shift ;;
        *) exec "$@" ;;
    esac
done
"""
# Nobody can log in.
NO_SSH = "#!/bin/sh\nexit 255\n"


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in for scontrol, first on PATH."""
    return _on_path(tmp_path, monkeypatch, scontrol=SCONTROL) / "scontrol"


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a srun that runs all commands here, and of a ssh that runs none."""
    return _on_path(tmp_path, monkeypatch, srun=SRUN, ssh=NO_SSH)


def _on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> Path:
    folder = tmp_path / "slurm"
    for name, text in programs.items():
        write_program(folder / name, text)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder
