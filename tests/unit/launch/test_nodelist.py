"""Slurm's short form of host names."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvkit.launch.allocation.nodelist import expanded


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("login1", ["login1"]),
        ("a,b,c", ["a", "b", "c"]),
        ("gpu[01-03,7],login1", ["gpu01", "gpu02", "gpu03", "gpu7", "login1"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("gpu[5]", ["gpu5"]),
        ("gpu[1-2]-ib,x", ["gpu1-ib", "gpu2-ib", "x"]),
        (
            "rack[1-2]node[3-4]",
            ["rack1node3", "rack1node4", "rack2node3", "rack2node4"],
        ),
        ("r[1,3]n[07-08]x", ["r1n07x", "r1n08x", "r3n07x", "r3n08x"]),
        ("[1-2]a", ["1a", "2a"]),
        ("n[1-2].example.com", ["n1.example.com", "n2.example.com"]),
    ],
)
def test_a_list_stands_for(nodelist, names):
    assert expanded(nodelist) == names


@pytest.mark.parametrize(
    ("nodelist", "why"),
    [
        ("", "has an empty name"),
        ("a,,b", "has an empty name"),
        ("a,", "has an empty name"),
        ("gpu[1-2", "has a bracket without its other half at '[1-2'"),
        ("gpu1-2]", "has a bracket without its other half at ']'"),
        ("gpu[[1]]", "has a bracket without its other half at '[[1]]'"),
        ("gpu[]", "has '' in brackets, which is neither a number nor a range"),
        ("gpu[1,]", "has '' in brackets, which is neither a number nor a range"),
        ("gpu[a-b]", "has 'a-b' in brackets, which is neither a number nor a range"),
        ("gpu[1-2-3]", "has '1-2-3' in brackets, which is neither a number nor a range"),
        ("gpu[-3]", "has '-3' in brackets, which is neither a number nor a range"),
        ("gpu[3-1]", "has the range '3-1', which ends before it starts"),
        ("gpu[1-999999]", "stands for more than 100000 hosts"),
        ("a[1-999]b[1-999]", "stands for more than 100000 hosts"),
        (
            "gpu[1-99999999999]",
            "has '1-99999999999' in brackets, which is neither a number nor a range",
        ),
    ],
)
def test_a_wrong_list_is_an_error_that_says_why(nodelist, why):
    with pytest.raises(ValueError, match=f"^{re.escape(why)}$"):
        expanded(nodelist)


_PREFIXES = st.from_regex(r"[a-z]([a-z0-9-]{0,4}[a-z-])?", fullmatch=True)


@st.composite
def _written_short(draw: st.DrawFn) -> tuple[list[str], str]:
    """Names, and a list that stands for them."""
    names: list[str] = []
    items: list[str] = []
    for prefix in draw(st.lists(_PREFIXES, min_size=1, max_size=4)):
        width = draw(st.integers(1, 4))
        pieces: list[str] = []
        for _ in range(draw(st.integers(1, 3))):
            first = draw(st.integers(0, 10**width - 1))
            last = first + draw(st.integers(0, 12))
            numbers = [f"{number:0{width}d}" for number in range(first, last + 1)]
            pieces.append(numbers[0] if first == last else f"{numbers[0]}-{numbers[-1]}")
            names += [prefix + number for number in numbers]
        items.append(f"{prefix}[{','.join(pieces)}]")
    return names, ",".join(items)


@given(_written_short())
def test_what_is_written_short_is_written_out_again(names_and_list):
    names, nodelist = names_and_list
    assert expanded(nodelist) == names


@given(st.text(alphabet="ab019[],-", max_size=12))
def test_any_text_is_written_out_or_refused(nodelist):
    try:
        names = expanded(nodelist)
    except ValueError:
        return
    assert names
    assert not set("[],") & set("".join(names))
    assert all(names)
