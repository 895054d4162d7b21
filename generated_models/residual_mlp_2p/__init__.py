"""examples/residual_mlp.py:build in 2 stages; README.md and plan.json say what each is."""

from .stage_0 import Stage0
from .stage_1 import Stage1

STAGES = (
    Stage0,
    Stage1,
)
