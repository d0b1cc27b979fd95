"""What is taken out before a report leaves this host."""

import getpass
import re
from pathlib import Path
from typing import Any


def without_user(value: Any) -> Any:
    """``value``, made of dicts, lists and strings, with the home directory and user name hidden.

    The home directory becomes ``~``; the user's name, where it is a part of another path,
    ``USER``.
    """
    return _hidden(value, _home(), _user())


def _hidden(value: Any, home: str | None, user: str | None) -> Any:
    if isinstance(value, dict):
        return {key: _hidden(one, home, user) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(one, home, user) for one in value]
    if not isinstance(value, str):
        return value
    if home:
        value = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", value)
    return re.sub(rf"(?<=/){re.escape(user)}(?![\w.-])", "USER", value) if user else value


def _home() -> str | None:
    try:
        home = str(Path.home())
    except RuntimeError:
        # In a container, a user id may have no name and no home.
        return None
    return None if home == "/" else home


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None
