"""``hvkit.launch`` in a real kernel: functions and classes of cells, output, errors, Ctrl-C."""

import os
import re
import time
from pathlib import Path

import psutil
import pytest
from cases import MORE
from jupyter_client.manager import start_new_kernel

pytestmark = MORE


class Kernel:
    """A kernel, and what its cells have shown."""

    def __init__(self, folder):
        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(folder))
        self.process = psutil.Process(self.manager.provisioner.pid)

    def run(self, code, while_it_runs=lambda shown: None):
        """Run a cell; what it printed, its result, and its error."""
        printed, result, error = "", None, None
        sent = self.client.execute(code)
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed += content["text"]
                while_it_runs(printed)
            elif kind == "execute_result":
                result = content["data"]["text/plain"]
            elif kind == "error":
                text = "\n".join(content["traceback"])
                error = content["ename"], content["evalue"], re.sub(r"\x1b\[[\d;]*m", "", text)
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, result, error

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def kernel(folder):
    os.environ["TMPDIR"] = str(folder)  # where folders of calls would be left
    kernel = Kernel(folder)
    kernel.run("import hvkit, os, sys, time")
    yield kernel
    kernel.close()
    del os.environ["TMPDIR"]


def left(folder):
    """Folders and processes of calls."""
    folders = list(Path(folder).glob("hvkit-call-*"))
    return folders, [each for each in psutil.process_iter(["cmdline"]) if _of_call(each, folder)]


def _of_call(process, folder):
    try:
        words = process.info["cmdline"] or []
        of_hvkit = any(word.startswith(("hvkit.functions", "hvkit.launching")) for word in words)
        return of_hvkit and process.environ().get("TMPDIR") == str(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def test_functions_and_classes_of_cells_go_to_ranks_and_back(kernel, folder):
    def go_on(printed):
        if "rank 1 waits" in printed:  # so output arrives while the ranks run
            (folder / "go").touch()

    printed, result, error = kernel.run(
        "class Box:\n"
        "    def __init__(self, held): self.held = held\n"
        "def train(box, *, plus):\n"
        "    print(f'rank {hvkit.rank()} waits', flush=True)\n"
        "    while hvkit.rank() == 1 and not os.path.exists('go'): time.sleep(0.01)\n"
        "    assert type(box) is Box\n"
        "    return Box(box.held + plus + hvkit.rank())\n"
        "boxes = hvkit.launch(train, Box(10), np=2, plus=5)\n"
        "[type(box) is Box for box in boxes], [box.held for box in boxes], 'torch' in sys.modules",
        go_on,
    )
    assert error is None, error
    assert result == "([True, True], [15, 16], False)"
    assert "rank 0 waits" in printed
    assert left(folder) == ([], [])


def test_a_lightning_module_of_a_cell_is_fitted_on_ranks_as_in_the_kernel(kernel):
    kernel.run("import lightning as L, torch; from torch.utils import data as D")
    _, result, error = kernel.run(
        "class Classifier(L.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.net = torch.nn.Linear(8, 4)\n"
        "    def training_step(self, batch, _):\n"
        "        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.AdamW(self.parameters(), 0.01)\n"
        "def fit(batch, strategy):\n"
        "    torch.manual_seed(0)\n"
        "    module = Classifier().double()\n"
        "    data = D.TensorDataset(torch.randn(48, 8).double(), torch.arange(48) % 4)\n"
        "    trainer = L.Trainer(\n"
        "        max_epochs=2, accelerator='cpu', strategy=strategy, logger=False,\n"
        "        enable_checkpointing=False, enable_progress_bar=False)\n"
        "    trainer.fit(module, D.DataLoader(data, batch, shuffle=True))\n"
        "    return trainer.global_step, module.net.weight.detach()\n"
        "ranks, (steps, wanted) = hvkit.launch(fit, 4, 'hvkit', np=2), fit(8, 'auto')\n"
        "[(n == steps, float((each - wanted).abs().max()) < 1e-14) for n, each in ranks]"
    )
    assert error is None, error
    assert result == "[(True, True), (True, True)]"


def test_an_exception_has_its_own_type_and_the_line_of_its_cell(kernel):
    kernel.run(
        "class Diverged(Exception):\n"
        "    def __init__(self, step):\n"
        "        super().__init__(f'diverged in step {step}')\n"
        "        self.step = step\n"
        "def fail():\n"
        "    if hvkit.rank() == 1:\n"
        "        raise Diverged(7)\n"
        "    hvkit.barrier()\n"
    )
    printed, _, (kind, text, trace) = kernel.run("hvkit.launch(fail, np=2)")
    assert (kind, text) == ("Diverged", "diverged in step 7")
    cell = re.search(r'raised on rank 1, .*:\n.*\n  File "Cell In\[\d+\]", line 7, in fail', trace)
    assert cell, trace
    assert "raise Diverged(7)" in trace[cell.end() :]
    assert "rank 1 failed with Diverged: diverged in step 7" in printed
    _, result, _ = kernel.run(
        "try: hvkit.launch(fail, np=2)\nexcept Diverged as error: found = error.step\nfound"
    )
    assert result == "7"


def test_stop_ends_all_ranks_at_once_and_leaves_the_kernel(kernel, folder):
    stopped = []

    def stop(printed):
        if "they wait" in printed and not stopped:
            stopped.append(time.monotonic())
            kernel.manager.interrupt_kernel()

    printed, _, error = kernel.run(
        "def wait():\n"
        "    if hvkit.rank() == 0:\n"
        "        print('they wait', flush=True)\n"
        "        time.sleep(100)\n"
        "    hvkit.barrier()\n"
        "hvkit.launch(wait, np=2)",
        stop,
    )
    assert time.monotonic() - stopped[0] < 60  # 2 on an idle machine; rank 0 sleeps for 100
    assert error[0] == "KeyboardInterrupt"
    assert "rank 0 was interrupted" in printed
    assert kernel.run("1 + 1")[1] == "2"
    assert left(folder) == ([], [])


def test_a_kernel_that_is_killed_takes_its_ranks_along(kernel, folder):
    """The last test: it ends the kernel."""
    kernel.client.execute(
        "def wait():\n"
        "    open('started', 'w').close()\n"
        "    time.sleep(100)\n"
        "hvkit.launch(wait, np=1)"
    )
    wait_until(lambda: (folder / "started").exists())
    assert left(folder)[1]
    kernel.process.kill()
    wait_until(lambda: left(folder) == ([], []))


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met within 30 seconds"
        time.sleep(0.05)
