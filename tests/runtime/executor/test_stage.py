"""One stage by itself: what goes in as a leaf comes back as a gradient."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from asyncpipe.runtime.executor.stage import Stage
from asyncpipe.runtime.plan.plan import Boundary, StageSpec, TensorSpec
from asyncpipe.runtime.rng import GeneratorState
from asyncpipe.runtime.staleness.weight_versions import WeightVersions
from asyncpipe.tests.support.models.hand_plans import HandStage, hand_model, regression


class Two(nn.Module):
    """Two results of two inputs; the second input reaches neither by a differentiable way."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * self.scale, (b.detach() > 0) * a


def spec(inputs: Sequence[str], outputs: Sequence[str]) -> StageSpec:
    def tensors(names: Sequence[str]) -> list[TensorSpec]:
        return [TensorSpec(name, "float32", (2,), requires_grad=True) for name in names]

    plan = hand_model([HandStage(lambda: nn.Identity(), ("x",), ("loss",))], regression).plan
    fields = {name: getattr(plan.stages[0], name) for name in StageSpec.__slots__}
    return StageSpec(
        **{
            **fields,
            "inputs": tuple(inputs),
            "outputs": tuple(outputs),
            "receives": tuple(Boundary(tensor, 0, (1,)) for tensor in tensors(inputs)),
            "sends": tuple(Boundary(tensor, 1, (2, 3)) for tensor in tensors(outputs)),
        }
    )


def test_gradients_of_all_readers_are_added_and_unreached_inputs_get_zeros() -> None:
    module = Two()
    stage = Stage(module, spec(("a", "b"), ("c", "d")))
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 1.0])
    outputs, loss = stage.forward(0, {"a": a, "b": b}, {})
    assert loss is None and not outputs["c"].requires_grad and not a.requires_grad
    assert stage.in_flight == 1
    ones = torch.ones(2)
    gradients = stage.backward(0, {"c": [ones, 2 * ones], "d": [ones]}, loss_divisor=1)
    assert torch.equal(gradients["a"], torch.tensor([9.0, 10.0]))
    assert torch.equal(gradients["b"], torch.zeros(2))
    assert float(module.scale.grad) == 9.0
    assert stage.in_flight == 0


def test_readers_gradients_are_added_from_the_last_stage_to_the_first() -> None:
    # 1 + 2**-53 twice is 1, but 2**-53 twice is 2**-52: the order can be seen.
    stage = Stage(nn.Identity(), spec(("a",), ("c",)))
    tiny = torch.tensor([2.0**-53] * 2, dtype=torch.float64)
    stage.forward(0, {"a": torch.ones(2, dtype=torch.float64)}, {})
    gradients = stage.backward(0, {"c": [torch.ones(2).double(), tiny, tiny]}, loss_divisor=1)
    assert gradients["a"][0] == 1 + 2.0**-52


def test_a_stage_without_training_keeps_nothing() -> None:
    stage = Stage(Two(), spec(("a", "b"), ("c", "d")))
    outputs, _ = stage.evaluate(0, {"a": torch.ones(2), "b": torch.ones(2)}, {})
    assert stage.in_flight == 0 and not outputs["c"].requires_grad


def test_a_generator_state_moves_on_and_the_device_generator_does_not() -> None:
    stage = Stage(nn.Dropout(0.5), spec(("a",), ("c",)))
    state = GeneratorState.seeded(torch.device("cpu"), 3)
    before, outside = state.state, torch.get_rng_state()
    first, _ = stage.forward(0, {"a": torch.ones(2)}, {}, generator=state)
    assert not torch.equal(state.state, before) and torch.equal(torch.get_rng_state(), outside)
    torch.manual_seed(3)
    assert torch.equal(first["c"], nn.functional.dropout(torch.ones(2), 0.5))
    torch.set_rng_state(outside)


class Recomputing(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Tanh(), nn.Linear(2, 2))
        self.use_reentrant = use_reentrant

    def forward(self, a: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return self.inner(a)
        return checkpoint(self.inner, a, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_is_recomputed_reads_the_weights_and_draws_the_numbers_of_its_forward(
    use_reentrant: bool,
) -> None:
    seen = []
    for module in (Recomputing(None), Recomputing(use_reentrant)):
        stage = Stage(module, spec(("a",), ("c",)))
        versions = WeightVersions(0, module)
        versions.went_forward(0)
        state = GeneratorState.seeded(torch.device("cpu"), 3)
        inputs = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
        stage.forward(0, inputs, {}, weights=versions.bind(0, versions.live_view), generator=state)
        versions.begin_step()
        with torch.no_grad(), versions.unseen_by_autograd():
            for weight in versions.live.values():
                weight.mul_(3.0)
        gradients = stage.backward(0, {"c": [torch.ones(2, 2)]}, loss_divisor=1)
        versions.went_backward(0)
        seen.append([gradients["a"], *(weight.grad for weight in module.parameters())])
    for plain, recomputed in zip(*seen, strict=True):
        assert torch.equal(plain, recomputed)
