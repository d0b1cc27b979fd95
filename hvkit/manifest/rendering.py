"""Fills in templates of Jinja: hvkit's own in ``templates/``, or a cluster's changed copy."""

import json
import re
import shlex
import traceback
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from hvkit.errors import HvkitError


def rendered(name: str, values: Mapping[str, Any], own: Path | None) -> str:
    """The text of a template with these values.

    Whatever a value contains, it stays one value: ``{{ value }}`` writes it as JSON, which YAML
    has taken over, or for a shell as a quoted word or several. ``{{ value | safe }}`` writes it as
    it is. Templates run in Jinja's sandbox, since one cluster's template has many users.

    Args:
        name: the file in ``templates``.
        values: by the names in the template.
        own: a file to fill in instead.

    Raises:
        HvkitError: Jinja is not installed.
        ValueError: the template cannot be read, is malformed, or has an error; names its line.
    """
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise HvkitError(
            "there is no Jinja, which fills in templates of manifests: `pip install 'jinja2>=3.1'`"
        ) from error
    quoted = _shell_words if name.endswith(".sh.j2") else _json
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else quoted(value),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Jinja's own writes emoji as two halves, which not all readers of YAML put together.
    environment.filters["tojson"] = lambda value: Markup(_json(value))
    file = own or files("hvkit.manifest") / "templates" / name
    try:
        return environment.from_string(file.read_text(encoding="utf-8")).render(values)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--template {own}: must be a template in UTF-8: {error}") from error
    except Exception as error:  # a template is a program, whose errors may be any
        frames = traceback.extract_tb(error.__traceback__)
        line = [each.lineno for each in frames if each.filename in ("<template>", "<unknown>")][-1]
        said = f"{file}: line {line}: {getattr(error, 'message', None) or error}"
        if isinstance(error, jinja2.UndefinedError):
            said += f"; the values of this template are {', '.join(sorted(values))}"
        raise ValueError(said) from error


def _json(value: object) -> str:
    """The value as JSON that also all readers of YAML understand alike."""
    # An undefined value raises when it becomes text; quantities and paths are texts.
    text = json.dumps(value, ensure_ascii=False, default=str)
    # Line ends of Unicode, control characters, and letters beyond ASCII.
    return re.sub("[\x7f-\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _shell_words(value: object) -> str:
    words = value if isinstance(value, list | tuple) else [value]
    return shlex.join(map(str, words))
