"""What ``bench/restarts.py`` starts on each rank: a run that suffers a fault in its first try.

Both peers save the model and the optimizer every 5 steps, hvkit with ``Checkpoint``, DDP as its own
tutorial does. Rank 1 suffers the fault after step 23. Rank 0 prints each step and when it ended.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

EVERY, LAST, AT = 5, 40, 23
FAULTS = {
    "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "error": lambda: [].pop(),
}


class WithHvkit:
    def __init__(self, folder, model, optimizer):
        import hvkit

        hvkit.distribute(model, optimizer)
        self.model, self.rank = model, hvkit.rank()
        self.checkpoint = hvkit.Checkpoint(folder / "saved", model=model, optimizer=optimizer)
        self.step = self.checkpoint.restore().step

    def end_step(self, step):
        self.checkpoint.end_step(epoch=0, step=step, every=EVERY)


class WithDDP:
    def __init__(self, folder, model, optimizer):
        torch.distributed.init_process_group("gloo")
        self.rank, self.step, self.file = torch.distributed.get_rank(), 0, folder / "saved.pt"
        self.optimizer = optimizer
        if self.file.exists():
            saved = torch.load(self.file, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            self.step = saved["step"]
        self.model = nn.parallel.DistributedDataParallel(model)

    def end_step(self, step):
        if step % EVERY == 0 and self.rank == 0:
            state = {"model": self.model.module.state_dict(), "step": step}
            torch.save(state | {"optimizer": self.optimizer.state_dict()}, self.file)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=("hvkit", "torchrun"))
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("folder", type=Path)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters())
    peer = {"hvkit": WithHvkit, "torchrun": WithDDP}[flags.peer](flags.folder, model, optimizer)
    over = flags.folder / "over"
    for step in range(peer.step + 1, LAST + 1):
        optimizer.zero_grad()
        x = torch.randn(8, 256)
        F.cross_entropy(peer.model(x), torch.zeros(8, dtype=torch.long)).backward()
        optimizer.step()
        time.sleep(0.05)
        if peer.rank == 0:
            print("step", step, time.time(), flush=True)
        if step == AT and peer.rank == 1 and not over.exists():
            over.touch()
            print("fault", step, time.time(), flush=True)
            FAULTS[flags.fault]()
        peer.end_step(step)


if __name__ == "__main__":
    main()
