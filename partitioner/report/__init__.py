"""A plan and the code of its stages -> report.html: one page, no network.

page          plan, code -> the page, its numbers on top, the details of every stage, the code
charts        plan -> bars of times and memory, one simulated step by schedule, curves

Python holds the decisions and the geometry, the templates `report*.j2` hold the layout.
"""

from .page import render_report

__all__ = ["render_report"]
