"""A plan and the code of its stages -> report.html: one page, no network, no script.

page          plan, code -> the page: what is on it, in order
cards         plan -> the five numbers on top
stage_graph   plan -> the pipeline in SVG: boxes, skips, tied weights
bars          plan -> time of every stage, memory of every rank
gantt         plan -> one simulated step by schedule
curves        plan -> idle share and time against the number of micro-batches
stage_details plan, code -> every stage: modules, inputs, outputs, code
code          Python -> coloured HTML

Python holds the decisions and the geometry, the templates `report*.j2` the layout.
"""

from .page import render_report

__all__ = ["render_report"]
