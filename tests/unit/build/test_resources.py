"""Compile jobs are limited by cores and by memory."""

from pathlib import Path

import pytest

from hvkit.build import resources

GIB = 1024**3


@pytest.mark.parametrize(
    ("cores", "memory", "jobs"), [(8, 64 * GIB, 8), (8, 7 * GIB, 3), (8, GIB, 1), (1, 64 * GIB, 1)]
)
def test_default_jobs(monkeypatch: pytest.MonkeyPatch, cores: int, memory: int, jobs: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(resources, "free_memory", lambda: memory)
    assert resources.default_jobs() == jobs


@pytest.mark.parametrize(
    ("limit", "free"), [("max", 4 * GIB), (str(GIB), GIB), (str(8 * GIB), 4 * GIB)]
)
def test_container_limit_counts(tmp_path: Path, limit: str, free: int) -> None:
    meminfo, memory_max = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text(f"MemTotal: 99 kB\nMemAvailable:   {4 * 1024**2} kB\n")
    memory_max.write_text(f"{limit}\n")
    assert resources.free_memory(meminfo, memory_max) == free
