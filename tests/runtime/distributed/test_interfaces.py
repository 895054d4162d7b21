"""The network between the ranks, and the error when rank 0 is out of its reach."""

from __future__ import annotations

import os

import pytest

from asyncpipe.runtime.config.settings import SettingsError
from asyncpipe.runtime.distributed import interfaces
from asyncpipe.runtime.distributed.interfaces import (
    VARIABLES,
    Interface,
    choose_interface,
    name_interface,
    unreachable,
)
from asyncpipe.runtime.distributed.ranks import RankInfo

LOOPBACK = Interface("lo", "127.0.0.1")
ETHERNET = Interface("eth0", "10.0.0.11")
INFINIBAND = Interface("ib0", "10.1.0.11")
FAR = RankInfo(2, 4, 0, 2, "gpu-a01", 29500)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host with two networks, where gpu-a01 is known by its Ethernet address."""
    monkeypatch.setattr(interfaces, "interfaces", lambda: (LOOPBACK, ETHERNET, INFINIBAND))
    monkeypatch.setattr(interfaces, "resolve_host", lambda name: ("10.0.0.10",))
    monkeypatch.setattr(interfaces, "source_towards", lambda address: "10.0.0.11")
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-a02")
    return monkeypatch


def test_ranks_of_one_host_talk_over_loopback(host: pytest.MonkeyPatch) -> None:
    assert choose_interface(RankInfo(0, 2, 0, 2)) == "lo"


def test_ranks_of_several_hosts_talk_over_what_leads_to_the_first(
    host: pytest.MonkeyPatch,
) -> None:
    assert choose_interface(FAR) == "eth0"
    host.setattr(interfaces, "source_towards", lambda address: "10.1.0.11")
    assert choose_interface(FAR) == "ib0"


def test_a_head_that_is_its_own_loopback_leaves_the_only_network(
    host: pytest.MonkeyPatch,
) -> None:
    host.setattr(interfaces, "resolve_host", lambda name: ("127.0.1.1",))
    host.setattr(interfaces, "source_towards", lambda address: "127.0.0.1")
    with pytest.raises(SettingsError) as error:
        choose_interface(FAR)
    assert "gpu-a02 reaches the other hosts: it has eth0 (10.0.0.11), ib0 (10.1.0.11)" in (
        error.value.what
    )
    assert "--interface eth0" in error.value.cure
    host.setattr(interfaces, "interfaces", lambda: (LOOPBACK, ETHERNET))
    assert choose_interface(FAR) == "eth0"


def test_without_an_address_of_the_first_the_addresses_of_another_host_decide(
    host: pytest.MonkeyPatch,
) -> None:
    nowhere = RankInfo(1, 2, 0, 1, "")
    ethernet, infiniband = "10.0.0.10", "10.1.0.10"
    sources = {ethernet: ETHERNET.address, infiniband: INFINIBAND.address}
    host.setattr(interfaces, "source_towards", sources.get)
    assert choose_interface(nowhere, peer=[infiniband, ETHERNET.address]) == "ib0"
    with pytest.raises(SettingsError, match="rank 0 is at 10.0.0.10, 10.1.0.10"):
        choose_interface(nowhere, peer=[ethernet, infiniband])


def test_an_interface_that_is_asked_for_must_be_there(host: pytest.MonkeyPatch) -> None:
    assert choose_interface(FAR, "ib0") == "ib0"
    with pytest.raises(SettingsError) as error:
        choose_interface(FAR, "ib1")
    assert error.value.what == (
        "--interface ib1: gpu-a02 has lo (127.0.0.1), eth0 (10.0.0.11), ib0 (10.1.0.11)."
    )


def test_what_the_environment_names_stands_unless_the_user_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = VARIABLES
    monkeypatch.setenv(first, "ib0")
    monkeypatch.setenv(second, "")
    monkeypatch.delenv(second)
    name_interface("eth0", requested=False)
    assert (os.environ[first], os.environ[second]) == ("ib0", "eth0")
    name_interface("eth1", requested=True)
    assert (os.environ[first], os.environ[second]) == ("eth1", "eth1")


def test_this_machine_has_a_loopback() -> None:
    assert LOOPBACK.address in {each.address for each in interfaces.interfaces()}
    assert interfaces.source_towards("127.0.0.1") == "127.0.0.1"


def test_an_unreachable_head_is_told_with_what_was_tried(host: pytest.MonkeyPatch) -> None:
    host.setattr(interfaces, "resolve_host", lambda name: ("127.0.1.1",))
    error = unreachable(RankInfo(2, 4, 0, 2, "gpu-a01", 1), 60.0)
    assert error.what == (
        "rank 2 on gpu-a02 cannot reach rank 0 at gpu-a01:1 in 60 s (127.0.1.1: connection "
        "refused; on gpu-a02 gpu-a01 is 127.0.1.1, its own loopback)."
    )
    assert "--master-addr" in error.cure and "eth0 (10.0.0.11)" in error.cure
    host.setattr(interfaces, "resolve_host", lambda name: ())
    assert "gpu-a02 cannot resolve the name gpu-a01" in unreachable(FAR, 60.0).what
