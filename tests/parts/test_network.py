"""This host's own addresses, and the way to others; beside what ``ip`` says."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess

import pytest

from ddp_callbacks.cluster.network import address_for_others, address_towards, addresses_of, is_loopback, own_addresses
from ddp_callbacks.launcher.facts import facts


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip")
def test_every_address_of_every_interface_is_known() -> None:
    """gloo finds the interface of every address."""
    said = subprocess.run(["ip", "-j", "address"], capture_output=True, check=True, timeout=60).stdout
    expected = {
        found["local"]: link["ifname"] for link in json.loads(said) for found in link["addr_info"] if "local" in found
    }
    assert own_addresses() == expected
    assert facts("1", 0, "", "")["interfaces"] == expected  # what ddprun doctor sees of a node, without this library


def test_the_route_to_an_address_of_this_host_begins_there() -> None:
    own = [each for each in own_addresses() if not each.startswith("fe80")]
    assert [address_towards(each) for each in own] == own and "127.0.0.1" in own


def test_what_is_a_machine_to_itself() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.0.1.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "fe80::1%eth0", "fd00::2", "node1")))
    assert addresses_of("127.0.1.1", 0) == ["127.0.1.1"]


def test_the_address_for_others_is_that_on_the_way_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {address for address in own_addresses() if not is_loopback(address)}
    assert address_for_others(["127.0.0.1", "no-such-host.invalid"]) in (own or {None})

    def no_network(*_: object, **__: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    for addresses, expected in (
        ({"127.0.0.1": "lo", "10.0.0.1": "eth0", "fe80::1": "eth0"}, "10.0.0.1"),
        ({"127.0.0.1": "lo", "10.0.0.1": "eth0", "172.17.0.1": "docker0"}, None),
        ({"127.0.0.1": "lo"}, None),
    ):
        monkeypatch.setattr("ddp_callbacks.cluster.network.own_addresses", lambda addresses=addresses: addresses)
        assert address_for_others([]) == expected
