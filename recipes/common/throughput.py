"""Measures images per second on random images, for ``--synthetic``."""

import statistics
import time
from collections.abc import Callable
from typing import Self

import numpy as np

import hvkit
from common.flags import CnnFlags
from common.ranks import say


def random_batch(flags: CnnFlags) -> tuple[np.ndarray, np.ndarray]:
    """A random batch, another on each rank: float32 pixels, channels last, and int64 labels."""
    random = np.random.default_rng([flags.seed, hvkit.rank()])
    shape = (flags.batch_size, flags.image_size, flags.image_size, 3)
    pixels = random.standard_normal(shape, dtype=np.float32)
    return pixels, random.integers(flags.classes, size=flags.batch_size)


class Throughput:
    """Times rounds of steps, after some untimed steps, and prints the results on rank 0.

    At the end it prints mean and spread (1.96 standard deviations) of images per second: per rank,
    over all rounds of all ranks, and for all ranks together.

    Args:
        flags: the recipe's flags.
        wait: waits until the device has finished computing; by default it returns at once.
    """

    def __init__(self, flags: CnnFlags, wait: Callable[[], object] = lambda: None) -> None:
        self._flags = flags
        self._wait = wait
        self.steps = flags.untimed_steps + flags.rounds * flags.steps_per_round
        """The number of steps that the recipe must take."""
        self._done = 0
        self._began = 0.0
        self._rates: list[float] = []
        images = f"{flags.batch_size} images of {flags.image_size}x{flags.image_size}"
        say(f"{flags.model}, {flags.precision}: {hvkit.size()} x {images} a step")

    def __enter__(self) -> Self:
        self._start_clock()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._print_results()

    def step(self) -> None:
        """Count a step."""
        self._done += 1
        timed = self._done - self._flags.untimed_steps
        if timed == 0:
            self._start_clock()
        if timed <= 0 or timed % self._flags.steps_per_round:
            return
        self._wait()
        seconds = time.perf_counter() - self._began
        rate = self._flags.batch_size * self._flags.steps_per_round / seconds
        self._rates.append(rate)
        say(f"round {len(self._rates)}/{self._flags.rounds}: {rate:.1f} images/s on rank 0")
        self._start_clock()

    def _start_clock(self) -> None:
        self._wait()
        self._began = time.perf_counter()

    def _print_results(self) -> None:
        by_rank = hvkit.allgather(self._rates)
        together = [sum(rates) for rates in zip(*by_rank, strict=True)]
        mean, spread = mean_and_spread([rate for rates in by_rank for rate in rates])
        say(f"images/s per rank: {mean:.1f} +- {spread:.1f}")
        mean, spread = mean_and_spread(together)
        say(f"images/s of {hvkit.size()} ranks together: {mean:.1f} +- {spread:.1f}")


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """The mean, and 1.96 standard deviations: 95 of 100 normal values lie within them."""
    return statistics.fmean(values), 1.96 * statistics.pstdev(values)
