"""``hvkit hosts --check`` on hosts that are right, and on hosts with something wrong."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from cases import MORE
from rig import Host, Rig

_Rig = Callable[[Sequence[str]], Rig]
_CORES = len(os.sched_getaffinity(0))


def _check(host: Host, hosts: str) -> subprocess.CompletedProcess[str]:
    return host.run([sys.executable, "-m", "hvkit", "hosts", "-H", hosts, "--check"], timeout=300)


def _must(host: Host, *command: str) -> None:
    done = host.run(list(command), timeout=60)
    assert done.returncode == 0, done.stderr


def _edit(host: Host, file: str, *commands: str) -> None:
    """Change a file of the host by commands of sed."""
    _must(host, "sed", "-i", "; ".join(commands), file)


def _rows(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """The table, by host; without its head."""
    lines = [line for line in done.stdout.splitlines() if not line.startswith("problem: ")]
    return {words[0]: words[1:] for words in map(str.split, lines[1:])}


def _problems(done: subprocess.CompletedProcess[str]) -> list[str]:
    lines = done.stdout.splitlines()
    return [line.removeprefix("problem: ") for line in lines if line.startswith("problem: ")]


def test_right_hosts_are_fine_and_tell_the_interface_that_leads_to_the_others(rig: _Rig) -> None:
    hosts = rig(["node1", "node2", "node3"])
    done = _check(hosts.host("node1"), "node1:1,node2:1,node3:1")
    assert (done.returncode, _problems(done)) == (0, []), done.stdout + done.stderr
    for name, row in _rows(done).items():
        assert row[:3] == ["1", str(_CORES), "0"]
        # Every host has a docker0 with the same address, too.
        assert row[-3:] == ["eth0", hosts.host(name).address, "fine"]


def test_each_host_that_cannot_be_asked_is_told_with_what_to_do(rig: _Rig) -> None:
    hosts = rig(["node1", "nologin", "dead", "nosshd", "nopython", "unknown", "changed"])
    first = hosts.host("node1")
    _must(hosts.host("nologin"), "rm", "/etc/ssh/authorized_keys")
    _must(hosts.host("nosshd"), "sh", "-c", "kill $(cat /run/sshd.pid)")
    _must(hosts.host("nopython"), "mount", "-t", "tmpfs", "none", str(Path(sys.executable).parent))
    known = "/etc/ssh/ssh_known_hosts"
    _edit(first, known, "/^unknown,/d", "/^changed,/d", "s/^nologin,[^ ]*/&,changed/")
    hosts.cut("dead")
    done = _check(
        first, "node1:1,nologin:1,dead:1,nosshd:1,nopython:1,unknown:1,changed:1,nosuch:1"
    )
    assert done.returncode == 1
    told = dict(problem.split(": ", 1) for problem in _problems(done))
    assert told.pop("nologin").startswith("ssh cannot log in there without a password")
    # The error depends on whether the two hosts were connected before.
    assert told.pop("dead").startswith(("nothing answers on its ssh port", "no route to it"))
    assert told.pop("nosshd").startswith("it is up but nothing listens on its ssh port")
    assert told.pop("nopython").startswith(f"{sys.executable} cannot be started there (")
    assert told.pop("unknown").startswith("its ssh host key is not known here")
    assert told.pop("changed").startswith("its ssh host key differs from the one known here")
    assert told.pop("nosuch").startswith("its name does not resolve here")
    assert told == {}
    assert {row[-1] for name, row in _rows(done).items() if name == "node1"} == {"fine"}
    assert first.run(["ls", "-A"]).stdout.split() == [], "ssh kept something in the home folder"


@MORE
def test_hosts_that_cannot_reach_each_other_are_told(rig: _Rig) -> None:
    names = ["node1", "node2", "node3", "node4"]
    hosts = rig(names)
    node2, node3, node4 = map(hosts.host, names[1:])
    # As a firewall that lets ssh pass and no other port.
    firewall = ["pref", "10", "ipproto", "tcp", "sport", "1024-65534", "unreachable"]
    _must(node4, "ip", "rule", "add", "to", "10.77.0.0/24", *firewall)
    _must(node2, "ip", "route", "add", "unreachable", node3.address)
    _edit(node2, "/etc/hosts", f"s/^{node2.address} /127.0.1.1 /")
    _edit(node3, "/etc/hosts", "s/^.* node1$/172.17.0.1 node1/", "/ node4$/d")
    done = _check(hosts.host("node1"), ",".join(f"{name}:1" for name in names))
    assert done.returncode == 1
    closed = {
        "node1, node2: cannot reach node4": f" ({node4.address} timed out): is that its address",
        "node2: cannot reach node3": f" ({node3.address} no route to host): is that",
        # Every host has an interface of this address.
        "node3: cannot reach node1": " (172.17.0.1 connection refused): is that its address",
        "node3: cannot reach node2": f" ({node2.address} timed out): is that its address",
        "node3: cannot reach node4": ": its name has no IPv4 address there; add it to DNS",
        "node2: its own name, node2, resolves to 127.0.1.1": " there, which no other host can",
        **{
            f"node4: cannot reach {name}": f" ({hosts.host(name).address} network is unreachable)"
            for name in names[:3]
        },
    }
    told = _problems(done)
    for start, rest in closed.items():
        assert [line for line in told if line.startswith(start + rest)], (start + rest, told)
    assert len(told) == len(closed), told


def test_versions_that_differ_and_slots_without_cores_are_told(rig: _Rig, tmp_path: Path) -> None:
    hosts = rig(["node1", "node2"])
    package = metadata.distribution("numpy")
    (file,) = [one for one in package.files or () if str(one).endswith(".dist-info/METADATA")]
    other = tmp_path / "METADATA"
    text = Path(str(file.locate())).read_text()
    other.write_text(text.replace(f"\nVersion: {package.version}\n", "\nVersion: 1.0.7\n"))
    _must(hosts.host("node2"), "mount", "--bind", str(other), str(file.locate()))
    done = _check(hosts.host("node1"), f"node1:1,node2:{_CORES + 1}")
    assert done.returncode == 1
    told = _problems(done)
    assert (
        f"node1, node2: numpy differs ({package.version} on node1; 1.0.7 on node2): install the "
        "same version on all hosts"
    ) in told
    room = f"node2: {_CORES + 1} slots but {_CORES} core"
    assert [line for line in told if line.startswith(room)]
    assert {name: row[-1] for name, row in _rows(done).items()}["node2"].startswith("problem")


def test_two_names_of_one_host_and_localhost_are_told(rig: _Rig) -> None:
    hosts = rig(["node1", "node2"])
    address = hosts.host("node2").address
    done = _check(hosts.host("node1"), f"localhost:1,node2:1,{address}:1")
    assert done.returncode == 1
    assert _problems(done) == [
        "localhost: means a different host on every host: use the name that the others reach it by",
        f"node2, {address}: are one host, node2: name it once, with all its slots",
    ]
