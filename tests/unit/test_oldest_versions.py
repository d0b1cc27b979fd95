"""What setup.py declares as the oldest versions is what `make oldest` tries."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRIED = ("keras", "tensorflow-cpu", "torch")


def test_the_oldest_versions_that_are_declared_are_those_that_are_tried():
    setup = (ROOT / "setup.py").read_text()
    declared = {name: re.search(rf'"{name}>=([\d.]+)"', setup).group(1) for name in TRIED}
    pins = re.findall(
        r"^(\S+)==(\S+)$", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE
    )
    tried = {name: version.removesuffix(".0") for name, version in pins if name in TRIED}
    assert {name: version.removesuffix(".0") for name, version in declared.items()} == tried
    assert re.search(r'"tensorflow>=([\d.]+)"', setup).group(1) == declared["tensorflow-cpu"]
