"""Hosts for property tests."""

from dataclasses import replace

from hypothesis import strategies as st

from hvkit.launch.hosts import Host

_LABEL = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,8}[A-Za-z0-9_])?", fullmatch=True)
_NAMES = st.lists(_LABEL, min_size=1, max_size=3).map(".".join)
# A last part of digits alone makes an address of a name.
NAMES = _NAMES.filter(lambda name: not name.rpartition(".")[2].isdecimal())
ADDRESSES = st.ip_addresses(v=4).map(str)
ADDRESSES_6 = st.ip_addresses(v=6).map(str)
USERS = st.none() | st.from_regex(r"[a-z_][a-z0-9_-]{0,6}", fullmatch=True)
SLOTS = st.integers(1, 65_535)


def distinct(hosts: st.SearchStrategy[Host]) -> st.SearchStrategy[tuple[Host, ...]]:
    """Some hosts, each with a name of its own."""
    return st.lists(hosts, min_size=1, max_size=6, unique_by=lambda host: host.name.lower()).map(
        tuple
    )


def _with_max(host: Host) -> st.SearchStrategy[Host]:
    if host.slots is None:
        return st.just(host)
    most = st.none() | st.integers(host.slots, 65_535)
    return most.map(lambda number: replace(host, max_slots=number))


# What Open MPI's form can say, what a list for -H can, and what MPICH's form can.
OPENMPI_HOSTS = st.builds(
    Host, NAMES | ADDRESSES | ADDRESSES_6, st.none() | SLOTS, st.none(), USERS
).flatmap(_with_max)
OPTION_HOSTS = st.builds(Host, NAMES | ADDRESSES | ADDRESSES_6, SLOTS, st.none(), USERS)
MPICH_HOSTS = st.builds(Host, NAMES | ADDRESSES, SLOTS, st.none(), USERS)
