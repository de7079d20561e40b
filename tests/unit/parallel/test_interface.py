"""The one of several network interfaces that ranks on several machines use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from penstock.parallel.group import interface

APART = ["unshare", "--user", "--map-root-user", "--net"]
"""Runs a command with network interfaces of its own."""
SCRIPT = """
ip link set lo up
ip link add one type bridge && ip addr add 10.77.0.1/24 dev one && ip link set one up
ip link add two type bridge && ip addr add 10.78.0.1/24 dev two && ip link set two up
exec "$0" -c "$1"
"""
JOIN = """
import os, torch, torch.distributed as dist
from penstock.parallel import group
from penstock.parallel.axis import Place
group.joined(Place(rendezvous="tcp://10.78.0.1:29501"), torch.device("cpu"))
dist.all_reduce(torch.ones(1))
print(os.environ["GLOO_SOCKET_IFNAME"], *map(group.interface, ["10.77.0.1", "10.78.0.9", "192.0.2.9"]))
"""


def test_the_loopback_has_a_name_and_an_unknown_host_has_none() -> None:
    assert interface("127.0.0.1") == interface("127.0.0.5") == "lo"
    assert interface("nowhere.invalid") is None


@pytest.mark.skipif(shutil.which("ip") is None or subprocess.run(
    [*APART, "true"], check=False, capture_output=True).returncode != 0, reason="no namespaces of networks here")
@pytest.mark.parametrize("asked", [None, "one"])
def test_ranks_use_the_interface_on_which_machine_0_is_reached(asked: str | None) -> None:
    """Of two, unless the user has named one."""
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    if asked is not None:
        environment["GLOO_SOCKET_IFNAME"] = asked
    found = subprocess.run([*APART, "sh", "-c", SCRIPT, sys.executable, JOIN], env=environment, capture_output=True, text=True,
                           timeout=100, check=False)
    assert found.stdout.split() == [asked or "two", "one", "two", "None"], found.stderr
