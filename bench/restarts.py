"""What a fault costs: seconds to the next new step, and steps lost, beside hvkit's peers.

    python bench/restarts.py                     # as root, hosts made on this machine; 20 minutes
    python bench/restarts.py --peers torchrun    # some peers, some faults: --faults "stop a rank"

Two of three hosts train a small network, a rank each, in steps of 50 ms, and save every fifth:
under ``hvkit run --max-restarts`` with ``hvkit.Checkpoint``, under ``torchrun --max-restarts`` with
DDP and a file that rank 0 writes and all read, and under ``horovodrun --min-np 1`` with Horovod's
elastic state in memory. After step 28 a fault hits the rank that is not on node1. Steps count as
lost from the one at the fault back. A peer that takes none within ``LIMIT`` seconds, or ends, has
not survived.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/cluster"))
from rig import Rig  # noqa: E402

NODES = ("node1", "node2", "node3")
AT, LIMIT = 28, 60
NETWORK = """
import os, sys, time
from pathlib import Path
import torch
folder = Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))


def train(model, optimizer):
    x = torch.randn(6, 8)
    optimizer.zero_grad()
    (model(x) - x[:, :4]).square().mean().backward()
    optimizer.step()


def after(step, rank):
    print("step", step, rank, os.getpid(), flush=True)
    time.sleep(0.05)
    order = folder / f"order-{os.uname().nodename}"
    if order.exists():
        name = order.read_text()
        order.unlink()
        if name == "raise":
            raise ValueError("a fault")
        sys.exit(0)
"""
HVKIT = (
    NETWORK
    + """
import hvkit
optimizer = torch.optim.Adam(model.parameters())
hvkit.distribute(model, optimizer)
checkpoint = hvkit.Checkpoint(folder / "saved", model=model, optimizer=optimizer)
step = checkpoint.restore().step
while step < 100000:
    step += 1
    train(model, optimizer)
    checkpoint.end_step(epoch=0, step=step, every=5)
    after(step, hvkit.rank())
"""
)
TORCHRUN = (
    NETWORK
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
saved, step = folder / "saved.pt", 0
if saved.exists():
    state = torch.load(saved)
    step = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
while step < 100000:
    step += 1
    train(ddp, optimizer)
    if step % 5 == 0 and dist.get_rank() == 0:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder / "new.pt")
        os.rename(folder / "new.pt", saved)
    after(step, dist.get_rank())
"""
)
ELASTIC = (
    NETWORK
    + """
import horovod.torch as hvd
hvd.init()
optimizer = torch.optim.Adam(model.parameters())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def run(state):
    while state.step < 100000:
        state.step += 1
        train(model, optimizer)
        if state.step % 5 == 0:
            state.commit()
        after(state.step, hvd.rank())


run(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
"""
)
PYTHON = sys.executable
BIN = str(Path(PYTHON).parent)
PEERS = {
    "hvkit": (
        HVKIT,
        {"node1": [PYTHON, "-m", "hvkit", "run", "-np", "2", "-H", "node1:1,node2:1,node3:1",
                   "--max-restarts", "3", "--stall", "12", "--lost-after", "4", "--grace", "5",
                   PYTHON]},
    ),
    "torchrun": (
        TORCHRUN,
        {node: [f"{BIN}/torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29400"]
         for node in NODES[:2]},
    ),
    "horovodrun": (
        ELASTIC,
        {"node1": [f"{BIN}/horovodrun", "-np", "2", "--min-np", "1", "--max-np", "2",
                   "--network-interface", "eth0", "--host-discovery-script", "DISCOVER", PYTHON]},
    ),
}  # fmt: skip


def kill_rank(rig, folder, host, pid):
    os.kill(pid, signal.SIGKILL)


def stop_rank(rig, folder, host, pid):
    os.kill(pid, signal.SIGSTOP)


def terminate_rank(rig, folder, host, pid):
    os.kill(pid, signal.SIGTERM)


def raise_in_rank(rig, folder, host, pid):
    (folder / f"order-{host}").write_text("raise")


def leave_rank(rig, folder, host, pid):
    (folder / f"order-{host}").write_text("leave")


def kill_host(rig, folder, host, pid):
    for process in rig.host(host).processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def cut_link(rig, folder, host, pid):
    rig.cut(host)


FAULTS = {
    "kill -9 a rank": kill_rank,
    "raise in a rank": raise_in_rank,
    "exit 0 in a rank": leave_rank,
    "SIGTERM to a rank": terminate_rank,
    "stop a rank": stop_rank,
    "kill a host's processes": kill_host,
    "cut a host's link": cut_link,
}


def measure(peer, fault):
    """What the fault cost this peer, in words."""
    script, commands = PEERS[peer]
    with tempfile.TemporaryDirectory() as name, Rig(NODES) as rig:
        folder = Path(name)
        (folder / "train.py").write_text(script)
        discover = folder / "discover"
        discover.write_text("#!/bin/sh\n" + "".join(f"echo {node}:1\n" for node in NODES))
        discover.chmod(0o755)
        logs = []
        processes = []
        for node, words in commands.items():
            logs.append(folder / f"log-{node}")
            words = [str(discover) if word == "DISCOVER" else word for word in words]
            processes.append(rig.host(node).popen(
                [*words, str(folder / "train.py"), str(folder)],
                env={"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL, stdout=logs[-1].open("w"), stderr=subprocess.STDOUT,
            ))  # fmt: skip
        try:
            return after_fault(peer, FAULTS[fault], rig, folder, logs, processes)
        finally:
            for each in processes:
                each.kill()


def steps_in(logs):
    """The steps that were printed, in order for each file: step, rank, process."""
    found = []
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            words = line.split("step ", 1)[-1].split()
            if "step " in line and len(words) == 3 and all(word.isdigit() for word in words):
                found.append(tuple(map(int, words)))
    return found


def after_fault(peer, fault, rig, folder, logs, processes):
    wait_for(lambda: any(step >= AT for step, *_ in steps_in(logs)), 90)
    seen = steps_in(logs)
    pids = {pid for _, _, pid in seen}
    # Not the host of the launcher: it would end with it.
    host, target = next(
        (node, process.pid)
        for node in NODES[1:]
        for process in rig.host(node).processes()
        if inner_pid(process.pid) in pids and trains(process.pid, folder)
    )
    last = max(step for step, *_ in seen)
    begun = time.monotonic()
    fault(rig, folder, host, target)
    counted = len(seen)
    # A rank of the first try may still print a step or two.
    new = wait_for(
        lambda: (
            max((s for s, _, pid in steps_in(logs)[counted:] if pid not in pids), default=0)
            or max((s for s, *_ in steps_in(logs)[counted:] if s > last + 60), default=0)
        ),
        LIMIT,
        lambda: all(each.poll() is not None for each in processes),
    )
    seconds = time.monotonic() - begun
    if new is None:
        ended = [each.poll() for each in processes]
        how = f"ended with status {ended[0]}" if None not in ended else f"no step in {LIMIT} s"
        return f"{how}"
    resumed = min(s for s, _, pid in steps_in(logs)[counted:] if pid not in pids or s > last)
    return f"{seconds:.1f} s, {max(last - resumed + 1, 0)} steps"


def inner_pid(pid):
    """The number of a process in its own host."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return -1


def trains(pid, folder):
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        script = str(folder / "train.py").encode()
        return words[1:3].count(script) + words[2:4].count(script) > 0
    return False


def wait_for(look, seconds, over=lambda: False):
    """The first true result of ``look``; None if time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        if over():
            return look() or None
        time.sleep(0.02)
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--faults", nargs="+", choices=tuple(FAULTS), default=list(FAULTS))
    flags = parser.parse_args()
    print(f"| Fault | {' | '.join(flags.peers)} |", flush=True)
    print("|---|" + "---|" * len(flags.peers), flush=True)
    for fault in flags.faults:
        cells = [measure(peer, fault) for peer in flags.peers]
        print(f"| {fault} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
