"""What a run left in its folder -> pages about it, and tables of several runs.

records     metrics.jsonl and config.toml -> one value, as far as they reach
measures    records -> the numbers that are told: rates, idle shares, predicted beside measured
page        records -> report.html
comparison  several runs -> what they reached at equal steps and times, and how they differ
table       a comparison -> its rows, and a page
writing     the report that every run leaves at its end, however it ends

Nothing here imports torch.
"""
