"""Percentages in make's output become progress."""

import pytest

from hvkit.build.progress import BuildProgress, percent_in


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("[  3%] Building CXX object gloo/allreduce.cc.o", 3),
        ("[100%] Built target pytorch", 100),
        ("creating build/lib", None),
        ("note: [ 50%] in the middle", None),
    ],
)
def test_percent(line: str, percent: int | None) -> None:
    assert percent_in(line) == percent


def test_a_line_every_ten_per_cent_and_never_backwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with BuildProgress() as progress:
        for percent in (1, 9, 10, 12, 5, 11, 31, 39, 100, 100):
            progress.read(f"[{percent:3}%] Building")
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in shown] == ["10%", "31%", "100%"]
