"""Steps lost, and the longest time without a new one, after a fault: `hvkit run`, `torchrun`.

    python bench/restarts.py run --rounds 5    # five minutes
    python bench/restarts.py report

Records go to bench/restarts.jsonl. Nothing else may run meanwhile.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from restarts_on_ranks import FAULTS
from speed import add, environment

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "bench/restarts.jsonl"
SCRIPT = str(ROOT / "bench/restarts_on_ranks.py")
PEERS = {
    "hvkit": ["hvkit", "run", "-np", "2", "--max-restarts", "3", sys.executable],
    "torchrun": ["torchrun", "--nproc-per-node", "2", "--max-restarts", "3"],
}


def run(flags):
    for number in range(flags.rounds):
        for fault in FAULTS:
            for peer, launcher in PEERS.items():
                with tempfile.TemporaryDirectory() as folder:
                    line = [*launcher, SCRIPT, peer, fault, folder]
                    done = subprocess.run(
                        line, capture_output=True, text=True, env=environment(), timeout=300
                    )
                if done.returncode:
                    sys.exit(f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
                add(RECORDS, peer=peer, fault=fault, round=number, **measured(done.stdout))


def measured(printed):
    """Steps that were taken twice, and the longest time without a new one, in seconds."""
    newest, since, longest, twice = 0, None, 0.0, 0
    for line in printed.splitlines():
        match line.split():
            case ["step", step, at]:
                if int(step) <= newest:
                    twice += 1
                    continue
                if since is not None:
                    longest = max(longest, float(at) - since)
                newest, since = int(step), float(at)
    return {"steps": twice, "seconds": longest}


def report(_):
    found = defaultdict(list)
    for line in RECORDS.read_text().splitlines():
        record = json.loads(line)
        found[record["fault"], record["peer"]].append(record)
    for (fault, peer), some in found.items():
        steps, seconds = ([each[key] for each in some] for key in ("steps", "seconds"))
        print(
            f"| {fault} | {peer} | {statistics.median(steps):g} | {statistics.median(seconds):.1f} "
            f"({min(seconds):.1f} to {max(seconds):.1f}) |"
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    {"run": run, "report": report}[flags.command](flags)


if __name__ == "__main__":
    main()
