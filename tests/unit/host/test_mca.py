"""Open MPI's settings about networks, as its files and variables make them."""

from pathlib import Path

import pytest

from hvkit.errors import LaunchError
from hvkit.launching import launchers
from hvkit.launching.hosts import Host
from hvkit.launching.launchers import Job

BTL = ["--mca", "btl_tcp_if_include", "10.0.0.0/24"]
DAEMONS = {
    4: ["--mca", "oob_tcp_if_include", "10.0.0.0/24"],
    5: ["--prtemca", "prte_if_include", "10.0.0.0/24"],
}


class _Site:
    """A home, and an Open MPI in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.prefix = folder / "mpi"
        self.mpirun = self.prefix / "bin" / "mpirun"
        for one in (self.home, self.mpirun.parent):
            one.mkdir(parents=True)
        self.mpirun.touch()

    def write(self, name: str, text: str) -> Path:
        file = (self.home if name.startswith(".") else self.prefix / "etc") / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return file

    def options(self, major: int, asked: bool = False) -> list[str]:
        """The options about networks."""
        network = ("10.0.0.0/24",)
        job = Job(
            (Host("node1", slots=1),),
            ("true",),
            networks=network,
            daemon_networks=network,
            networks_asked_for=asked,
            environ={"HOME": str(self.home)},
        )
        words = launchers.openmpi_arguments(major, str(self.mpirun))(job)
        places = [place for place, word in enumerate(words) if "if_" in word]
        return [word for place in places for word in words[place - 1 : place + 2]]


@pytest.fixture
def site(tmp_path: Path) -> _Site:
    return _Site(tmp_path)


@pytest.mark.parametrize("major", [4, 5])
def test_where_no_file_speaks_of_interfaces_hvkit_names_them(site: _Site, major: int) -> None:
    site.write(".openmpi/mca-params.conf", "# btl_tcp_if_include = eth1\nbtl = tcp,self\n")
    assert site.options(major) == [*DAEMONS[major], *BTL]


@pytest.mark.parametrize("major", [4, 5])
@pytest.mark.parametrize("file", [".openmpi/mca-params.conf", "openmpi-mca-params.conf"])
@pytest.mark.parametrize("line", ["btl_tcp_if_exclude = lo", "  btl_tcp_if_include=eth1"])
def test_what_a_file_sets_for_ranks_is_left_to_it(
    site: _Site, major: int, file: str, line: str
) -> None:
    site.write(file, f"mpi_x = 1\n{line}\n")
    assert site.options(major) == DAEMONS[major]


@pytest.mark.parametrize(
    ("major", "file", "name"),
    [
        (4, ".openmpi/mca-params.conf", "oob_tcp_if_exclude"),
        (4, "openmpi-mca-params.conf", "oob_tcp_if_include"),
        (5, ".prte/mca-params.conf", "prte_if_include"),
        (5, "prte-mca-params.conf", "oob_tcp_if_exclude"),
    ],
)
def test_what_a_file_sets_for_daemons_is_left_to_it(
    site: _Site, major: int, file: str, name: str
) -> None:
    site.write(file, f"{name} = eth1\n")
    assert site.options(major) == BTL


def test_a_launcher_that_is_a_link_has_the_files_of_the_installation(site: _Site) -> None:
    site.write("openmpi-mca-params.conf", "btl_tcp_if_exclude = lo\n")
    link = site.home / "mpirun"
    link.symlink_to(site.mpirun)
    site.mpirun = link
    assert site.options(5) == DAEMONS[5]


def test_interfaces_that_were_asked_for_win_over_those_that_a_file_includes(site: _Site) -> None:
    site.write(".openmpi/mca-params.conf", "btl_tcp_if_include = eth1\n")
    assert site.options(5, asked=True) == [*DAEMONS[5], *BTL]


def test_a_file_that_excludes_is_named_when_interfaces_are_asked_for(site: _Site) -> None:
    file = site.write(".openmpi/mca-params.conf", "btl_tcp_if_exclude = eth1\n")
    with pytest.raises(LaunchError, match=f"{file} sets btl_tcp_if_exclude, .*: delete that line"):
        site.options(5, asked=True)
