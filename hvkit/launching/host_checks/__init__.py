"""Whether hosts are ready for ranks.

::

    hvkit run
    └── preflight          chooses the hosts with ranks and checks each of them:
        ├── probe          a host's facts (python -m hvkit.launching.host_checks.probe on each)
        └── routes         the networks between the hosts, from these facts

    hvkit hosts --check
    └── hosts_check        the problems of hosts, from `hvkit doctor` on each, and from:
        └── reachability   every host connects to every other one
                           (python -m hvkit.launching.host_checks.reachability on each)
"""
