"""Open MPI's settings about networks, as its files and variables make them."""

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


class Site:
    """A home, and an Open MPI in a folder of its own."""

    def __init__(self, folder):
        self.home = folder / "home"
        self.prefix = folder / "mpi"
        self.mpirun = self.prefix / "bin" / "mpirun"
        for one in (self.home, self.mpirun.parent):
            one.mkdir(parents=True)
        self.mpirun.touch()

    def write(self, name, text):
        file = (self.home if name.startswith(".") else self.prefix / "etc") / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return file

    def options(self, major, asked=False, **environ):
        """The options about networks."""
        network = ("10.0.0.0/24",)
        job = Job(
            (Host("node1", slots=1),),
            ("true",),
            networks=network,
            daemon_networks=network,
            networks_asked_for=asked,
            environ={"HOME": str(self.home), **environ},
        )
        words = launchers.openmpi_arguments(major, str(self.mpirun), job)
        places = [place for place, word in enumerate(words) if "if_" in word]
        return [word for place in places for word in words[place - 1 : place + 2]]


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


OF_USER, OF_SITE = ".openmpi/mca-params.conf", "openmpi-mca-params.conf"


@pytest.mark.parametrize("major", [4, 5])
@pytest.mark.parametrize("file", [OF_USER, OF_SITE])
@pytest.mark.parametrize("line", ["btl_tcp_if_exclude = lo", "  btl_tcp_if_include=eth1"])
def test_parameters_of_ranks_in_a_file_take_precedence(site, major, file, line):
    site.write(file, "# btl_tcp_if_include = eth1\nbtl = tcp,self\n")
    assert site.options(major) == [*DAEMONS[major], *BTL]
    site.write(file, f"mpi_x = 1\n{line}\n")
    assert site.options(major) == DAEMONS[major]


@pytest.mark.parametrize(
    ("major", "file", "name"),
    [
        (4, OF_USER, "oob_tcp_if_exclude"),
        (4, OF_SITE, "oob_tcp_if_include"),
        (5, ".prte/mca-params.conf", "prte_if_include"),
        (5, "prte-mca-params.conf", "oob_tcp_if_exclude"),
    ],
)
def test_parameters_of_daemons_in_a_file_take_precedence(site, major, file, name):
    site.write(file, f"{name} = eth1\n")
    assert site.options(major) == BTL


@pytest.mark.parametrize(
    ("variable", "left"),
    [
        ("OMPI_MCA_btl_tcp_if_include", DAEMONS[5]),
        ("OMPI_MCA_btl_tcp_if_exclude", DAEMONS[5]),
        ("PRTE_MCA_prte_if_exclude", BTL),
        ("PRTE_MCA_oob_tcp_if_include", BTL),
    ],
)
def test_parameters_in_the_environment_take_precedence(site, variable, left):
    assert site.options(5, **{variable: "eth1"}) == left


def test_a_launcher_that_is_a_link_has_the_files_of_the_installation(site):
    site.write(OF_SITE, "btl_tcp_if_exclude = lo\n")
    link = site.home / "mpirun"
    link.symlink_to(site.mpirun)
    site.mpirun = link
    assert site.options(5) == DAEMONS[5]


def test_interfaces_that_were_asked_for_win_but_not_over_a_file_that_excludes(site):
    site.write(OF_USER, "btl_tcp_if_include = eth1\n")
    assert site.options(5, asked=True) == [*DAEMONS[5], *BTL]
    file = site.write(OF_USER, "btl_tcp_if_exclude = eth1\n")
    with pytest.raises(LaunchError, match=f"{file} sets btl_tcp_if_exclude, .*: delete that line"):
        site.options(5, asked=True)
