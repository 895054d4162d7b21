"""Lists of values -> a training run of each combination, a process each, and a table of them.

variants    lists -> combinations, and what each is called
shares      a machine -> what each of several runs at once computes with
children    commands -> so many at a time, and all ended together
record      what is known of each run: sweep.json
table       runs -> rows, the best first: sweep.md
sweep       all of these in a row
"""
