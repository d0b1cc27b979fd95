"""A self-test that did not pass."""

from collections.abc import Iterator

from hvkit.doctor.findings.finding import Finding, problem
from hvkit.doctor.two_ranks import SelfTest


def self_test_findings(test: SelfTest) -> Iterator[Finding]:
    """What went wrong on two ranks."""
    if test.error:
        yield problem(f"the self-test could not be started: {test.error}", "mend what it names")
    for result in test.results:
        if result.error:
            yield problem(
                f"the self-test of {result.framework} failed: {result.error}",
                f"see its last lines; run it again with `{result.command}`",
            )
