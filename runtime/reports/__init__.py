"""Reports about runs and comparisons of runs, from the records in their folders.

measures    records -> rates, idle shares, predictions and measurements; comparisons of runs
charts      numbers and timelines -> charts, bars and step drawings in SVG units
rendering   values -> pages, by the templates
page        records -> report.html, and a page that compares runs

Nothing here imports torch.
"""
