"""``hvkit doctor``: checks this machine and Python, and names a fix for each problem.

::

    report          examine(): runs all of this in order; the result as JSON and as text
    ├── facts       the state of this machine, without judgement
    ├── self_test   starts two ranks; also the program that they run
    └── findings    problems and notes: what the rules in rules.toml say about the facts

Facts, the results of the self-test and findings are one dict, which ``hvkit doctor --json`` prints;
docs/install.md describes its keys.
"""
