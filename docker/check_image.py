"""The last step of the image's build: an allreduce on two ranks for each framework in the image.

Other problems that `hvkit doctor` finds are only printed: a small /dev/shm, or a hostname that does
not resolve, belongs to the machine that builds the image, not to the image.
"""

import json
import subprocess
import sys


def main() -> None:
    done = subprocess.run(["hvkit", "doctor", "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"hvkit doctor ended with status {done.returncode}")
    report = json.loads(done.stdout)
    for problem in report["problems"]:
        print(f"{problem['what']}; {problem['fix']}")
    frameworks = {name for name in ("torch", "tensorflow") if report["versions"][name]}
    results = (report["self_test"] or {"results": []})["results"]
    for one in results:
        if one["error"] is not None:
            print(f"{one['framework']}: {one['error']}", *one["output"], sep="\n")
    right = {one["framework"] for one in results if one["error"] is None}
    if not frameworks or right != frameworks:
        sys.exit(
            f"two ranks must train with {sorted(frameworks)}, but only did with {sorted(right)}"
        )
    print(f"two ranks train with {' and '.join(sorted(right))}")


if __name__ == "__main__":
    main()
