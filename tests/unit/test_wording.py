"""Numbers, lengths of time and long texts in messages."""

import pytest

from hvkit.launching.supervision.failures import Failure, in_one_line
from hvkit.log import in_short, shortened


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("", ""),
        ("ten chars.", "ten chars."),
        ("eleven char", "eleven..."),
        ("elevenchars", "elevenc..."),
        ("a longlonglong", "a longl..."),
        ("seven c hars", "seven c..."),
    ],
)
def test_a_long_text_ends_after_a_word_and_says_so(text, short):
    assert shortened(text, 10) == short


def test_errors_in_messages_are_marked_where_they_are_cut():
    assert in_short(ValueError("word " * 100)).endswith("word word...")
    line = "ValueError: " + "word " * 100
    failed = Failure(rank=1, host="a", status=1, at=0.0, last_lines=(line,))
    assert in_one_line([failed]).endswith("word word...")
