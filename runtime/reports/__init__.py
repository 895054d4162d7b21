"""Reports about runs and comparisons of runs, and drawings of plans.

measures      records -> rates, idle shares, predictions and measurements
charts        numbers -> charts and bars in SVG units
gantt         timelines -> drawings of a step in SVG units
rendering     values -> pages, by the templates
run_drawings  records and plan -> the curves and the drawn step of a run's page
page          records -> report.html
comparison    records of several runs -> their comparison, and its page

model_strip       plan -> the modules, stages and cuts
memory_over_time  plan and simulated step -> the memory of each rank over the step
planned_steps     plan -> both for one step under each schedule
picture           plan -> one SVG file with all of it

Nothing here imports torch.
"""
