import pytest
from on_ranks import (  # noqa: F401
    pytest_collection_finish,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    show_rank_0_alone,
)


def pytest_addoption(parser):
    parser.addoption(
        "--renew",
        metavar="TEXT",
        help="write the records whose names contain this anew, and print how they differ",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    show_rank_0_alone(config)
