"""The order of devices whose links differ: compared with all orders that there are."""

import itertools
import random

import networkx as nx
import numpy as np
import pytest

from asyncpipe.partitioner.graph.costs import Link, both_ways_ms
from asyncpipe.partitioner.graph.rank_model import Device
from asyncpipe.partitioner.planning.choose_devices import choose, sentences
from asyncpipe.partitioner.planning.cluster import Cluster
from asyncpipe.partitioner.solvers.chain import optimum
from asyncpipe.tests.support.models.placements import problem_of


def two_cliques(number: int, generator: random.Random) -> Cluster:
    """Devices of one host in two halves, each with fast links, and slow links between them."""
    half = [0, 1] * number
    generator.shuffle(half := half[:number])
    pairs = {
        (first, second): Link(
            generator.choice([0.0, 0.1]),
            generator.uniform(*((4e9, 5e9) if half[first] == half[second] else (5e8, 1e9))),
            duplex=generator.choice([1.0, 1.7]),
        )
        for first, second in itertools.combinations(range(number), 2)
    }
    return Cluster(tuple(Device(f"gpu{n}", host="box") for n in range(number)), pairs=pairs)


def layers(number: int, generator: random.Random) -> nx.DiGraph:
    graph = nx.DiGraph(name="layers")
    for index in range(number):
        forward_ms = generator.randint(1, 3)
        graph.add_node(index, forward_ms=forward_ms, backward_ms=2 * forward_ms)
        graph.nodes[index]["output_bytes"] = generator.randint(1, 20) * 1e6
    nx.add_path(graph, range(number))
    return graph


def least_of_all_orders_ms(graph: nx.DiGraph, cluster: Cluster) -> float:
    """The smallest bottleneck of a layer per device over all orders of the devices."""
    orders = np.array([*itertools.permutations(range(len(graph)))])
    numbers = range(len(graph))
    links = [[cluster.link(a, b) if a != b else Link() for b in numbers] for a in numbers]
    latency_ms, per_byte_ms, duplex = (
        np.array([[of(link) for link in row] for row in links])
        for of in (
            lambda link: link.latency_ms,
            lambda link: 1e3 / link.bytes_per_s,
            lambda link: link.duplex,
        )
    )
    slowest_ms = np.zeros(len(orders))
    for stage, node in enumerate(graph.nodes.values()):
        ends = []
        for left, right in ((stage - 1, stage), (stage, stage + 1)):
            if left < 0 or right == len(graph):
                continue
            pair, sent = (orders[:, left], orders[:, right]), graph.nodes[left]["output_bytes"]
            ends.append((2 * (latency_ms[pair] + sent * per_byte_ms[pair]), duplex[pair]))
        (first_ms, first), (second_ms, second) = (*ends, (0.0, 2.0))[:2]
        at_once = np.minimum(first, second)
        talk_ms = np.where(
            at_once == 1, first_ms + second_ms, both_ways_ms(first_ms, second_ms, 1.7)
        )
        work_ms = node["forward_ms"] + node["backward_ms"]
        slowest_ms = np.maximum(slowest_ms, work_ms + talk_ms)
    return float(slowest_ms.min())


@pytest.mark.parametrize("seed", range(3))
def test_of_all_orders_of_eight_devices_the_best_is_chosen(seed: int) -> None:
    generator = random.Random(seed)
    cluster, graph = two_cliques(8, generator), layers(8, generator)
    choice = choose(graph, cluster, stages=8, method="chain", prefer_modules=0.0)
    assert choice.solution.bottleneck_ms == pytest.approx(least_of_all_orders_ms(graph, cluster))
    assert choice.as_listed_ms is not None
    assert choice.as_listed_ms > choice.solution.bottleneck_ms * 1.05
    assert "in the listed order the bottleneck stage would take" in " ".join(sentences(choice, 8))


@pytest.mark.parametrize("seed", range(3))
def test_order_and_cuts_are_searched_together(seed: int) -> None:
    generator = random.Random(seed)
    cluster, graph = two_cliques(4, generator), layers(8, generator)
    slowest = cluster.slowest_link
    settings = (
        cluster.setting([[device] for device in order])
        for order in itertools.permutations(range(4))
    )
    best_ms = min(optimum(problem_of(graph, 4, slowest, setting)) for setting in settings)
    choice = choose(graph, cluster, stages=4, method="chain", prefer_modules=0.0)
    assert choice.solution.bottleneck_ms == pytest.approx(best_ms)


def test_many_devices_are_exchanged_until_none_helps() -> None:
    """Two rings of fast links, listed alternately: their devices come together."""
    fast, number = Link(bytes_per_s=1e10), 12
    cluster = Cluster(
        tuple(Device(f"gpu{n}") for n in range(number)),
        {"*": Link(bytes_per_s=1e9)},
        pairs={(n, n + 2): fast for n in range(number - 2)},
    )
    graph = layers(number, random.Random(0))
    choice = choose(graph, cluster, stages=number, method="chain", prefer_modules=0.0)
    order = choice.layout.devices
    listed = sum(cluster.link(n, n + 1) == fast for n in range(number - 1))
    joined = sum(cluster.link(a, b) == fast for a, b in itertools.pairwise(order))
    assert listed == 0 and joined >= 6
    assert choice.as_listed_ms > choice.solution.bottleneck_ms * 1.05
