"""What ``hvkit manifest`` writes, and the message with which it refuses a line."""

import shlex

import pytest
import yaml

from hvkit import cli


@pytest.fixture
def written(capsys):
    """The text for the words behind ``hvkit manifest``."""

    def write(line):
        assert cli.main(shlex.split(f"manifest {line}")) == 0
        output = capsys.readouterr()
        assert output.err == "" or "; idle slots on the last host: " in output.err
        return output.out

    return write


@pytest.fixture
def refusal(capsys):
    """The message for words behind ``hvkit manifest`` that are refused."""

    def refuse(line):
        with pytest.raises(SystemExit) as caught:
            cli.main(shlex.split(f"manifest {line}"))
        assert caught.value.code == 2
        output = capsys.readouterr()
        assert output.out == ""
        return output.err

    return refuse


@pytest.fixture
def documents(written):
    """The documents as a cluster reads them from the YAML text."""
    return lambda line: list(yaml.safe_load_all(written(line)))
