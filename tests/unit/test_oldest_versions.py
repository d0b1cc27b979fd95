"""What setup.py declares as the oldest versions is what `make oldest` tries."""

import re
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[2]
TRIED = ("cloudpickle", "filelock", "keras", "msgpack", "numpy", "tensorflow-cpu", "torch")


def test_the_oldest_versions_that_are_declared_are_those_that_are_tried():
    setup = (ROOT / "setup.py").read_text()
    pins = (ROOT / "constraints-oldest.txt").read_text()

    def declared(name):
        return Version(re.search(rf'"{name}>=([\d.]+)"', setup).group(1))

    tried = {name: Version(version) for name, version in re.findall(r"(?m)^(\S+)==(\S+)$", pins)}
    assert {name: declared(name) for name in TRIED} == {name: tried[name] for name in TRIED}
    assert declared("tensorflow") == declared("tensorflow-cpu")
