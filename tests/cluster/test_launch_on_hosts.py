"""``hvkit.launch`` on several hosts: the function goes there, and its results come back."""

import json
import sys

SCRIPT = """
import json, os, socket, sys
import hvkit


class Failed(Exception):
    pass


def where(data):
    folder = os.environ["HVKIT_CALL"]
    return hvkit.rank(), socket.gethostname(), folder, len(data)


def fail():
    if socket.gethostname() == "node2":
        raise Failed("on " + socket.gethostname())
    hvkit.barrier()


if __name__ == "__main__":
    found = hvkit.launch(where, bytes(1_000_000), hosts=["node1:1", "node2:1"])
    try:
        hvkit.launch(fail, hosts="node1:1,node2:1")
    except Failed as error:
        notes = error.__notes__[0]
    left = [each for each in os.listdir("/tmp") if each in {os.path.basename(f[2]) for f in found}]
    print(json.dumps([found, notes, left]), file=open(sys.argv[1], "w"))
"""


def test_a_function_and_its_results_travel_over_the_agents_connections(rig, tmp_path):
    hosts = rig(["node1", "node2"])
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "found")]
    done = hosts.host("node1").run(words, timeout=200)
    assert done.returncode == 0, done.stderr
    (first, second), notes, left = json.loads((tmp_path / "found").read_text())
    assert [first[:2], second[:2]] == [[0, "node1"], [1, "node2"]]
    assert [first[3], second[3]] == [1_000_000, 1_000_000]
    assert first[2] != second[2]
    assert left == []
    assert notes.startswith("raised on rank 1, node2:\n")
