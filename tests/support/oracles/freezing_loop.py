"""A plain loop over micro-batches that freezes blocks between steps, in one process.

Micro-batch t of a segment, counted in its replica, reads at stage j the weights after
floor(max(0, t - W_j) / k) of its steps, and k micro-batches of each replica make a step: W_j is 0
in a synchronous loop, and the stages that follow stage j in asynchronous 1F1B with stashed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from asyncpipe.runtime.rng import micro_batch_seed

Weights = dict[str, Tensor]
Frozen = tuple[set[str], set[str]]


@dataclass
class Plasticity:
    """Decides at its events how many blocks are done: those from the first one on whose outputs for
    a micro-batch have twice in a row changed by at most `tolerance` of their largest change.

    blocks: the modules that are observed
    depths, distances: the results of its events
    """

    stages: Sequence[nn.Module]
    x: Tensor
    blocks: Sequence[str]
    tolerance: float
    depths: list[int] = field(default_factory=list)
    distances: list[list[float]] = field(default_factory=list)
    _before: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(self) -> int:
        now = self._similarities()
        if self._before:
            squares = [(now[path] - self._before[path]).square() for path in self.blocks]
            self.distances.append([float(square.mean()) for square in squares])
        self._before = now
        depth = self.depths[-1] if self.depths else 0
        while depth < len(self.blocks) and self._is_done(depth):
            depth += 1
        self.depths.append(depth)
        return depth

    def _is_done(self, block: int) -> bool:
        own = [distances[block] for distances in self.distances]
        largest = [max(own[: end + 1]) for end in range(len(own))]
        last = list(zip(own, largest, strict=True))[-2:]
        return len(last) == 2 and all(one <= self.tolerance * most for one, most in last)

    def _similarities(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        hidden = self.x
        for stage in self.stages:
            modes = {part: part.training for part in stage.modules()}
            parts = dict(stage.named_modules())
            hooks = [
                parts[path].register_forward_hook(
                    lambda part, arguments, output, path=path: found.update({path: output})
                )
                for path in self.blocks
                if path in parts
            ]
            hidden = stage.eval()(hidden)
            for hook in hooks:
                hook.remove()
            for part, mode in modes.items():
                part.training = mode
        products = {path: output.flatten(1) @ output.flatten(1).T for path, output in found.items()}
        return {path: each / each.norm(dim=1, keepdim=True) for path, each in products.items()}


@dataclass
class PlainLoop:
    """The stages of a model, and AdamW with weight decay of matrices.

    feed: the inputs of a micro-batch by its number in the data
    frozen: the names of the parameters that freeze, and of the modules that are in evaluation mode
        then, after so many steps; or what decides on them
    grown: the micro-batches of each step after so many, and by how many their gradients are divided
    rate: the factor of a step's learning rate, by the micro-batches read before and those in it
    """

    stages: Sequence[nn.Module]
    feed: Callable[[int], Mapping[str, Tensor]]
    every: int
    ahead: Sequence[int]
    lr: float
    seed: int
    clip: float = 0.0
    replicas: int = 1
    frozen: Mapping[int, Frozen | Callable[[], Frozen]] = field(default_factory=dict)
    grown: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    rate: Callable[[int, int], float] = lambda read, own: 1.0
    read: int = 0
    losses: list[float] = field(default_factory=list)
    squares: list[dict[str, float]] = field(default_factory=list)
    """The squared norm of each parameter's gradient in each step, before clipping."""

    def run(self, steps: int) -> PlainLoop:
        parameters = [each for stage in self.stages for each in stage.parameters()]
        groups = [
            {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": 0.01},
            {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=self.lr, eps=1e-8)
        for stage in self.stages:
            stage.train()
        ends = [*sorted(step for step in {*self.frozen, *self.grown} if step < steps), steps]
        for start, end in zip([0, *ends], ends, strict=False):
            self.every, self.divisor = self.grown.get(start, (self.every, self.every))
            self._segment(start, end)
            if end in self.frozen:
                due = self.frozen[end]
                self._freeze(*(due() if callable(due) else due))
        return self

    def _segment(self, start: int, end: int) -> None:
        history = [self._weights()]
        for t in range((end - start) * self.every):
            if t % self.every == 0:
                self.losses.append(0.0)
            number = start * self.every + t
            per_replica = self.every // self.replicas
            own = t // self.every * per_replica + t % per_replica
            versions = [max(0, own - ahead) // per_replica for ahead in self.ahead]
            loss = self._loss(number, versions, history)
            self.losses[-1] += float(loss) / self.every
            if (t + 1) % self.every == 0:
                named = [pair for stage in self.stages for pair in stage.named_parameters()]
                self.squares.append(
                    {
                        name: float(each.grad.square().sum())
                        for name, each in named
                        if each.grad is not None
                    }
                )
                if self.clip:
                    own = [each for stage in self.stages for each in stage.parameters()]
                    nn.utils.clip_grad_norm_(own, self.clip)
                for group in self.optimizer.param_groups:
                    group["lr"] = self.lr * self.rate(self.read - self.every, self.every)
                self.optimizer.step()
                self.optimizer.zero_grad()
                history.append(self._weights())

    def _loss(self, number: int, versions: list[int], history: list[list[Weights]]) -> Tensor:
        torch.default_generator.manual_seed(micro_batch_seed(self.seed, number))
        fields = self.feed(self.read)
        self.read += 1
        hidden = fields["x"]
        read = []
        for j, (stage, version) in enumerate(zip(self.stages, versions, strict=True)):
            live = dict(stage.named_parameters())
            leaves = {
                name: value.detach().requires_grad_(live[name].requires_grad)
                for name, value in history[version][j].items()
            }
            read.append((live, leaves))
            hidden = functional_call(stage, leaves, (hidden,))
        loss = cross_entropy(hidden, fields["target"])
        (loss / self.divisor).backward()
        for live, leaves in read:
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    before = live[name].grad
                    live[name].grad = leaf.grad if before is None else before + leaf.grad
        return loss.detach()

    def _weights(self) -> list[Weights]:
        return [
            {name: value.detach().clone() for name, value in stage.named_parameters()}
            for stage in self.stages
        ]

    def _freeze(self, parameters: set[str], modules: set[str]) -> None:
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                if name in parameters:
                    parameter.requires_grad_(False)
            for path, module in stage.named_modules():
                if path in modules:
                    module.eval()

    def state(self) -> Weights:
        return {name: value for stage in self.stages for name, value in stage.state_dict().items()}
