"""Breaks hvkit in the ways that mutations.toml lists, and shows which tests find it.

    python tests/mutations.py             # all, one after another
    python tests/mutations.py residual    # those whose text contains this
    python tests/mutations.py --check     # their tests on the code as it is, which must pass

Each is made in a copy of the tracked files, and undone before the next. Its tests run as `make
test` selects them and, if these pass, as `make test-all` does. The exit status is 1 if nothing
finds one, or if `make test` finds too few.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The folders of tests that `make test` runs, on two ranks at most; `make test-all` runs all cases.
IN_MAKE_TEST, ALL_CASES = {"unit", "parallel", "recipes", "launched"}, ("-m", "not accuracy")
# The part of the mutations that `make test` must find.
LEAST = 34 / 40
# Seconds for the tests of a mutation, and of one that makes a wait endless.
LIMIT, LIMIT_OF_WAIT = 240, 60
# As in the Makefile.
VARIABLES = (
    *("OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "TF_CPP_MIN_LOG_LEVEL=2"),
    *("PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe", "PRTE_MCA_pmix_tool_support=0"),
    "OMPI_MCA_rmaps_base_oversubscribe=1",
)
# Exit statuses of pytest: all tests pass, none is selected; and of `timeout`.
PASS, NONE, TOO_SLOW = 0, 5, (124, 137)


@dataclass(frozen=True)
class Mutation:
    """An entry of mutations.toml, where its fields are explained."""

    breaks: str
    file: str
    old: str
    new: str
    tests: list[str]
    ranks: int = 1
    backend: str = ""
    hangs: bool = False

    @property
    def selections(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The targets of make that run its tests, each with options of pytest that select them."""
        if self.ranks <= 2 and {each.split("/")[0] for each in self.tests} <= IN_MAKE_TEST:
            yield "`make test`", ()
        yield "`make test-all`", ALL_CASES


def run(copy: Path, mutation: Mutation, options: tuple[str, ...]) -> tuple[int, bool]:
    """Run the tests of a mutation on the code in a copy: the exit status, whether a test failed."""
    path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
    backend = [f"KERAS_BACKEND={mutation.backend}"] if mutation.backend else []
    limit = LIMIT_OF_WAIT if mutation.hangs else LIMIT
    ranks = ["mpirun", "-np", str(mutation.ranks)] if mutation.ranks > 1 else []
    words = ["env", *VARIABLES, f"PYTHONPATH={path}", *backend]
    words += ["timeout", "--kill-after=10", str(limit), *ranks]
    words += [sys.executable, "-m", "pytest", "-xq", "--color=no", *options]
    words += [f"tests/{each}" for each in mutation.tests]
    done = subprocess.run(
        words, cwd=copy, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lines = done.stdout.decode(errors="replace").splitlines()
    shown = [line for line in lines if re.match("FAILED|ERROR|rank .* failed in", line)]
    print(*(f"    {line}" for line in shown), sep="\n", end="\n" * bool(shown), flush=True)
    return done.returncode, any(not line.startswith("ERROR") for line in shown)


def found_by(copy: Path, mutation: Mutation) -> str:
    """The target of make that finds a mutation, which is in the copy."""
    for target, options in mutation.selections:
        status, failed = run(copy, mutation, options)
        if failed or (mutation.hangs and status in TOO_SLOW):
            return target
        if status not in (PASS, NONE):
            return f"nothing (its tests end with status {status})"
    return "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", nargs="?", default="", help="only mutations that contain this")
    parser.add_argument("--check", action="store_true", help="run the tests on unchanged code")
    args = parser.parse_args()
    entries = tomllib.loads((ROOT / "tests/mutations.toml").read_text())["mutation"]
    mutations = [Mutation(**each) for each in entries if args.text in str(each)]
    with tempfile.TemporaryDirectory(prefix="hvkit-mutations-") as folder:
        copy, rows = Path(folder), []
        names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for name in filter(None, names.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        for each in mutations:
            if (times := (copy / "hvkit" / each.file).read_text().count(each.old)) != 1:
                sys.exit(f"{each.file}: `old` is there {times} times, not once: {each.old!r}")
        if args.check:
            distinct = {(*each.tests, each.ranks, each.backend): each for each in mutations}
            failed = [e.tests for e in distinct.values() if run(copy, e, ALL_CASES)[0] != PASS]
            print(f"of {len(distinct)} sets of tests, {len(failed)} fail", *failed, sep="\n")
            return int(bool(failed))
        for each in mutations:
            changed, begun = copy / "hvkit" / each.file, time.monotonic()
            changed.write_text(changed.read_text().replace(each.old, each.new))
            target = found_by(copy, each)
            shutil.copy2(ROOT / "hvkit" / each.file, changed)
            seconds = round(time.monotonic() - begun)
            rows.append(f"| {each.breaks} | {each.file} | {target} | {seconds} |")
            print(rows[-1], flush=True)
    print("\n| breaks | file | found by | seconds |", "|---|---|---|---|", *rows, sep="\n")
    text = "\n".join(rows)
    unfound, by_make_test = text.count("| nothing"), text.count("| `make test` |")
    print(f"\nof {len(rows)}, `make test` finds {by_make_test}, and nothing {unfound}")
    return int(unfound > 0 or by_make_test < LEAST * len(rows))


if __name__ == "__main__":
    sys.exit(main())
