"""Runs of the convergence benchmark that tune methods, momentum and learning rates together.

They look for the gap that late gradients leave after 300 and 1,200 updates.
"""

from evidence import Case

_SHORT, _WIDE, _NEAR = Case("text", 8, 8), Case("text", 8, 8, 1200), Case("text", 8, 1)
_LONG, _FAR = Case("text", 8, 8, 5000), Case("text", 8, 1, 1200)
_BETWEEN = Case("text", 8, 4)
_DEEP, _DEEP_4, _DEEP_1 = (Case("text", 16, every) for every in (16, 4, 1))
_P, _D, _PD = "stash+partial-gradient", "stash+delay-rate", "stash+partial-gradient+delay-rate"
_MD, _H = "stash+msnag+delay-rate", "stash+hidden-delay-rate"
_PH = "stash+partial-gradient+hidden-delay-rate"
_FARTHEST = Case("text", 8, 1, 5000)
_A = "stash+gap-aware-activations"
TUNED: tuple[tuple[Case, str, float, tuple[int, ...]], ...] = (
    (Case("digits", 8, 1), f"{_D}:muon,momentum=0.5 sync:muon,momentum=0.9", 0.01, (1,)),
    (Case("digits", 8, 8), f"{_PD}:muon,momentum=0.9", 0.01, (1,)),
    (Case("digits", 8, 1), f"{_D}:muon,momentum=0.5", 0.003, (1,)),
    (Case("digits", 8, 8), f"{_PD}:muon,momentum=0.9", 0.03, (1,)),
    (_FAR, f"{_H}:muon,momentum=0.5", 0.03, (1, 2, 3)),
    (_FAR, f"{_H}:muon,momentum=0.65", 0.03, (1, 2, 3, 4)),
    (_FARTHEST, f"{_H}:muon,momentum=0.5", 0.03, (1, 2)),
    (_FARTHEST, f"{_H}:muon,momentum=0.65", 0.03, (1, 2)),
    (_NEAR, f"{_H}:muon,momentum=0.5 {_H}:muon,momentum=0.65", 0.03, (1, 2, 3)),
    (_NEAR, f"{_H}:muon,momentum=0.5 {_H}:muon,momentum=0.65", 0.06, (1,)),
    (_WIDE, f"{_PH}:muon,momentum=0.9", 0.03, (1, 2)),
    (_DEEP_1, f"{_H}:muon,momentum=0.5", 0.03, (1,)),
    (_LONG, f"{_PD}:muon,momentum=0.9 sync:muon,momentum=0.9", 0.03, (2, 1, 3, 4)),
    (_DEEP_4, f"{_PD}:muon,momentum=0.9 {_D}:muon,momentum=0.5", 0.03, (1,)),
    (_NEAR, f"{_D}:muon,momentum=0.5 sync:muon,momentum=0.9", 0.06, (1, 2, 3)),
    (_NEAR, f"sync:muon,momentum=0.9 {_D}:muon,momentum=0.5", 0.03, (1, 2, 3)),
    (_WIDE, f"sync:muon,momentum=0.9 {_PD}:muon,momentum=0.9", 0.02, (1, 2)),
    (_WIDE, f"{_P}:muon", 0.03, (1, 2)),
    (_FAR, f"{_D}:muon,momentum=0.5", 0.03, (1, 2)),
    (_FAR, f"{_D}:muon,momentum=0.5", 0.06, (1,)),
    (_FAR, "stash+msnag:muon", 0.01, (1, 2)),
    (_FAR, f"{_D}:muon,momentum=0.5,sync-end=20%", 0.03, (1, 2)),
    (_WIDE, f"{_PD}:muon,momentum=0.9,sync-end=10%", 0.03, (1, 2)),
    (_DEEP_1, f"sync:muon,momentum=0.9 {_D}:muon,momentum=0.5", 0.03, (1,)),
    (_SHORT, f"{_PD}:muon,momentum=0.9", 0.03, (2, 3)),
    (_BETWEEN, f"{_PD}:muon,momentum=0.9", 0.03, (2, 3)),
    (_NEAR, f"{_D}:muon,momentum=0.5,sync-end=10%", 0.03, (1, 2, 3)),
    (_DEEP, f"{_PD}:muon,momentum=0.9 sync:muon,momentum=0.9", 0.03, (1,)),
    (Case("text", 4, 1), f"{_D}:muon,momentum=0.5", 0.06, (1,)),
    (_NEAR, f"{_D}:muon {_D}:muon,momentum=0.5", 0.01, (1,)),
    (_WIDE, f"sync:muon,momentum=0.9 {_PD}:muon,momentum=0.9", 0.03, (1, 2, 3, 4)),
    (_WIDE, f"{_PD}:muon", 0.03, (1, 2)),
    (_SHORT, f"{_PD}:muon {_PD}:muon,momentum=0.9", 0.03, (1, 2)),
    (_WIDE, "sync:muon", 0.03, (1, 2, 3, 4)),
    (_WIDE, f"{_P}:muon,momentum=0.9", 0.03, (1,)),
    (_WIDE, "sync:muon sync:muon,momentum=0.9", 0.06, (1,)),
    (_SHORT, f"{_P}:muon,momentum=0.9 {_PD}:muon,momentum=0.9", 0.06, (1,)),
    (_SHORT, f"{_P}:muon,momentum=0.9 {_P}:muon,momentum=0.8", 0.03, (1,)),
    (_SHORT, f"{_PD}:muon,momentum=0.8", 0.06, (1,)),
    (_SHORT, f"{_D}:muon,momentum=0.9 stash:muon,momentum=0.9", 0.03, (1,)),
    (_SHORT, f"{_MD}:muon,momentum=0.9 stash+msnag:muon,momentum=0.9", 0.03, (1,)),
    (_SHORT, "stash+aggmsnag:muon", 0.03, (1,)),
    (_SHORT, f"{_D}:adamw", 0.01, (1,)),
    (_SHORT, f"{_D}:adamw", 0.003, (1,)),
    (_BETWEEN, f"{_MD}:muon,momentum=0.9 {_PD}:muon,momentum=0.9", 0.03, (1,)),
    (_BETWEEN, f"{_D}:muon,momentum=0.9 {_D}:muon,momentum=0.5", 0.03, (1,)),
    (_BETWEEN, "stash+msnag:muon,momentum=0.9", 0.03, (1,)),
    (_NEAR, "stash+msnag:muon,sync-end=10% stash+msnag:muon,sync-end=20%", 0.01, (1, 2)),
    (_NEAR, "stash+msnag:muon,momentum=0.9 stash+msnag:muon,momentum=0.8", 0.01, (1,)),
    (_NEAR, "stash+msnag:muon,momentum=0.9", 0.02, (1,)),
    (_NEAR, f"{_MD}:muon {_MD}:muon,momentum=0.9 {_MD}:muon,momentum=0.8", 0.03, (1,)),
    (_NEAR, f"{_MD}:muon,momentum=0.9 {_MD}:muon,momentum=0.5", 0.06, (1,)),
    (_NEAR, f"{_D}:muon {_D}:muon,momentum=0.9 {_D}:muon,momentum=0.8", 0.03, (1,)),
    (_NEAR, f"{_D}:muon,momentum=0.9 {_D}:muon,momentum=0.8", 0.06, (1,)),
    (_NEAR, f"{_D}:muon,momentum=0.2 {_D}:muon,momentum=0", 0.06, (1,)),
    (_NEAR, f"{_D}:muon,momentum=0.5 sync:muon,momentum=0.9", 0.1, (1,)),
    (_NEAR, f"{_D}:muon,momentum=0.9,sync-start=10%", 0.03, (1,)),
    (_NEAR, "none+delay-rate:muon,momentum=0.5", 0.06, (1,)),
    (_NEAR, "sync:muon,momentum=0.8", 0.03, (1,)),
    (_NEAR, "sync:muon,momentum=0.8 sync:muon,momentum=0.5", 0.06, (1,)),
    (_NEAR, "sync:adamw", 0.01, (1,)),
    (_NEAR, f"{_D}:adamw", 0.01, (1,)),
    (_NEAR, f"{_D}:adamw", 0.03, (1,)),
    (_NEAR, "sync:adamw", 0.003, (1, 2, 3)),
    (_NEAR, f"stash:adamw {_A}:adamw", 0.01, (1, 2, 3)),
    (_NEAR, f"stash:adamw {_A}:adamw", 0.001, (1,)),
    (_NEAR, f"stash:adamw {_A}:adamw", 0.003, (1,)),
    (_NEAR, f"stash:adamw {_A}:adamw", 0.03, (1,)),
    (_NEAR, "stash+gap-aware:adamw", 0.01, (1,)),
    (_SHORT, f"{_A}:adamw", 0.001, (1, 2, 3)),
    (_SHORT, "stash:adamw", 0.003, (1, 2, 3)),
    (_SHORT, f"{_A}:adamw", 0.003, (1,)),
    (_SHORT, f"stash:adamw {_A}:adamw", 0.01, (1,)),
    (_SHORT, "stash:adamw", 0.001, (1,)),
    (_SHORT, f"{_A}:adamw", 0.0003, (1,)),
)
"""Case, methods, learning rate, seeds."""
