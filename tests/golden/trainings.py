"""Small trainings whose every bit is on record: each strategy with each compression.

The Makefile chooses kernels that compute alike on all processors.
"""

import base64
import itertools
from dataclasses import dataclass, field

import numpy as np
from ranks import my_part

import hvkit

STEPS = 7
# In the middle of a round, with an agreement that runs beside training where there are such.
SAVED_AT = 4

STRATEGIES = {
    "Synchronous": hvkit.Synchronous(),
    "Centralized": hvkit.Centralized(),
    "DeMo": hvkit.DeMo(top_k=2, chunk=4),
    "LocalSGD": hvkit.LocalSGD(3),
    "DiLoCo": hvkit.DiLoCo(3),
    "DiLoCo, overlap": hvkit.DiLoCo(3, overlap=2),
    "ElasticAveraging": hvkit.ElasticAveraging(3),
    "Gossip": hvkit.Gossip(2),
    "ShardedOptimizer": hvkit.ShardedOptimizer(),
    "FullyShard": hvkit.FullyShard(),
    "ParameterServer": hvkit.ParameterServer(0),
}
COMPRESSIONS = {
    "none": "none",
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "TopK": hvkit.TopK(0.3),
    "PowerSGD": hvkit.PowerSGD(1),
}
OPTIONS = {
    "warm-up": {"lr_scaling": "linear", "warmup_steps": 5},
    "sync batch norm": {"batch_norm": "sync"},
    "local batch norm": {"batch_norm": "local"},
    "skip": {"on_nonfinite": "skip"},
}


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        name: in the records.
        options: of ``distribute``.
        strategy: by its name in ``STRATEGIES``.
        compression: by its name in ``COMPRESSIONS``.
    """

    name: str
    strategy: str = "Synchronous"
    compression: str = "none"
    options: dict = field(default_factory=dict)

    def arguments(self):
        """What ``distribute`` gets."""
        strategy, compression = STRATEGIES[self.strategy], COMPRESSIONS[self.compression]
        return {"strategy": strategy, "compression": compression, **self.options}


CASES = [
    *(
        Case(f"{strategy} | {compression}", strategy, compression)
        for strategy, compression in itertools.product(STRATEGIES, COMPRESSIONS)
    ),
    *(Case(f"Synchronous | {name}", options=options) for name, options in OPTIONS.items()),
]
if hvkit.size() == 1:  # where each strategy with each compression is plain training
    CASES = [case for case in CASES if case.strategy == "Synchronous" or case.compression == "none"]


def data():
    """This rank's batches: arrays of shapes (4, 4) and (4, 2), in eighths."""
    rng = np.random.default_rng(0)
    rows = 4 * hvkit.size()
    whole = [
        tuple(rng.integers(-8, 9, (rows, n)).astype(np.float32) / 8 for n in (4, 2))
        for _ in range(STEPS)
    ]
    return [tuple(map(my_part, batch)) for batch in whole]


def start():
    """The weights before the first step: of two dense layers, in sixteenths."""
    rng = np.random.default_rng(1)
    return [rng.integers(-8, 9, shape).astype(np.float32) / 16 for shape in ((4, 3), (3, 2))]


def of_all_ranks(arrays):
    """The bits of arrays on all ranks, as texts; one text if ranks agree. A collective."""
    flat = np.concatenate([np.asarray(each, np.float32).ravel() for each in arrays])
    texts = hvkit.allgather(base64.b64encode(flat.tobytes()).decode())
    return texts if len(set(texts)) > 1 else texts[:1]


def difference(texts, others):
    """The largest difference of what ``of_all_ranks`` returned, relative to the largest value.

    Infinite if one of them was refused, or has other shapes.
    """
    if ["refused"] in (texts, others):
        return float("inf")
    mine, theirs = (
        np.concatenate([np.frombuffer(base64.b64decode(t), np.float32) for t in each])
        for each in (texts, others)
    )
    if mine.shape != theirs.shape:
        return float("inf")
    return float(np.abs(mine - theirs).max() / np.abs(theirs).max())
