"""Which cases of a test `make test` leaves to `make test-all`."""

import itertools

import pytest

MORE = pytest.mark.every_combination


def cases(everything, first=1, name=None):
    """Cases of a test: ``make test`` runs some, ``make test-all`` all of them.

    Args:
        everything: each case a value, or a tuple of values.
        first: those of ``make test``, or how many there are.
        name: a function that names a case; by default pytest does.
    """
    everything = list(everything)
    first = everything[:first] if isinstance(first, int) else first
    if unknown := [case for case in first if case not in everything]:
        raise ValueError(f"first has {unknown}, which are no cases")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name(case) if name else None,
            marks=() if case in first else MORE,
        )
        for case in everything
    ]


def each_once(*choices):
    """Tuples in which each value of each choice occurs; values at the same places go together.

    For choices that do not act on each other.

    Args:
        choices: lists of values.
    """
    longest = max(map(len, choices))
    turns = [itertools.cycle(choice) for choice in choices]
    return [tuple(map(next, turns)) for _ in range(longest)]


def pairwise(*choices):
    """Tuples in which every pair of values from two choices occurs, far fewer than all products.

    For choices of which two may act on each other.

    Args:
        choices: lists of values.
    """
    numbers = [range(len(choice)) for choice in choices]

    def pairs(numbered):
        return set(itertools.combinations(enumerate(numbered), 2))

    left = set().union(*map(pairs, itertools.product(*numbers)))
    found = []
    while left:
        best = max(itertools.product(*numbers), key=lambda each: len(pairs(each) & left))
        left -= pairs(best)
        found.append(tuple(choice[at] for choice, at in zip(choices, best, strict=True)))
    return found
