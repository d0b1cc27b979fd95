"""What a recipe's monitor has recorded, read from the last start in ``metrics.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Monitored:
    """The lines of one start, by their kind."""

    start: dict[str, Any]
    records: list[dict[str, Any]]
    logged: list[dict[str, Any]]
    end: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Monitored:
        return cls.of((folder / "metrics.jsonl").read_text().splitlines())

    @classmethod
    def of(cls, lines: Iterable[str]) -> Monitored:
        run = cls({}, [], [], {})
        for line in map(json.loads, lines):
            if "start" in line:
                run = cls(line["start"], [], [], {})
            elif "logged" in line:
                run.logged.append(line["logged"] | {"step": line["step"]})
            elif "end" in line:
                run.end = line["end"]
            else:
                run.records.append(line)
        return run

    @property
    def ranks(self) -> int:
        return len(self.start["hosts"])

    @property
    def losses(self) -> dict[int, float]:
        """By step, the mean over ranks, and over the steps since the record before."""
        return {record["step"]: record["loss"] for record in self.records}

    @property
    def tests(self) -> list[dict[str, float]]:
        """Of each epoch, ``test_accuracy``, ``test_loss`` and the step.

        For ``fit`` the monitor records what Keras calls the epoch's validation.
        """
        validated = [
            {name.replace("epoch_val_", "test_"): value for name, value in each.items()}
            for each in self.logged
        ]
        return [
            {name: each[name] for name in ("test_accuracy", "test_loss", "step")}
            for each in validated
            if "test_accuracy" in each
        ]

    @property
    def epochs(self) -> int:
        """The number of epochs that the last record is in."""
        return 1 + int(self.records[-1]["epoch"])

    def sent(self, purpose: str) -> float:
        """Bytes that a rank sends in a step, mean over the run."""
        steps = sum(record["steps"] for record in self.records)
        return sum(r["sent"].get(purpose, 0) * r["steps"] for r in self.records) / steps
