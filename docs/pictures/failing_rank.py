"""Draws failing_rank.svg: a terminal in which a rank fails under ``hvkit run``.

    python docs/pictures/failing_rank.py

It runs the script below on four ranks and draws their output. Only this host's name is
replaced.
"""

import io
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

SCRIPT = """\
import torch
import hvkit

torch.manual_seed(hvkit.rank())
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
model, optimizer = hvkit.distribute(model, optimizer)
for step in range(1, 101):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    if hvkit.rank() == 2 and step == 60:
        raise ValueError(f"sample 4711 of step {step} is damaged")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if hvkit.is_main() and step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
"""
COMMAND = "hvkit run -np 4 train.py"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        words = [sys.executable, "-m", "hvkit", *COMMAND.split()[1:]]
        words.insert(words.index("run") + 1, "--bind=none")
        ended = subprocess.run(
            words,
            cwd=folder,
            env=os.environ | {"FORCE_COLOR": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output = ended.stdout.replace(f"{folder}/", "").replace(
            socket.gethostname(), "node1"
        )
    # Without the lines of ^ that Python puts below the code.
    output = re.sub(r"\n\s+\^+(?=\n)", "", output)
    console = Console(record=True, width=104, file=io.StringIO())
    console.print(Text.from_markup(f"[bold green]$[/] {COMMAND}"))
    console.print(Text.from_ansi(output.rstrip()))
    console.print(Text.from_markup("[bold green]$[/] echo $?"))
    console.print(str(ended.returncode))
    svg = console.export_svg(title="four ranks on node1")
    # Use a font of the reader's machine instead of a download.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "monospace")
    Path(__file__).with_suffix(".svg").write_text(svg)
    print(output)


if __name__ == "__main__":
    main()
