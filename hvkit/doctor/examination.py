"""All of it, in order: facts, the self-test, findings, the document."""

from typing import Any

from hvkit.doctor.document import document
from hvkit.doctor.facts import gather
from hvkit.doctor.findings import findings
from hvkit.doctor.two_ranks import self_test


def examine(on_two_ranks: bool) -> dict[str, Any]:
    """Look at this host and this Python, and return what :mod:`hvkit.doctor` describes.

    Args:
        on_two_ranks: whether to start two ranks that try an allreduce, which takes a while.
    """
    facts = gather()
    test = self_test(facts.horovod, facts.launchers, facts.cores.usable) if on_two_ranks else None
    return document(facts, test, findings(facts, test))
