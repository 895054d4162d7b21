"""`--explain` of both commands: the printed values are those of the plan."""

import json
from pathlib import Path

import networkx as nx
import pytest

from asyncpipe.partitioner.graph.formats import write_graph
from asyncpipe.runtime.plan.findings import TOPICS
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.test_cli import MLP, run

FAST = ("--profile", "analytic", "--no-weights")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of the example model, in three stages: `explained` and `plain`."""
    home = tmp_path_factory.mktemp("explained")
    for name, flags in (("explained", ["--explain"]), ("plain", [])):
        result = run(home, "partition", *MLP, "--stages", "3", "--output", name, *FAST, *flags)
        assert result.returncode == 0, result.stderr
        (home / f"{name}.txt").write_text(result.stdout)
    return home


def test_explain_prints_every_finding_below_its_heading(made):
    printed = (made / "explained.txt").read_text()
    findings = read_plan(made / "explained").findings
    assert {finding.topic for finding in findings} == set(TOPICS)
    places = [printed.index(heading) for heading in TOPICS.values()]
    assert places == sorted(places)
    for finding in findings:
        assert f"    {finding.text}\n" in printed
    assert "✓ explain" in printed


def test_without_explain_nothing_is_planned_again_or_printed(made):
    assert not any(heading in (made / "plain.txt").read_text() for heading in TOPICS.values())
    changes = [one.about for one in read_plan(made / "plain").findings if one.topic == "change"]
    assert changes and all(about.startswith("number of micro-batches with ") for about in changes)


@pytest.mark.parametrize("folder", ["explained", "plain"])
def test_inspect_tells_what_the_plan_of_a_folder_holds(made, folder):
    result = run(made, "inspect", folder, "--explain")
    assert result.returncode == 0, result.stderr
    for finding in read_plan(made / folder).findings:
        assert f"    {finding.text}\n" in result.stdout
    for stage in read_plan(made / folder).stages[1:]:
        assert f"between stages {stage.index - 1} and {stage.index}" in result.stdout


def test_findings_are_in_the_json_that_inspect_prints(made):
    found = json.loads(run(made, "inspect", "explained", "--json").stdout)["findings"]
    assert [one["text"] for one in found] == [
        finding.text for finding in read_plan(made / "explained").findings
    ]
    about = next(one for one in found if one["about"] == "one more device (4)")
    assert about["bottleneck_ms"] > 0


def test_a_cost_graph_is_explained_too(tmp_path):
    graph = nx.DiGraph(name="toy")
    for index, forward_ms in enumerate((3.0, 1.0, 2.0, 4.0)):
        graph.add_node(f"n{index}", forward_ms=forward_ms)
    nx.add_path(graph, ["n0", "n1", "n2", "n3"])
    write_graph(graph, tmp_path / "toy.json")
    command = ("partition", "--graph", "toy.json", "--stages", "2")
    printed = run(tmp_path, *command, "--explain").stdout
    assert "one more device (3)\n    bottleneck stage 6.00 ms → 4.00 ms, 1.50×" in printed
    assert "Why each cut" not in run(tmp_path, *command).stdout
    found = json.loads(run(tmp_path, *command, "--explain", "--json").stdout)["findings"]
    assert found and all(one["text"] in printed for one in found)
