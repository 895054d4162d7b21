"""Reports about runs and comparisons of runs, from the records in their folders.

measures    records -> rates, idle shares, predictions and measurements
charts      numbers and timelines -> charts, bars and step drawings in SVG units
rendering   values -> pages, by the templates
page        records -> report.html
comparison  records of several runs -> their comparison, and its page

Nothing here imports torch.
"""
