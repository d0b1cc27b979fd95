"""Malformed inputs of every kind, made at random from good ones: each ends with a clear error.

No traceback, no partial result, no hang: an input gives an error of the kind that its reader
announces, or is read as a whole.
"""

import contextlib
import io
import json
import random
import re
import shutil
import socket
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import MORE

import hvkit
from hvkit.cli import main
from hvkit.communication.encoding import decode, encode
from hvkit.connections import ConnectionLost, connect, frame
from hvkit.errors import HostfileError, HvkitError, LaunchError
from hvkit.launching.allocation import allocation
from hvkit.launching.hosts import parse_hostfile, read_hostfile, read_hosts_option
from hvkit.launching.supervision import protocol
from hvkit.launching.supervision.protocol import AgentConnection, Frame
from hvkit.launching.supervision.rank_output import Style
from hvkit.launching.supervision.run_status import RankReports
from hvkit.launching.supervision.supervisor import Supervisor
from hvkit.monitor.recorded_run import read
from hvkit.monitor.report_page import page

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2] / "recipes")
    from common import cifar10, mnist
    from common.images import DataError

TOKENS = [
    *(b"", b"\0", b"\xff\xfe", b"\n", b" ", b"-", b"--", b"=", b":", b",", b"'", b'"', b"$(id)"),
    *(b"..", b"/", b"%s", b"{}", b"[]", b"null", b"true", b"-1", b"0", b"1e999", b"NaN"),
    *(b"99999999999999999999", b"0x10", "é漢".encode(), b"[" * 3000, b"\x1b[2J", b"{" * 200),
]


def mutated(data, rng):
    """The bytes with one to four things wrong."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        to = min(len(data), at + rng.randint(0, 12))
        match rng.randrange(6):
            case 0 if data:  # another byte
                spot = rng.randrange(len(data))
                data = data[:spot] + bytes([rng.randrange(256)]) + data[spot + 1 :]
            case 1:  # less
                data = data[:at] + data[to:]
            case 2:  # twice
                data = data[:to] + data[at:]
            case 3:  # cut off
                data = data[:at]
            case 4:  # in another place
                data = data[:at] + data[to:] + data[at:to]
            case _:
                data = data[:at] + rng.choice(TOKENS) + data[to:]
    return data


def each(number, data, seed=0):
    """So many mutations of the pieces of data, the same at each call."""
    rng = random.Random(seed)
    for _ in range(number):
        yield mutated(rng.choice(data), rng)


FLAGS = [
    "run --dry-run -np 4 -H node1:2,node2:2 --max-restarts 3 --min-np 2 --stall 60 python a.py",
    "run --dry-run -np 2 --interfaces eth0,10.0.0.0/24 -x NAME=1 --bind none -- python a.py --lr 1",
    "run --dry-run --hostfile FILE --lost-after 30 --grace 5 --show 0,2-3 --prefix python a.py",
    "run --dry-run -np 2 --timeline t.json --log-dir logs --timestamps --launcher gloo true",
    "hosts FILE",
    "hosts -H a:1,b:2",
    "manifest mpijob --name job --image registry/x:1 -np 4 --slots 2 --max-restarts 1 python a.py",
    "manifest slurm -np 8 --slots 4 --time 1:00:00 --max-restarts 2 python train.py",
    "report FILE",
    "top 12345 --once",
]


@MORE
def test_command_lines(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("node1 slots=2\nnode2 slots=2\n")

    def refuse(*_, **__):
        raise LaunchError("no hosts are asked here")

    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("hvkit.launching.prepare.choose_hosts", refuse)
    statuses = set()
    for line in each(600, [flags.encode() for flags in FLAGS]):
        words = [word for word in line.decode(errors="surrogateescape").split(" ") if word]
        if words[:1] == ["run"] and "--dry-run" not in words[:2]:
            words[:1] = ["run", "--dry-run"]
        if {"--check", "install-horovod"} & set(words) or words[:1] == ["doctor"]:
            continue
        try:
            statuses.add(main(words))
        except SystemExit as end:
            statuses.add(end.code)
        said = capfd.readouterr()
        assert "Traceback" not in said.err + said.out
    assert statuses == {0, 1, 2}
    # A manifest or report that was refused has left nothing.
    assert {path.name for path in tmp_path.iterdir()} == {"FILE"}


HOSTFILES = [
    b"# GPUs\nnode1 slots=4 max_slots=8\nnode2 slots=4\n\nroot@node-3:4\n10.0.0.1 slots=1\n",
    b"node1:4\nnode2:4 # comment\nnode-3.example.com:2\n",
]


def test_hostfiles(tmp_path):
    refused = 0
    for data in each(400, HOSTFILES):
        path = tmp_path / "hosts"
        path.write_bytes(data)
        error = None
        try:
            hosts = read_hostfile(path)
        except HostfileError as problem:
            error = problem
        if error:
            refused += 1
            assert str(path) in str(error)
        else:
            assert hosts
            assert all(host.slots is None or host.slots > 0 for host in hosts)
    assert 100 < refused < 400


ALLOCATIONS = [
    {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3,7],m4", "SLURM_TASKS_PER_NODE": "2(x4),1"},
    {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[01-10]", "SLURM_STEP_TASKS_PER_NODE": "4(x10)"},
    {"PBS_JOBID": "3.s", "PBS_NODEFILE": "FILE"},
    {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "a 4 b 2"},
    {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_NUM_GPUS": "8"},
    {"OMPI_MCA_orte_default_hostfile": "FILE"},
]


def test_damaged_variables_of_batch_systems_are_read_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(2)
    for _ in range(300):
        environ = {
            name: mutated(value.encode(), rng).decode(errors="replace").replace("\0", "")
            for name, value in rng.choice(ALLOCATIONS).items()
        }
        content = mutated(b"node1\nnode1\nnode2\n", rng)
        (tmp_path / "FILE").write_bytes(content)
        with contextlib.suppress(LaunchError, HostfileError):
            found = allocation(environ)
            assert found is None or all(host.slots != 0 for host in found.hosts)


def test_checkpoints(tmp_path):
    rng = random.Random(3)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    good = tmp_path / "good"
    weights = []
    for step in (1, 2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        weights.append(model.weight.detach().clone())
        hvkit.Checkpoint(good, model=model, optimizer=optimizer).save(epoch=0, step=step)
    ends = set()
    for number in range(100):
        folder = tmp_path / str(number)
        shutil.copytree(good, folder)
        for saved in sorted(folder.glob("step-*"))[-rng.randint(1, 2) :]:
            file = rng.choice(sorted(path for path in saved.iterdir() if path.is_file()))
            file.write_bytes(mutated(file.read_bytes(), rng))
        with torch.no_grad():
            model.weight.fill_(7)
        try:
            found = hvkit.Checkpoint(folder, model=model, optimizer=optimizer).restore().step
        except HvkitError:
            found = -1
        ends.add(found)
        expected = {-1: torch.full((2, 3), 7.0), 0: torch.full((2, 3), 7.0)}
        expected |= dict(enumerate(weights, 1))
        assert torch.equal(model.weight, expected[found])
        shutil.rmtree(folder)
    assert {1, 2} < ends


METRICS = (
    b'{"start": {"time": 1.0, "step": 0, "hosts": ["a", "b"]}}\n'
    b'{"step": 10, "time": 2.0, "loss": 0.5, "steps": 10, "samples_per_second": 3.0, "ranks": '
    b'{"samples_per_second": [1.0, 2.0], "last": [3, 7]}, "seconds": {"step": 0.1, "data": 0.1}, '
    b'"sent": {"gradients": 4}, "host": {"a": {"cpu": 3.0}}}\n'
    b'{"step": 12, "time": 3.0, "logged": {"accuracy": 0.5}}\n'
    b'{"start": {"time": 4.0, "step": 5, "hosts": ["a"], "restart": 1, "reason": "x"}}\n'
    b'{"step": 20, "time": 5.0, "loss": 0.25, "steps": 5, "samples_per_second": 3.0}\n'
    b'{"end": {"time": 6.0}}\n'
)


HOSTS = [b"node1:4,node2:4,[::1]:2", b"a,b,c"]


def is_monitor_file(folder, data):
    (folder / "metrics.jsonl").write_bytes(data)
    (contents,) = re.findall(r'id="data">(.*?)</script>', page(read(folder)))
    return json.loads(contents, parse_constant=pytest.fail)["sections"]


def is_mnist(folder, data):
    (folder / "pixels").write_bytes(data)
    (folder / "labels").write_bytes(struct.pack(">II", 0x801, 3) + b"\1\2\3")
    images = mnist.read_images(folder / "pixels", folder / "labels")
    return len(images.pixels) == len(images.labels)


def is_cifar(folder, data):
    (folder / "records").write_bytes(data)
    images = cifar10.read_images([folder / "records"])
    return len(images.pixels) == len(images.labels)


MNIST = struct.pack(">IIII", 0x803, 3, 28, 28) + bytes(3 * 28 * 28)
CIFAR10 = (bytes([5]) + bytes(3072)) * 2
MESSAGES = [
    encode(["a", 1, None, 2.5, {"k": (1, 2)}, b"bytes", {1, 2}]),
    encode({"weights": np.arange(6.0).reshape(2, 3), "tensor": torch.ones(2)}),
    encode([ValueError("x"), "text" * 20]),
]


@pytest.mark.parametrize(
    ("whole", "refusal", "good"),
    [
        (lambda _, data: read_hosts_option(data.decode(errors="replace")), HostfileError, HOSTS),
        (lambda _, data: parse_hostfile(data.decode(errors="replace"), ""), HostfileError, HOSTS),
        (is_monitor_file, HvkitError, [METRICS]),
        (is_mnist, DataError, [MNIST]),
        (is_cifar, DataError, [CIFAR10]),
        (lambda _, data: encode(decode(data)), ValueError, MESSAGES),
    ],
    ids=["-H", "hostfile", "monitor", "MNIST", "CIFAR-10", "messages"],
)
def test_damaged_inputs_are_read_whole_or_refused(whole, refusal, good, tmp_path):
    readable = 0
    for data in each(250, good):
        with contextlib.suppress(refusal):
            assert whole(tmp_path, data)
            readable += 1
    assert 0 < readable < 250


KEY = b"k" * 32
REPORTS = [
    *(b'{"saved": 3, "directory": "a"}', b'{"resumes": 2, "directory": "a"}', b'{"cause": "x"}'),
    *(b'{"terminated": true}', b'{"now": {"step": 2}}'),
    b'{"now": {"call": "", "waits": 0, "where": "", "step": 2, "made": 1.5}}',
]
FRAMES = [
    frame(Frame.HELLO, b'{"rank": 1, "host": "a"}'),
    frame(Frame.STDOUT, b"text\n"),
    *(frame(Frame.REPORT, line) for line in REPORTS),
    frame(Frame.SPANS, b'{"spans": [["fit", null, 0, 1.5, 20]]}'),
    frame(Frame.CLOCK, b'{"number": 1, "now": 3.5}'),
    frame(Frame.ENDED, b'{"status": 0, "ago": 0.1}'),
]


def test_messages_to_the_supervisor(capfd):
    """Agents that send nonsense are lost; those of other ranks are served as before."""
    rng = random.Random(4)

    def good(port):
        connected = connect(["127.0.0.1"], port, KEY)
        hello = frame(Frame.HELLO, b'{"rank": 0, "host": "here"}')
        connected.sendall(hello + frame(Frame.REPORT, b'{"saved": 41}'))
        return connected

    def bad(port):
        with contextlib.suppress(OSError):
            if rng.random() < 0.2:  # does not know the key
                connected = socket.create_connection(("127.0.0.1", port), timeout=10)
                connected.sendall(rng.randbytes(rng.randint(0, 200)))
            else:
                connected = connect(["127.0.0.1"], port, KEY)
                frames = [FRAMES[0].replace(b"1", str(rng.randint(1, 3)).encode(), 1)]
                frames += rng.choices(FRAMES[1:], k=3)
                connected.sendall(mutated(b"".join(frames), rng))
            connected.close()

    supervisor = Supervisor(400, KEY, Style(), None, lambda: None)
    port = supervisor.listen("127.0.0.1")
    with good(port) as connected:
        for _ in range(250):
            bad(port)
        connected.sendall(frame(Frame.REPORT, b'{"saved": 42}'))
        deadline = time.monotonic() + 30
        while (supervisor.reports.saved or 0) < 42:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        connected.sendall(frame(Frame.ENDED, b'{"status": 0}'))
        assert connected.recv(100) == b""
    supervisor.close()
    assert not [each for each in supervisor.failures if each.rank == 0]
    assert "Traceback" not in capfd.readouterr().err


def receive_all(connection):
    while True:
        kind, number = connection.receive()
        assert kind in Frame
        assert number >= 0


def test_messages_to_an_agent():
    frames = [
        frame(kind, protocol.packed(3))
        for kind in (Frame.TAKEN, Frame.SIGNAL, Frame.STOP, Frame.INTERRUPT, Frame.ASK)
    ]
    for data in each(250, [b"".join(frames)]):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(20)
            connection = AgentConnection(ours, b"key")
            theirs.sendall(data)
            theirs.close()
            with pytest.raises(ConnectionLost):
                receive_all(connection)


def test_reports_of_ranks(tmp_path):
    """Lines in the pipe of a rank, to which its script may write."""
    fields = {"number": 0, "host": "a", "reports": RankReports(), "speed": None}
    supervisor_rank = type("Rank", (), fields)()

    supervisor = Supervisor(2, KEY, Style(), None, lambda: None)
    for line in each(300, [*REPORTS, b'{"speed": 3.5}', json.dumps({"left": True}).encode()]):
        supervisor._take_report(supervisor_rank, line)
