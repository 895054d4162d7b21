"""Files of devices and links: what they say, and what is answered when they say it badly."""

from pathlib import Path

import pytest

from asyncpipe.partitioner.graph.costs import LOCALHOST, Link
from asyncpipe.partitioner.graph.rank_model import Device
from asyncpipe.partitioner.planning.cluster import NETWORK, Cluster, cluster_of_hosts
from asyncpipe.partitioner.planning.cluster_file import read_cluster
from asyncpipe.runtime.errors import PlanError

EXAMPLE = Path(__file__).parents[3] / "examples" / "two_hosts.toml"
DEVICE = '[[devices]]\nname = "a"\nhost = "h1"\ncount = 2\n'
OTHER = '[[devices]]\nname = "b"\nhost = "h2"\nspeed = 0.5\nmemory_gib = 16\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "devices.toml"
    path.write_text(text)
    return path


def test_the_example_has_four_cards_on_two_hosts() -> None:
    cluster = read_cluster(EXAMPLE)
    assert [device.name for device in cluster.devices] == ["RTX 3090"] * 2 + ["RTX A4000"] * 2
    assert [device.memory_bytes / 2**30 for device in cluster.devices] == [24, 24, 16, 16]
    assert cluster.hosts == ("tower", "attic")
    assert cluster.link(0, 1) == cluster.link(2, 3) == Link(0.02, 12e9)
    assert cluster.link(1, 2) == cluster.slowest_link == Link(0.06, 1.1e9)


def test_a_setting_has_the_devices_and_links_in_the_order_asked() -> None:
    cluster = read_cluster(EXAMPLE)
    setting = cluster.setting([[2], [0], [1]], schedule="1f1b")
    assert [device.speed for device in setting.devices] == [0.55, 1.0, 1.0]
    assert setting.links == (Link(0.06, 1.1e9), Link(0.02, 12e9))
    assert setting.schedule == "1f1b"
    assert cluster.setting([[0]]).links is None


def test_replicas_count_as_the_slowest_of_their_column() -> None:
    setting = read_cluster(EXAMPLE).setting([[0, 2], [1, 3]])
    assert setting.replicas == (2, 2)
    assert [device.speed for device in setting.devices] == [0.55, 0.55]
    assert [device.memory_bytes / 2**30 for device in setting.devices] == [16, 16]
    assert setting.links == (Link(0.02, 12e9),)
    assert setting.exchange == (Link(0.06, 1.1e9), Link(0.06, 1.1e9))


def test_the_most_particular_link_holds(tmp_path: Path) -> None:
    third = OTHER.replace('"b"', '"c"').replace("h2", "h3")
    links = '[[links]]\nbetween = "*"\nbandwidth_gb_s = 2\n'
    links += '[[links]]\nbetween = ["h2", "*"]\nbandwidth_gb_s = 3\n'
    links += '[[links]]\nbetween = ["h3", "h2"]\nbandwidth_gb_s = 4\n'
    links += '[[links]]\nwithin = "h1"\nbandwidth_gb_s = 5\n'
    cluster = read_cluster(written(tmp_path, "overlap = true\n" + DEVICE + OTHER + third + links))
    speeds = [
        cluster.link_of_hosts(*pair).bytes_per_s / 1e9
        for pair in [("h1", "h3"), ("h1", "h2"), ("h2", "h3"), ("h1", "h1"), ("h2", "h2")]
    ]
    assert speeds == [2, 3, 4, 5, LOCALHOST.bytes_per_s / 1e9]
    assert cluster.link(0, 1).overlap
    assert cluster.setting([[0], [1]]).overlap


def test_a_link_joins_two_devices_by_name(tmp_path: Path) -> None:
    cards = "".join(f'[[devices]]\nname = "gpu{n}"\nhost = "h{n // 4}"\n' for n in range(8))
    pair = (
        '[[links]]\ndevices = ["gpu5", "gpu2"]\nbandwidth_gb_s = 50\nlatency_us = 5\nduplex = 1.9\n'
    )
    within = '[[links]]\nwithin = "*"\nbandwidth_gb_s = 12\nduplex = 2\n'
    cluster = read_cluster(written(tmp_path, cards + pair + within))
    assert cluster.link(2, 5) == cluster.link(5, 2) == Link(0.005, 50e9, duplex=1.9)
    assert cluster.link(0, 1) == Link(0.0, 12e9, duplex=2.0)
    assert cluster.setting([[2], [5], [6]]).links == (
        Link(0.005, 50e9, duplex=1.9),
        Link(0.0, 12e9, duplex=2.0),
    )
    assert cluster.setting([[2, 0], [3, 1]]).exchange[0].duplex == 2


def test_devices_are_interchangeable_if_their_links_are(tmp_path: Path) -> None:
    cards = "".join(f'[[devices]]\nname = "gpu{n}"\n' for n in range(5))
    links = "".join(
        f'[[links]]\ndevices = ["gpu{a}", "gpu{b}"]\nbandwidth_gb_s = 50\n'
        for a, b in [(0, 1), (2, 3)]
    )
    kinds = read_cluster(written(tmp_path, cards + links)).kinds
    assert kinds[0] == kinds[1] != kinds[2] == kinds[3] != kinds[4] != kinds[0]


def test_a_device_has_the_memory_and_times_of_its_spec(tmp_path: Path) -> None:
    spec = '[[devices]]\nspec = "a100-40g"\n[[devices]]\nspec = "t4"\nspeed = 0.3\nmemory_gib = 8\n'
    first, second = read_cluster(written(tmp_path, spec)).devices
    assert first == Device("a100-40g", 1.0, 40 * 2**30, "", "a100-40g")
    assert second == Device("t4", 0.3, 8 * 2**30, "", None)


def test_hosts_in_short_are_equal_devices() -> None:
    cluster = cluster_of_hosts("h1:2, h2:1")
    assert cluster.devices == (Device(host="h1"), Device(host="h1"), Device(host="h2"))
    assert cluster.link(0, 1) == LOCALHOST
    assert cluster.link(1, 2) == NETWORK
    assert cluster == Cluster(cluster.devices)


@pytest.mark.parametrize(
    ("text", "what", "cure"),
    [
        ("", "has no devices", "[[devices]]"),
        ("[[devices", "is not TOML", ""),
        ("[[device]]\n", "the file has no device", "Did you mean devices?"),
        ("devices = 4\n", "devices is not a list of tables", "[[devices]]"),
        (DEVICE + "memory = 24\n", "device 1: a device has no memory", "memory_gib?"),
        ("[[devices]]\ncount = 2\n", "device 1 has no name", "name ="),
        ('[[devices]]\nname = ""\n', "name = '' is not a name", "name ="),
        ('[[devices]]\nname = "a"\ncount = 0\n', "count = 0 is not", "count = 2"),
        ('[[devices]]\nname = "a"\ncount = true\n', "count = True is not", "count = 2"),
        ('[[devices]]\nname = "a"\nspeed = -1\n', "speed = -1 is not a number above 0", "speed"),
        ('[[devices]]\nname = "a"\nspeed = "fast"\n', "speed = 'fast' is not", "speed"),
        ('[[devices]]\nname = "a"\nmemory_gib = inf\n', "memory_gib = inf is not", "memory_gib"),
        ('[[devices]]\nspec = "a100"\n', "no device is called a100", "a100-"),
        ('[[devices]]\nspec = "t4"\nkind = "T4"\n', "both spec and kind", "leave one"),
        ("overlap = 1\n" + DEVICE, "overlap = 1 is neither true nor false", ""),
        (
            DEVICE + "[[links]]\nbandwidth_gb_s = 1\n",
            "needs one of within, between and devices",
            '"*"',
        ),
        (DEVICE + '[[links]]\nwithin = "h1"\n', "link 1 has no bandwidth_gb_s", "bytes/s"),
        (DEVICE + '[[links]]\nwithin = "h11"\n', "no device is on host 'h11'", "Did you mean h1?"),
        (DEVICE + '[[links]]\nbetween = "h1"\n', "'h1' is not two hosts", "between ="),
        (DEVICE + '[[links]]\nbetween = ["h1"]\n', "['h1'] is not two hosts", "between ="),
        (DEVICE + OTHER + '[[links]]\ndevices = "b"\n', "'b' is not two devices", '["a", "b"]'),
        (
            DEVICE + OTHER + '[[links]]\ndevices = ["b", "b"]\n',
            "between b and itself",
            "two devices",
        ),
        (DEVICE + OTHER + '[[links]]\ndevices = ["b", "a"]\n', "2 devices are called 'a'", "count"),
        (OTHER + '[[links]]\ndevices = ["b", "bb"]\n', "no device is called 'bb'", "mean b?"),
        (
            DEVICE + '[[links]]\nwithin = "h1"\nbandwidth_gb_s = 1\nduplex = 2.5\n',
            "duplex = 2.5 is not 1 to 2",
            "duplex = 2",
        ),
        (
            DEVICE + '[[links]]\nbetween = ["h1", "h1"]\nbandwidth_gb_s = 1\n',
            "between h1 and itself",
            "within",
        ),
        (
            DEVICE + '[[links]]\nwithin = "h1"\nbandwidth_gb_s = 0\n',
            "bandwidth_gb_s = 0 is not a number above 0",
            "bandwidth_gb_s = 1",
        ),
        (
            DEVICE + '[[links]]\nwithin = "h1"\nbandwidth_gb_s = 1\n' * 2,
            "link 2 joins what an earlier one joins",
            "one of the two",
        ),
        (DEVICE + '[[links]]\nwithin = "h1"\nbandwith_gb_s = 1\n', "bandwith", "bandwidth_gb_s?"),
    ],
)
def test_what_a_file_says_badly_is_told_in_a_sentence(
    tmp_path: Path, text: str, what: str, cure: str
) -> None:
    with pytest.raises(PlanError) as raised:
        read_cluster(written(tmp_path, text))
    assert what in raised.value.what
    assert cure in raised.value.cure
    assert "\n" not in raised.value.what


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        read_cluster(tmp_path / "none.toml")


@pytest.mark.parametrize("text", ["h1", "h1:0", "h1:2,", "h1:2,h1:3", "h1:x", "h1:2;h2:2", ""])
def test_hosts_in_short_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="--hosts") as raised:
        cluster_of_hosts(text)
    assert "h1:4,h2:2" in raised.value.cure
