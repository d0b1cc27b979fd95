"""What a rig needs of the machine."""

import os
import shutil
import subprocess

_PACKAGES = {
    "bridge": "iproute2",
    "ip": "iproute2",
    "tc": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "mount": "mount",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}


def missing() -> list[str]:
    """What keeps this machine from a rig, each with what to do; empty where nothing does."""
    lacks = [
        f"{tool} is not on PATH: install {package} (Debian's name for it)"
        for tool, package in _PACKAGES.items()
        if shutil.which(tool) is None
    ]
    if os.geteuid() != 0:
        lacks.append("hosts are made of namespaces and mounts: run the tests as root")
    elif not lacks and (refusal := _refusal()):
        lacks.append(f"no namespaces here ({refusal}): in a container, start it with --privileged")
    return lacks


def _refusal() -> str:
    attempt = ["mount", "-t", "tmpfs", "tmpfs", "/run"]
    command = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", *attempt]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.stderr.strip() if done.returncode else ""
