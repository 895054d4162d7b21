"""Reading and writing cost graphs."""

from __future__ import annotations

import json

import networkx as nx
import pytest

from asyncpipe.partitioner.graph.formats import read_graph, write_graph
from asyncpipe.partitioner.planning.planner import plan_graph
from asyncpipe.runtime.errors import PlanError

PIPEDREAM = """\
node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, \
activation_size=0.0, parameter_size=0.000
node3 -- LSTM(4, 4) -- forward_compute_time=2.000, backward_compute_time=3.500, \
activation_size=[100.0; 20.0; 4.0], parameter_size=80.000
node2 -- Embedding(9, 4) -- forward_compute_time=1.000, backward_compute_time=1.500, \
activation_size=40.0, parameter_size=144.000 -- stage_id=0
node4 -- Linear(4, 9) -- forward_compute_time=0.500, backward_compute_time=0.500, \
activation_size=36.0, parameter_size=180.000
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
"""


def test_what_is_written_is_read_back(tmp_path):
    graph = nx.DiGraph(name="two")
    graph.add_node("a", forward_ms=1.5, parameters={"w": 8}, modules=["h.0"], block="h.0")
    graph.add_node("b", backward_ms=2.0)
    graph.add_edge("a", "b", tensors={"a": 4}, grads={})
    write_graph(graph, tmp_path / "g.json")
    again = read_graph(tmp_path / "g.json")
    assert dict(again.nodes(data=True)) == dict(graph.nodes(data=True))
    assert list(again.edges(data=True)) == list(graph.edges(data=True))
    assert again.graph == {"name": "two"}
    write_graph(again, tmp_path / "h.json")
    assert (tmp_path / "g.json").read_bytes() == (tmp_path / "h.json").read_bytes()


def test_pipedream_graph_is_read_in_topological_order(tmp_path):
    (tmp_path / "graph.txt").write_text(PIPEDREAM)
    graph = read_graph(tmp_path / "graph.txt")
    assert list(graph) == ["node2", "node3", "node4"]
    assert graph.nodes["node3"]["output_bytes"] == 124
    plan = plan_graph(graph, stages=2)
    assert (plan.bottleneck_ms, plan.optimal) == (6.5, True)


def dnn_node(id_, time, backward=0, colour=None):
    return {
        "id": id_, "name": f"op{id_}", "fpgaLatency": time, "cpuLatency": 10 * time,
        "supportedOnFpga": 1, "isBackwardNode": backward, "size": 1.0, "colorClass": colour or id_,
    }  # fmt: skip


def test_dnn_partitioning_training_graph_keeps_colours_together(tmp_path):
    raw = {
        "maxFPGAs": 2, "maxCPUs": 0, "maxSizePerFPGA": 1e9,
        "nodes": [
            dnn_node(1, 3.0), dnn_node(2, 2.0), dnn_node(3, 1.0),
            dnn_node(13, 2.0, 1, 3), dnn_node(12, 4.0, 1, 2), dnn_node(11, 6.0, 1, 1),
        ],
        "edges": [
            {"sourceId": 1, "destId": 2, "cost": 0.5},
            {"sourceId": 2, "destId": 3, "cost": 0.25},
            {"sourceId": 3, "destId": 13, "cost": 9.0},
            {"sourceId": 13, "destId": 12, "cost": 0.125},
            {"sourceId": 12, "destId": 11, "cost": 1.0},
        ],
    }  # fmt: skip
    (tmp_path / "g.json").write_text(json.dumps(raw))
    graph = read_graph(tmp_path / "g.json")
    assert list(graph) == ["op1", "op2", "op3"]
    plan = plan_graph(graph, stages=2)
    # {1} = 9 + 0.5 out + 1 in; {2, 3} = 9 + 0.5 in + 1 out.
    assert plan.stage_of == {"op1": 0, "op2": 1, "op3": 1}
    assert [stage.load_ms for stage in plan.stages] == [10.5, 10.5]


def test_dnn_partitioning_devices_are_read_and_backward_nodes_alone_keep_their_order(tmp_path):
    """Node 14 adds two gradients: it has no forward node, and belongs after what it waits for."""
    raw = {
        "maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 5.0,
        "nodes": [
            dnn_node(1, 1.0), dnn_node(2, 2.0), dnn_node(3, 3.0),
            dnn_node(13, 1.0, 1, 3), dnn_node(14, 0.5, 1), dnn_node(11, 1.0, 1, 1),
        ],
        "edges": [
            {"sourceId": 1, "destId": 2, "cost": 0.5},
            {"sourceId": 2, "destId": 3, "cost": 0.5},
            {"sourceId": 13, "destId": 14, "cost": 0.25},
            {"sourceId": 14, "destId": 11, "cost": 0.25},
        ],
    }  # fmt: skip
    (tmp_path / "g.json").write_text(json.dumps(raw))
    graph = read_graph(tmp_path / "g.json")
    assert graph.graph["devices"] == {"accelerators": 2, "cpus": 1, "memory_bytes": 5.0}
    assert graph.nodes["op3"]["times_on"] == {"cpu": (30.0, 10.0)}
    assert set(graph.edges) == {("op1", "op2"), ("op2", "op3"), ("op14", "op3"), ("op1", "op14")}
    assert [graph.edges[edge]["grads"] for edge in (("op1", "op14"), ("op14", "op3"))] == [
        {"14": 0}, {"13": 0}
    ]  # fmt: skip
    write_graph(graph, tmp_path / "ours.json")
    again = read_graph(tmp_path / "ours.json")
    assert again.graph == graph.graph


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"a": 1}', "is JSON, but not a cost graph"),
        ('{"a": ', "is not JSON: Expecting value"),
        ("hello", "is not a cost graph, or is damaged: it has no nodes"),
        ('{"format": "asyncpipe cost graph", "schema": 9}', "has schema 9"),
        (
            '{"format": "asyncpipe cost graph", "schema": 1, "nodes": [], '
            '"edges": [{"source": "a", "target": "b"}]}',
            "edge a -> b names no node",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path, text, what):
    (tmp_path / "g.json").write_text(text)
    with pytest.raises(PlanError, match=what):
        read_graph(tmp_path / "g.json")


def test_a_missing_file_is_refused():
    with pytest.raises(PlanError, match="nowhere.json is not a file"):
        read_graph("nowhere.json")
