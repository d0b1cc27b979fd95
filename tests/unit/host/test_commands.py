"""Commands that fail, hang or are missing."""

import pytest

from hvkit.host.commands import Output, run


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["sh", "-c", "echo out; echo err >&2; exit 3"], Output(3, "out\n", "err\n")),
        (["sleep", "60"], Output(None)),
        (["/not-there"], None),
    ],
)
def test_commands_that_fail_hang_or_are_missing(words, output):
    assert run(words, timeout=0.5) == output
