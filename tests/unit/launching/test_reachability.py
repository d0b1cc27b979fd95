"""Hosts that connect to each other: here all of them are this one, under different names."""

import json
import os
import subprocess
import sys

import psutil

from hvkit.launching.hosts import Host
from hvkit.launching.reachability import connect_all
from hvkit.launching.ssh import SSH, remote_shell

PROGRAM = [sys.executable, "-m", "hvkit.launching.reachability"]


def pairs(names):
    return {(one, other) for one in names for other in names if one != other}


def reached(connections):
    return {(reach.source, reach.target) for reach in connections.reaches}


def test_all_reach_all_and_know_their_interface():
    names = ["localhost", "127.0.0.1", "127.0.0.2"]
    connections = connect_all([Host(name) for name in names], SSH)
    assert connections.absent == ()
    assert reached(connections) == pairs(names)
    assert all(reach.reached for reach in connections.reaches)
    assert {each.interface for each in connections.reaches if each.target == "127.0.0.1"} == {"lo"}
    assert all(abs(seconds) < 20 for seconds in connections.ahead.values())
    running = psutil.process_iter(["ppid", "cmdline"])  # a process that has ended has no cmdline
    children = [each.info["cmdline"] for each in running if each.info["ppid"] == os.getpid()]
    assert not [words for words in children if "reachability" in str(words)]


def test_a_host_without_an_answer_is_absent_and_the_others_go_on(tmp_path, monkeypatch):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    connections = connect_all([Host("localhost"), Host("away.invalid"), Host("127.0.0.1")], SSH)
    assert connections.absent == ("away.invalid",)
    assert reached(connections) == pairs(["localhost", "127.0.0.1"])


def test_in_slurm_hosts_are_reached_over_srun(srun):
    names = ["node1.invalid", "node2.invalid"]
    connections = connect_all([Host(name) for name in names], remote_shell("Slurm"))
    assert connections.absent == ()
    assert reached(connections) == pairs(names)
    assert sorted((srun / "asked").read_text().split()) == names


def test_another_program_on_that_port_is_not_taken_for_the_host():
    with (
        subprocess.Popen(PROGRAM, stdin=-1, stdout=-1, text=True) as one,
        subprocess.Popen(PROGRAM, stdin=-1, stdout=-1, text=True) as other,
    ):
        place = json.loads(other.stdout.readline())["hvkit"]
        one.stdout.readline()
        wrong = {"name": "localhost", "port": place["port"], "token": "another"}
        right = {"name": "127.0.0.1", "port": place["port"], "token": place["token"]}
        nowhere = {"name": "nosuch.invalid", "port": 9, "token": ""}
        one.stdin.write(json.dumps([wrong, right, nowhere]) + "\n")
        one.stdin.flush()
        first, second, third = json.loads(one.stdout.readline())["hvkit"]["reached"]
        other.stdin.close()
        one.stdin.close()
    assert first["reached"] is None
    assert set(first["failures"]) == {"another host answers"}
    assert second["reached"] == "127.0.0.1"
    assert (third["reached"], third["addresses"]) == (None, [])


def test_the_program_ends_when_its_standard_input_ends():
    done = subprocess.run(PROGRAM, input="[]\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert [json.loads(line)["hvkit"].keys() for line in done.stdout.splitlines()] == [
        {"port", "token", "time"},
        {"reached"},
    ]
