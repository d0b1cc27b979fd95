"""Draws top.svg: ``hvkit top`` while rank 2 of four waits for its data.

    python docs/pictures/top.py

It runs the script below on four ranks and draws what ``hvkit top`` shows after
some steps; only this host's name is replaced.
"""

import io
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hvkit.cli import top
from hvkit.errors import HvkitError
from hvkit.launching.supervision import run_status
from rich.console import Console, Group
from rich.text import Text

SCRIPT = """\
import time
import torch
import hvkit


def slow_batches(begun):
    while True:
        if hvkit.rank() == 2 and time.time() - begun > 12:
            time.sleep(60)  # a disk that does not answer
        time.sleep(0.02)
        yield torch.randn(64, 512)


torch.set_num_threads(1)
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with hvkit.Monitor("seen", tensorboard=False) as monitor:
    model, optimizer = hvkit.distribute(model, optimizer, monitor=monitor)
    for x in monitor.batches(slow_batches(time.time())):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        monitor.step(loss=loss)
"""
COMMAND = "hvkit top"


def seen(run: subprocess.Popen[bytes]) -> Group:
    """The view when three ranks have waited for some seconds."""
    before: dict[int, tuple[float, int]] = {}
    while run.poll() is None:
        time.sleep(0.5)
        try:
            state = run_status.read(run.pid)
        except HvkitError:
            continue
        ranks = [{**each, "host": "node1"} for each in state["ranks"]]
        view = top.view(4711, {**state, "ranks": ranks}, before)
        if sum(3 < (each.get("waits") or 0) < 6 for each in state["ranks"]) == 3:
            return view
    raise SystemExit("the run has ended")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        words = [sys.executable, "-m", "hvkit", "run", "--bind=none", "-np", "4"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(
            [*words, sys.executable, "train.py"], cwd=folder, **quiet
        ) as run:
            try:
                view = seen(run)
            finally:
                run.terminate()
    console = Console(record=True, width=124, file=io.StringIO())
    console.print(Text.from_markup(f"[bold green]$[/] {COMMAND}"))
    console.print(view)
    svg = console.export_svg(title="hvkit top")
    # Use a font of the reader's machine instead of a download.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "monospace")
    Path(__file__).with_suffix(".svg").write_text(svg)


if __name__ == "__main__":
    main()
