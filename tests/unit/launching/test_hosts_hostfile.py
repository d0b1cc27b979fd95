"""Hostfiles: single lines, the form and the bytes of whole files, and any text."""

import re

import pytest
from cases import MORE
from hypothesis import given, settings
from hypothesis import strategies as st

from hvkit.errors import HostfileError
from hvkit.launching.hosts import Host, parse_hostfile, read_hostfile


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("node1", Host("node1")),
        ("node1\tslots=4", Host("node1", 4)),
        ("  node1   slots=4  ", Host("node1", 4)),
        ("node1 slots = 4", Host("node1", 4)),
        ("node1 slots= 04", Host("node1", 4)),
        ("node1 slots=4 max_slots=8", Host("node1", 4)),
        ("node1 max-slots=8 slots=4", Host("node1", 4)),
        ("node1 max_slots=8", Host("node1", 8)),
        ("node1 slots=4# the fast one", Host("node1", 4)),
        ("root@node1 slots=4", Host("node1", 4, user="root")),
        ("container_1 slots=4", Host("container_1", 4)),
        ("node1.example.com slots=4", Host("node1.example.com", 4)),
        ("10.1.2.3 slots=4", Host("10.1.2.3", 4)),
        ("node1:4 # the fast one", Host("node1", 4)),
        ("10.1.2.3:4", Host("10.1.2.3", 4)),
        ("root@node1:4", Host("node1", 4, user="root")),
    ],
)
def test_a_valid_line(line, host):
    assert parse_hostfile(line, "f") == (host,)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("node1 slots=four", "slots must be a positive integer, got 'four'"),
        ("node1 slots", "only slots=N and max_slots=N may follow the host, got 'slots'"),
        ("node1 slots=65536", "slots must be at most 65535, got '65536'"),
        (f"node1 slots={'9' * 5000}", f"slots must be at most 65535, got '{'9' * 57}...'"),
        ("node1 max_slots=x slots=2", "max_slots must be a positive integer, got 'x'"),
        ("node1 slots=4 max_slots=2", "max_slots must not be less than slots, got 2 for 4 slots"),
        ("node1 slots=4 slots=4", "slots is set twice: keep one"),
        ("node1 max_slots=4 max-slots=4", "max_slots is set twice: keep one"),
        ("node1 slot=4", "only slots=N and max_slots=N may follow the host, got 'slot=4': a user"),
        ("node1 SLOTS=4", "only slots=N and max_slots=N may follow the host, got 'SLOTS=4'"),
        ("node1 username=root", "only slots=N and max_slots=N may follow the host, got 'username="),
        ("node1 node2", "only slots=N and max_slots=N may follow the host, got 'node2'"),
        ("slots=4", "a line starts with a host, got 'slots=4'"),
        ("node1,node2", "'node1,node2' is not a host name: use letters, digits, - and _ in parts"),
        (
            '"node1" slots=4',
            "'\"node1\"' is not a host name: use letters, digits, - and _ in parts",
        ),
        ("node[1-4] slots=4", "'node[1-4]' is not a host name: use letters, digits, - and _ in"),
        ("[1-4] slots=4", "'[1-4]' is not a host name: use letters, digits, - and _ in parts of"),
        ("fd00::1", "'fd00::1': mpirun and horovodrun accept no IPv6 addresses: use the host's"),
        ("[fd00::1]:4", "'[fd00::1]:4': mpirun and horovodrun accept no IPv6 addresses: use the"),
        ("+n0", "'+n0' is not a host name: use letters, digits, - and _ in parts of at most"),
        ("// node1", "'//' is not a host name: use letters, digits, - and _ in parts of at most"),
        (":4", "':4' has no host name: write HOST or USER@HOST"),
        ("root@ slots=4", "'root@' has no host name: write HOST or USER@HOST"),
        ("@node1", "'@node1' has an invalid user before the @ (letters, digits, _ and - are valid"),
        ("a.b@node1", "'a.b@node1' has an invalid user before the @ (letters, digits, _ and -"),
        ("-node1", "'-node1' is not a host name: use letters, digits, - and _ in parts of at most"),
        ("n" * 64, f"'{'n' * 57}...' is not a host name: use letters, digits, - and _ in parts"),
        ("10.0.0.256", "'10.0.0.256' is neither an IPv4 address (four numbers up to 255) nor a"),
        ("node1:4:2", "slots must be a positive integer, got '4:2'"),
        ("node1:", "slots must be a positive integer, got ''"),
        ("node1 :2", "only slots=N and max_slots=N may follow the host, got ':2'"),
        ("node1:2 slots=2", "nothing may follow host:slots, got 'slots=2': slots=N is Open MPI's"),
        ("node1:2 user=root", "nothing may follow host:slots, got 'user=root': slots=N is Open"),
    ],
)
def test_an_invalid_line_is_an_error_with_its_number_and_the_fix(line, message):
    text = f"node8\n# node7\n{line}\nnode9\n"
    with pytest.raises(HostfileError, match=f"^{re.escape(f'hostfiles/gpu: line 3: {message}')}"):
        parse_hostfile(text, "hostfiles/gpu")


BAD_NUMBERS = [
    *("0", "00", "-1", "+2", "four", "1.5", "", "0x2", "2;", "'2'", '"2"', "1e3", "2,", "²", "٤"),
    *("\uff12", "65536", "9" * 20, "2_0", "None", "2\u00a0", "2\r2", "\x00", "*", "auto"),
]
BAD_KEYWORDS = [
    *("slot", "Slots", "_SLOTS", "count", "cpu", "max", "maxslots", "max slots", "port", "user"),
    *("slots=2 slots", "max_slots=9 max-slots", "slots_max", "boards", "x", "slots:", "--slots"),
]
BAD_NAMES = [
    *("-a", "a-", "a..b", ".a", "a.", "a$", "node[1-4]", "[1-4]", "+n0", "+e", "^a", "a,b", "a,"),
    *('"a"', "'a'", "hôst", "a" * 64, "a." * 127 + "a", "10.0.0.256", "10.0.0", "1", "a.1", "a/b"),
    *("fe80::1%eth0", "[node1]", "[fd00::1", "fd00::1]", "1::2::3", "a:b:c", "@a", "a@", "a@b@c"),
    *("x y@a", "first.last@a", "a\\b", "a!b", "a*", "(a)", "a|b", "a;b", "\u200ba", "//a", "a=b"),
]
BAD_EXTRAS = ["node2", "2", "slots", "=", "=4", "/", "-x", "\u00a0", "x=", "max_slots", "slots=1=1"]
OF_OPEN_MPI = [
    *(f"node0 {key}={number}" for key in ("slots", "max_slots") for number in BAD_NUMBERS),
    *(f"node0 {keyword}=3" for keyword in BAD_KEYWORDS),
    *(f"{name} slots=3" for name in BAD_NAMES),
    *(f"node0 slots=3 {extra}" for extra in [*BAD_EXTRAS, "max_slots=2"]),
]
OF_MPICH = [
    *(f"node0:{number}" for number in BAD_NUMBERS),
    *(f"{name}:3" for name in BAD_NAMES),
    *(f"node0:3 {extra}" for extra in [*BAD_EXTRAS, "binding=rr", "ifname=eth0", "slots=2"]),
]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [(OF_OPEN_MPI, ["a slots=2", "b slots=1"]), (OF_MPICH, ["a:2", "b:1"])],
    ids=["Open MPI", "MPICH"],
)
def test_a_wrong_line_among_right_ones_is_refused_with_its_number(wrong, right):
    for line in wrong:
        for place in range(3):
            lines = [*right[:place], line, *right[place:]]
            with pytest.raises(HostfileError) as error:
                parse_hostfile("\n".join(lines), "f")
            assert str(error.value).startswith(f"f: line {place + 1}: "), line


@pytest.fixture
def file(tmp_path):
    return tmp_path / "hosts"


def refusal(file, data):
    file.write_bytes(data)
    with pytest.raises(HostfileError) as error:
        read_hostfile(file)
    return str(error.value).removeprefix(f"{file}: ")


def test_comments_blank_lines_and_line_ends_of_any_system_are_skipped(file):
    file.write_bytes(b"\xef\xbb\xbf# all\r\n\r\n   \nnode1 slots=2\r\n\t# more\n\nnode2 slots=2")
    assert read_hostfile(file) == (Host("node1", 2), Host("node2", 2))


def test_a_bare_name_has_one_slot_in_mpichs_form_and_in_open_mpis_what_the_launcher_finds(file):
    file.write_text("node1\nnode2:2\nnode3\n")
    assert read_hostfile(file) == (Host("node1", 1), Host("node2", 2), Host("node3", 1))
    file.write_text("node1\nnode2 slots=2\n")
    assert read_hostfile(file) == (Host("node1"), Host("node2", 2))


@pytest.mark.parametrize("data", [b"", b"\n\n", b"# nothing\n", b"\xef\xbb\xbf"])
def test_a_file_without_hosts_is_an_error(file, data):
    assert refusal(file, data) == "has no host: write a line for each, `node1 slots=2`"


FIX = "use `node1 slots=4` or `node1:4` throughout"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"node1\nno\0de2\n", "line 2: is not text: it has a zero byte"),
        (b"node1\n\nh\xf6st\n", "line 3: is not UTF-8 text: it has the byte 0xf6"),
        (
            b"node0\nnode1 slots=2\nnode2\nnode3:2\n",
            f"line 4: is in MPICH's form but line 2 is in Open MPI's: {FIX}",
        ),
        (
            b"node1:2\nnode2 max_slots=2\n",
            f"line 2: is in Open MPI's form but line 1 is in MPICH's: {FIX}",
        ),
    ],
)
def test_a_hostfile_that_is_no_text_or_has_lines_of_two_forms_is_an_error(file, data, message):
    assert refusal(file, data) == message


def test_a_file_far_larger_than_a_hostfile_is_not_read_to_its_end(file):
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(HostfileError, match="is not a hostfile: larger than 16 MiB"):
        read_hostfile(file)


def test_a_missing_file_and_a_folder_are_errors(file):
    with pytest.raises(HostfileError, match="hosts: cannot be read: No such file"):
        read_hostfile(file)
    with pytest.raises(HostfileError, match="cannot be read: Is a directory"):
        read_hostfile(file.parent)


LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,8}[A-Za-z_])?"
# A name whose last part is a number would be read as an address.
NAMES = st.from_regex(rf"({LABEL}\.){{0,2}}[a-z]{LABEL}", fullmatch=True)
ADDRESSES = st.ip_addresses(v=4).map(str)
USERS = st.none() | st.from_regex(r"[a-z_][a-z0-9_-]{0,6}", fullmatch=True)
SLOTS = st.integers(1, 30_000)


def named(host):
    return f"{host.user}@{host.name}" if host.user else host.name


def of_open_mpi(host):
    return named(host) + (f" slots={host.slots}" if host.slots else "")


def of_mpich(host):
    return f"{named(host)}:{host.slots}"


OF_FORM = {
    of_open_mpi: st.builds(Host, NAMES | ADDRESSES, st.none() | SLOTS, USERS),
    of_mpich: st.builds(Host, NAMES | ADDRESSES, SLOTS, USERS),
}
NOISE = st.lists(st.sampled_from(["", "   ", "\t", "# a", "#node9 slots=x", "\t# node9:0"]))
ENDS = st.sampled_from(["", "\r", " ", "\t", " # why", "#why", " \r"])


@MORE
@pytest.mark.parametrize("line_of", OF_FORM)
@given(data=st.data())
def test_the_hosts_of_a_file_are_read_whatever_is_around_its_lines(line_of, data):
    some = st.lists(OF_FORM[line_of], min_size=1, max_size=6, unique_by=lambda h: h.name.lower())
    hosts = tuple(data.draw(some))
    lines = []
    for host in hosts:
        begin = data.draw(st.sampled_from(["", " ", "\t"]))
        lines += [*data.draw(NOISE), begin + line_of(host) + data.draw(ENDS)]
    assert parse_hostfile("\n".join(lines), "f") == hosts


@settings(max_examples=300)
@given(text=st.text(alphabet="ab1.:-_@[]=#,'\"%+^ \t\n\r\0\u00a0é²slotmax/*", max_size=60))
def test_any_text_is_read_or_refused_and_what_is_read_can_be_written(text):
    refusal = ""
    try:
        hosts = parse_hostfile(text, "f")
    except HostfileError as error:
        refusal = str(error)
    if refusal:
        assert re.match(r"f: (line \d+: |has no host)", refusal)
    else:
        assert parse_hostfile("\n".join(map(of_open_mpi, hosts)), "f") == hosts
