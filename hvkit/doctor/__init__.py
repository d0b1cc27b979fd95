"""``hvkit doctor``: checks this machine and Python, and names a fix for each problem.

::

    report                  examine(): runs all of this in order; the result as JSON and as text
    ├── facts               the state of this machine, without judgement
    │   ├── software        installed packages, compilers, MPI launchers
    │   └── horovod         the installed Horovod
    │       └── load_library    program: loads one of Horovod's libraries in a process of its own
    ├── self_test           starts two ranks; also the program that they run
    └── findings            problems and notes, derived from the facts and the self-test
        └── rules           the checks: a condition, a sentence and a fix for each finding

Facts, the results of the self-test and findings are one dict, which ``hvkit doctor --json`` prints;
``json_report`` in ``report`` describes its keys.
"""
