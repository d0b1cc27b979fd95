"""Breaks training runs at random, and checks that each survives: ``make chaos FAULTS=30 SEED=1``.

Hosts are made on this machine, as root. A run trains on two of three hosts under
``hvkit run --max-restarts``, while faults from a seeded random generator hit it, one after the
other: each waits until the run has recovered from the one before. A run has passed if it ends with
the weights of one that nothing disturbed, bit for bit, and if no restart resumed an older
checkpoint than the newest that was complete.

Each fault adds a line of JSON to ``build/chaos.jsonl``: the steps that it cost, and the seconds
from the fault to the next new step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil
from rig import Rig
from training_run import NODES, ROOT, SCRIPTS, STRATEGIES, Run

RECORDS = ROOT / "build/chaos.jsonl"
# Seconds: between two faults, and of a link that is cut.
BETWEEN, CUT = (0.5, 2.0), 6.0
# What a run takes: steps are counted on from there until the faults are over.
AFTER = 15


# Faults. Each takes the run and random numbers, does its harm, and returns what ends it, if
# anything has to.
Repair = Callable[[], None] | None


def _signal(number: signal.Signals) -> Callable[[Run, random.Random], Repair]:
    def send(run: Run, numbers: random.Random) -> Repair:
        ranks = run.ranks()
        if ranks:
            _, process = ranks[numbers.choice(sorted(ranks))]
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        return None

    return send


def _order(name: str) -> Callable[[Run, random.Random], Repair]:
    def write(run: Run, numbers: random.Random) -> Repair:
        (run.folder / f"{name}-{numbers.randrange(2)}").touch()
        return None

    return write


def _kill_host(run: Run, numbers: random.Random) -> Repair:
    """All processes of a host but that of ``hvkit run``."""
    hosts = {name for name, _ in run.ranks().values()} - {"node1"}
    for name in hosts:
        for process in run.rig.host(name).processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    return None


def _cut(run: Run, numbers: random.Random) -> Repair:
    """A host's link: no packet comes through, and nobody says so."""
    hosts = sorted({name for name, _ in run.ranks().values()} - {"node1"}) or ["node2"]
    run.rig.cut(hosts[0])
    return lambda: run.rig.heal(hosts[0])


def _slow(run: Run, numbers: random.Random) -> Repair:
    run.rig.shape("node2", bandwidth="512kbit")
    return lambda: run.rig.shape("node2")


def _damage(run: Run, numbers: random.Random) -> Repair:
    """Change a byte of the newest checkpoint, and kill a rank."""
    newest = max((run.folder / "saved").glob("step-*"), default=None)
    files = sorted(newest.iterdir()) if newest else []
    if files:
        file = numbers.choice(files)
        with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
            content = bytearray(file.read_bytes())
            content[numbers.randrange(len(content))] ^= 255
            file.write_bytes(content)
    return _signal(signal.SIGKILL)(run, numbers)


def _fill_disk(run: Run, numbers: random.Random) -> Repair:
    """Fill the disk that checkpoints are on."""
    filler = run.folder / "saved/filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while file.write(bytes(1 << 16)):
            file.flush()
    return lambda: filler.unlink(missing_ok=True)


FAULTS: dict[str, Callable[[Run, random.Random], Repair]] = {
    "kill -9 a rank": _signal(signal.SIGKILL),
    "stop a rank": _signal(signal.SIGSTOP),
    "SIGTERM to a rank": _signal(signal.SIGTERM),
    "raise in a rank": _order("raise"),
    "exit 0 in a rank": _order("leave"),
    "kill a host's processes": _kill_host,
    "cut a host's link": _cut,
    "slow a host's link": _slow,
    "damage the newest checkpoint": _damage,
    "fill the disk": _fill_disk,
}


def suffer(run: Run, name: str, numbers: random.Random) -> dict[str, object]:
    """Let a fault hit the run, and wait until it takes new steps."""
    run.look()
    step, starts, complete = run.step, len(run.began), run.newest()
    began = time.monotonic()
    repair = FAULTS[name](run, numbers)
    if repair:
        until = began + CUT
        while time.monotonic() < until and run.look():
            time.sleep(0.02)
        repair()
    # One that is still unnoticed has cost nothing: stopped ranks are noticed after --stall.
    harmless = name == "slow a host's link"
    run.wait(
        f"no new steps after: {name}",
        lambda: run.step > step + 2 and (harmless or len(run.began) > starts),
    )
    lost = 0
    if len(run.began) > starts:
        resumed = run.began[starts]
        lost = max(step - resumed, 0)
        # All but the damaged one, or one that was not complete yet.
        assert resumed >= complete - (5 if name.startswith("damage") else 0), (
            f"{name}: resumed step {resumed}, but step {complete} was complete"
        )
    return {"steps": lost, "seconds": round(time.monotonic() - began, 2)}


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system that can be filled, for checkpoints."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def undisturbed(rig: Rig, folder: Path, run: Run, last: int) -> str:
    """The result of a run of so many steps that nothing disturbs."""
    folder.mkdir(parents=True)
    (folder / "end").write_text(str(last))
    (folder / "calm").touch()
    calm = Run(rig, folder, run.framework, run.strategy, run.seed)
    calm.wait("the undisturbed run", lambda: calm.result is not None, 1200)
    calm.process.wait(30)
    assert calm.result
    return calm.result


def chaos(faults: int, seed: int, in_a_run: int, folder: Path) -> None:
    """Let faults hit runs, until there were so many."""
    numbers = random.Random(seed)
    number = done = 0
    while done < faults:
        number += 1
        framework = numbers.choice(sorted(SCRIPTS))
        strategy = numbers.choice(STRATEGIES)
        place = folder / f"run-{number}"
        names = [numbers.choice(sorted(FAULTS)) for _ in range(min(in_a_run, faults - done))]
        with small_disk(place / "a/saved"), Rig(NODES) as rig:
            run = Run(rig, place / "a", framework, strategy, seed + number)
            for record in survived(run, names, numbers):
                done += 1
                record |= {"seed": seed, "run": number}
                keep(record)
                print(done, record, flush=True)
            expected = undisturbed(rig, place / "b", run, int(run.result.split()[0]))
            assert run.result == expected, f"{run.result} is not {expected}"
        print(f"run {number}: {framework}, {strategy}: as the undisturbed one", flush=True)


def soak(minutes: int, seed: int, folder: Path) -> None:
    """One long run with a fault every minute; what it holds must not grow."""
    numbers = random.Random(seed)
    samples = []
    with small_disk(folder / "a/saved"), Rig(NODES) as rig:
        run = Run(rig, folder / "a", "torch", "Synchronous()", seed)
        begun = time.monotonic()

        def every_minute() -> Iterator[str]:
            for minute in range(minutes):
                while time.monotonic() < begun + 60 * minute and run.look():
                    time.sleep(0.1)
                yield numbers.choice(sorted(FAULTS))

        for record in survived(run, every_minute(), numbers, lambda: samples.append(held_by(run))):
            print(record, samples[-1], flush=True)
            with RECORDS.open("a") as records:
                records.write(
                    json.dumps(record | {"seed": seed, "run": "soak"} | samples[-1]) + "\n"
                )
        expected = undisturbed(rig, folder / "b", run, int(run.result.split()[0]))
        assert run.result == expected, f"{run.result} is not {expected}"
    for name in samples[0]:
        first, last = (sorted(each[name] for each in half) for half in halves(samples))
        median = first[len(first) // 2], last[len(last) // 2]
        print(f"{name}: median {median[0]} in the first half, {median[1]} in the second")
        assert median[1] <= 1.1 * median[0] + 1, f"{name} has grown"


def keep(record: dict[str, object]) -> None:
    """Add a line to the records."""
    with RECORDS.open("a") as records:
        records.write(json.dumps(record) + "\n")


def halves(samples: Sequence[dict[str, int]]) -> tuple[Sequence[dict[str, int]], ...]:
    return samples[: len(samples) // 2], samples[len(samples) // 2 :]


def held_by(run: Run) -> dict[str, int]:
    """Memory (MiB), open files, threads of ``hvkit run``, and processes on its hosts."""
    processes = [psutil.Process(run.process.pid)]
    processes += processes[0].children(recursive=True)
    (supervisor,) = [
        each for each in processes
        if each.cmdline()[1:5] == ["-m", "hvkit", "run", "-np"]
    ]  # fmt: skip
    ranks = [process for _, process in run.ranks().values()]
    return {
        "memory": supervisor.memory_info().rss >> 20,
        "files": supervisor.num_fds(),
        "threads": supervisor.num_threads(),
        "memory of a rank": max(psutil.Process(r.pid).memory_info().rss for r in ranks) >> 20,
        "files of a rank": max(psutil.Process(r.pid).num_fds() for r in ranks),
        "processes": sum(len(host.processes()) for host in run.rig.hosts),
    }


def survived(
    run: Run,
    names: Iterable[str],
    numbers: random.Random,
    look: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, object]]:
    """Let these faults hit a run, look at it after each, and wait for its result."""
    try:
        run.wait("no first step", lambda: run.step > 5)
        for name in names:
            time.sleep(numbers.uniform(*BETWEEN))
            about = {"framework": run.framework, "strategy": run.strategy, "fault": name}
            suffered = suffer(run, name, numbers)
            look()
            yield about | suffered
        run.look()
        (run.folder / "end").write_text(str(run.step + AFTER))
        run.wait("no result", lambda: run.result is not None)
        assert run.process.wait(30) == 0
        left = [each.command for host in run.rig.hosts for each in host.processes()]
        assert not left, left
        for host in run.rig.hosts:
            memory = host.run(["ls", "/dev/shm"]).stdout
            assert "hvkit-run" not in memory, f"{host.name} still holds checkpoints: {memory}"
    finally:
        run.process.kill()


def table(records: list[dict[str, object]]) -> str:
    """Medians and largest values by fault, as Markdown."""
    by_fault = defaultdict(list)
    for each in records:
        by_fault[each["fault"]].append(each)
    lines = [
        "| Fault | times | steps lost, median (most) | seconds to the next step |",
        "|---|---|---|---|",
    ]
    for name, some in sorted(by_fault.items()):
        columns = [[float(each[key]) for each in some] for key in ("steps", "seconds")]
        shown = [f"{statistics.median(c):g} ({max(c):g})" for c in columns]
        lines.append(f"| {name} | {len(some)} | {shown[0]} | {shown[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=30, metavar="N", help="so many (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (default: 1)")
    parser.add_argument("--in-a-run", type=int, default=6, metavar="N", help="faults (default: 6)")
    parser.add_argument(
        "--soak", type=int, default=0, metavar="MINUTES", help="one run with a fault every minute"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build/chaos", help="for the runs")
    args = parser.parse_args()
    RECORDS.parent.mkdir(exist_ok=True)
    RECORDS.unlink(missing_ok=True)
    folder = args.folder / f"{int(time.time())}"
    if args.soak:
        soak(args.soak, args.seed, folder)
    else:
        chaos(args.faults, args.seed, args.in_a_run, folder)
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    print(table(records))


if __name__ == "__main__":
    main()
