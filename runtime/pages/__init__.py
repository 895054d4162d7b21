"""What the pages about plans and about runs are made of: no network, no script, inline SVG.

templating  the templates, which hold layout and markup (`page`, `shapes`, `report_style`)
cards       a heading with a number
bars        shares of a whole -> segments of a bar
gantt       what ranks did, and when -> boxes in rows
chart       series of numbers -> lines between ticks
ticks       the range of an axis -> round numbers
"""
