"""A plan -> the five numbers on top of its report."""

from __future__ import annotations

from ...runtime.forecast import forecast_one_step
from ...runtime.pages.cards import Card
from ...runtime.plan import Plan
from ...runtime.traffic import traffic
from ...runtime.wording import counted, write_bytes, write_ms, write_share
from .curves import drawn_schedules

_MORE = (1, 2, 4)  # times the plan's micro-batches


def cards(plan: Plan) -> tuple[Card, ...]:
    """Gain over the even split, slowest stage, one step, idle share, bytes a boundary."""
    return _gain(plan), _slowest(plan), _step(plan), _idle(plan), _bytes(plan)


def _gain(plan: Plan) -> Card:
    ratio = plan.even_split_ms / plan.bottleneck_ms if plan.bottleneck_ms else 1.0
    detail = f"counting blocks instead: slowest stage {write_ms(plan.even_split_ms)}"
    return Card("Faster than an even split", f"{ratio:.2f}×", detail)


def _slowest(plan: Plan) -> Card:
    bound = f"no plan can be below {write_ms(plan.lower_bound_ms)}"
    loads_ms = {str(stage.index): stage.load_ms for stage in plan.stages}
    if plan.slowest == "rank":
        loads_ms = {
            str(rank): sum(plan.stages[stage].load_ms for stage in stages)
            for rank, stages in plan.stages_of_rank.items()
        }
    slowest = max(loads_ms, key=loads_ms.__getitem__)
    heading = f"Slowest: {plan.slowest} {slowest}"
    return Card(heading, write_ms(plan.bottleneck_ms), bound)


def _step(plan: Plan) -> Card:
    count = plan.setting.micro_batches
    step = forecast_one_step(plan, plan.setting.schedule, count)
    detail = f"{plan.setting.schedule}, {counted(count, 'micro-batch', 'micro-batches')}"
    return Card("One simulated step", write_ms(step.step_ms), detail)


def _idle(plan: Plan) -> Card:
    name = drawn_schedules(plan)[0]
    shares = {
        number: forecast_one_step(plan, name, number).idle_share
        for number in (plan.setting.micro_batches * times for times in _MORE)
    }
    first, *more = (f"{number}: {write_share(share)}" for number, share in shares.items())
    number, share = first.split(": ")
    return Card(
        f"Idle in {name}, {counted(int(number), 'micro-batch', 'micro-batches')}",
        share,
        "with " + ", ".join(more),
    )


def _bytes(plan: Plan) -> Card:
    flows = traffic(plan)
    if not flows:
        return Card("Sent between stages", "nothing", "one stage")
    most = max(flows, key=lambda flow: flow.sent)
    total = sum(flow.sent for flow in flows)
    return Card(
        "Largest boundary, a micro-batch",
        write_bytes(most.sent),
        f"stage {most.source} to {most.target}; all together {write_bytes(total)}, "
        "and gradients back",
    )
