"""A hostname that leads nowhere, and what hosts need to reach each other."""

import ipaddress
from collections.abc import Iterator

from hvkit.doctor.facts import Facts
from hvkit.doctor.findings.finding import Finding, note, problem


def network_findings(facts: Facts) -> Iterator[Finding]:
    """What is wrong with this host's name and network."""
    yield from _hostname(facts)
    if facts.ssh.client is None:
        yield note(
            "there is no ssh; ranks on other hosts are started with it",
            "install it (Debian and Ubuntu: `apt install openssh-client`), or stay on one host",
        )
    if facts.launched:
        yield note(
            f"the environment says that this shell is a rank: {facts.launched}",
            "start hvkit and training from a shell that is none, or unset these variables",
        )


def _hostname(facts: Facts) -> Iterator[Finding]:
    name = facts.hostname
    outer = _outer_address(facts)
    line = f"put the line `{outer or '127.0.1.1'} {name}` into /etc/hosts"
    if not facts.addresses:
        yield problem(
            f"the hostname {name} does not resolve: Gloo crashes without it, and horovodrun does "
            "not know its own host",
            f"{line}, or correct the name with `hostnamectl set-hostname`; in a container: "
            f"`--add-host {name}:{outer or '127.0.1.1'}`",
        )
        return
    addresses = [ipaddress.ip_address(address) for address in facts.addresses]
    own = {interface.address for interface in facts.interfaces}
    if all(address.is_loopback for address in addresses):
        yield note(
            f"the hostname {name} resolves to {facts.addresses[0]}, which only this host reaches",
            f"nothing on one host; for several, {line} in place of that one",
        )
    elif not any(address.is_loopback or str(address) in own for address in addresses):
        yield note(
            f"the hostname {name} resolves to {facts.addresses[0]}, which no interface here has",
            f"correct it in DNS, or {line}",
        )


def _outer_address(facts: Facts) -> str | None:
    usable = [one for one in facts.interfaces if not one.loopback and not one.link_local]
    return next((one.address for one in sorted(usable, key=lambda one: ":" in one.address)), None)
