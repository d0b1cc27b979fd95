"""Two hosts, node1, which is this one, and node2, as ``hvkit run`` finds them."""

import os
from functools import partial

import pytest

import hvkit
from hvkit.host.network import Interface
from hvkit.launching import launchers, preflight, prepare
from hvkit.launching.launchers import Launcher
from hvkit.launching.probe import Facts
from hvkit.launching.ssh import Answer

DOCKER = Interface("docker0", "172.17.0.1", "172.17.0.0/16")


class Hosts(dict):
    """By name the facts of each host, or what a probe there returns instead; tests change them."""

    docker = DOCKER

    def facts(self, number, **changes):
        own = Interface("eth0", f"10.0.0.{number}", "10.0.0.0/24")
        known = {"version": hvkit.__version__, "hostname": f"node{number}", "cpus": 2}
        return Facts(**{**known, "interfaces": (DOCKER, own), **changes})

    def change(self, number, **changes):
        self[f"node{number}"] = self.facts(number, **changes)

    def answer(self, host):
        known = self[host.name]
        if isinstance(known, Facts):
            return Answer(host, 0, f"Welcome!\n{known.printed()}\nBye\n", "", None)
        return Answer(host, *known)


@pytest.fixture
def hosts(monkeypatch, tmp_path):
    hosts = Hosts()
    hosts.change(1)
    hosts.change(2)
    monkeypatch.setattr(preflight, "run_on_hosts", lambda them, *_: [*map(hosts.answer, them)])
    monkeypatch.setattr(Facts, "here", lambda *_: hosts["node1"])
    monkeypatch.setattr(preflight, "is_local", lambda name: name == "node1")
    monkeypatch.setattr(preflight, "addresses_of", lambda name: [f"10.0.0.{name[-1]}"])
    monkeypatch.setattr(preflight, "source_address", lambda name: "10.0.0.1")
    monkeypatch.setattr(preflight, "interfaces", lambda: hosts["node1"].interfaces)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", str(tmp_path))
    mpirun = str(tmp_path / "mpi" / "bin" / "mpirun")
    found = Launcher("Open MPI 5.0.11", "mpirun", partial(launchers.openmpi_arguments, 5, mpirun))
    monkeypatch.setattr(prepare, "find_launcher", lambda name: found)
    return hosts
