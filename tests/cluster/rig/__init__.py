"""Several hosts on one machine, for tests: namespaces joined by a bridge, with ssh between them.

::

    with Rig(["node1", "node2"]) as rig:
        rig.host("node1").run(["ssh", "node2", "hostname"]).stdout  # "node2\n"

Each host has its own network, name, processes, ``/dev/shm``, ``/run`` and ``/etc``; other files
are the machine's, as if all hosts had mounted them from one file server, unless ``root`` gives
every host an image of its own. Nothing on the machine is changed, there is no way from the hosts
to any network, and when the process that holds the rig ends, in whatever way, all of it is gone.

Root is needed. ``missing()`` says what keeps a machine from it.
"""

from rig.errors import RigError
from rig.host import Host
from rig.preconditions import missing
from rig.rig import Rig

__all__ = ["Host", "Rig", "RigError", "missing"]
