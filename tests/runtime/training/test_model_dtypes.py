"""A model trains in the dtypes that its author gave it, or all in the one of `--dtype`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import asyncpipe
from asyncpipe.runtime.config.settings import Settings
from asyncpipe.runtime.data.task import InputDtypes, input_dtypes
from asyncpipe.runtime.errors import DataError
from asyncpipe.runtime.plan.plan import read_plan
from asyncpipe.tests.support.processes.gloo_ranks import run_processes
from asyncpipe.tests.support.processes.quick_python import run
from asyncpipe.tests.support.processes.silent_reporter import FACTORY, events_of

STEPS, SAMPLES = 3, 4


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)).to(dtype)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": F.cross_entropy(x.float(), labels)}


class Mixed(Small):
    """Matrix products in bfloat16, norms in float32, the head in float64."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(4))
        self.head = nn.Linear(6, 6).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x).float()).bfloat16()
        return {"loss": F.cross_entropy(self.head(x.double()), labels)}


class Fourier(Small):
    """Complex parameters, layers and buffers, before and after the cut."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        angles = torch.outer(torch.arange(4.0), torch.arange(4.0))
        self.filters = nn.ParameterList(torch.polar(torch.ones(4), angle) for angle in angles)
        self.register_buffer("turned", torch.polar(torch.ones(4, 4), angles).conj())
        self.mixed = nn.ModuleList(nn.Linear(4, 4, dtype=torch.complex64) for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for number, layer in enumerate(self.layers):
            modes = torch.fft.rfft(layer(x)) * self.filters[number] * self.turned[number]
            x = torch.fft.irfft(self.mixed[number](modes), n=6)
        return {"loss": F.cross_entropy(x, labels)}


class Counting(Small):
    """Makes numbers out of none and of integers, which have torch's default dtype."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            shares = torch.arange(1, 7) / 3
            x = torch.tanh(layer(x) * shares + torch.linspace(0.1, 1 / 3, 6))
        return {"loss": F.cross_entropy(x.float(), labels)}


class Quantized(Small):
    """Frozen weights of eight bits: a buffer and a parameter."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.register_buffer("table", torch.randn(6, 6).to(torch.float8_e5m2))
        self.codes = nn.Parameter(torch.randint(-9, 9, (6, 6)).to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x) @ self.table.float() + x @ self.codes.float())
        return {"loss": F.cross_entropy(x, labels)}


BUILDS: dict[str, tuple[Callable[[], nn.Module], torch.dtype]] = {
    # name: the model, and the dtype of its input
    "bfloat16": (partial(Small, torch.bfloat16), torch.bfloat16),
    "float64": (partial(Small, torch.float64), torch.float64),
    "mixed": (Mixed, torch.bfloat16),
    "complex": (Fourier, torch.float32),
    "8 bits": (Quantized, torch.float32),
}


def batches(dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(SAMPLES, 6, generator=drawn, dtype=torch.float32).to(dtype)
        yield {"x": x, "labels": torch.randint(6, (SAMPLES,), generator=drawn)}


def folder_of(model: nn.Module, dtype: torch.dtype, folder: Path) -> Path:
    example = next(batches(dtype))
    asyncpipe.partition(model, example, stages=2, output=folder, profile="analytic")
    return folder


def losses(rank: int, folder: str, options: dict[str, Any]) -> list[float]:
    given = {"schedule": "1f1b", "micro_batches": 1} | options
    pipe = asyncpipe.Pipeline(folder, timeout_s=30.0, **given)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    found = [float(pipe.step(batch, optimizer=optimizer).loss) for batch in batches(torch.float64)]
    pipe.close()
    return found


def plain(model: nn.Module, dtype: torch.dtype) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for batch in batches(dtype):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def build(name: str) -> tuple[nn.Module, torch.dtype]:
    torch.manual_seed(0)
    make, dtype = BUILDS[name]
    return make(), dtype


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_the_losses_are_those_of_the_plain_model(name: str, transport: str, tmp_path: Path) -> None:
    folder = folder_of(*build(name), tmp_path / "cut")
    options = {"transport": transport, "ranks": 2}
    found = run_processes(2, losses, str(folder), options)[0]
    assert found == plain(*build(name))


CHANGES_TORCH = """
import torch

torch.set_default_dtype(torch.float16)
torch.set_grad_enabled(False)

def data():
    torch.manual_seed(1)
    x = torch.randn(8, 6, dtype=torch.float64)
    return [{"x": row, "labels": torch.tensor(n % 6)} for n, row in enumerate(x)]
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stages_have_the_default_dtype_of_their_capture(dtype: torch.dtype, tmp_path: Path) -> None:
    """Other processes have float32, and one whose data's code sets float16 has that. Code of the
    data that disables gradients disables none."""

    def counting() -> Counting:
        torch.manual_seed(0)
        return Counting(dtype)

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        folder = folder_of(counting(), dtype, tmp_path / "cut")
        expected = plain(counting(), dtype)
        one = next(batches(dtype))
        whole = counting()(**one)["loss"].item()
    finally:
        torch.set_default_dtype(before)
    assert asyncpipe.load(folder)(**one)["loss"].item() == whole
    assert torch.get_default_dtype() is before
    found = run_processes(2, losses, str(folder), {"transport": "gloo", "ranks": 2})[0]
    assert found == expected
    (tmp_path / "own.py").write_text(CHANGES_TORCH)
    usual = CHANGES_TORCH.replace("float16", "float32").replace("False", "True")
    (tmp_path / "same.py").write_text(usual)
    runs = []
    for code in ("own", "same"):
        given = {"steps": 2, "micro_batches": 2, "micro_batch_size": 2, "log_every": 1}
        output, data = tmp_path / code, f"{tmp_path / code}.py:data"
        run(Settings(folder=str(folder), data=data, output=str(output), **given), FACTORY)  # type: ignore[arg-type]
        runs.append([step["loss"] for step in events_of(output, "step")])
    assert len(runs[0]) == 2 and runs[0] == runs[1]


@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_of_a_mixed_model_stay_equal(zero: int, tmp_path: Path) -> None:
    folder = folder_of(*build("mixed"), tmp_path / "cut")
    options = {"schedule": "ddp", "replicas": 2, "zero": zero, "micro_batches": 2}
    found = run_processes(2, losses, str(folder), options)
    assert found[0] == found[1] == pytest.approx(plain(*build("mixed")), rel=1e-3)


@pytest.mark.parametrize("name", ["bfloat16", "float64"])
def test_one_dtype_for_all_parameters_may_be_asked_for(name: str, tmp_path: Path) -> None:
    folder = folder_of(*build(name), tmp_path / "cut")
    found = run_processes(2, losses, str(folder), {"dtype": "float64", "ranks": 2})[0]
    assert found == plain(build(name)[0].double(), torch.float64)


@pytest.mark.parametrize("name", BUILDS)
def test_a_split_backward_has_the_losses_of_the_plain_model(name: str, tmp_path: Path) -> None:
    folder = folder_of(*build(name), tmp_path / "cut")
    found = run_processes(2, losses, str(folder), {"schedule": "zb-h1", "ranks": 2})[0]
    assert found == plain(*build(name))


def test_targets_have_the_dtype_of_what_they_are_compared_with(tmp_path: Path) -> None:
    plan = read_plan(folder_of(*build("float64"), tmp_path / "cut"))
    one = torch.ones(1, dtype=torch.float32)
    assert input_dtypes(plan, None).cast("x", one).dtype is torch.float64
    assert input_dtypes(plan, None).cast("target", one).dtype is torch.float32  # that of the loss
    assert input_dtypes(plan, "float64").cast("target", one).dtype is torch.float64
    assert input_dtypes(plan, "float64").cast("labels", one.long()).dtype is torch.int64


@pytest.mark.parametrize("narrow", [torch.uint8, torch.int16, torch.uint16, torch.int32])
def test_whole_numbers_become_as_wide_as_those_of_the_capture(narrow: torch.dtype) -> None:
    dtypes = InputDtypes(
        {"ids": torch.int64, "few": torch.uint8, "x": torch.float32}, torch.float32
    )
    numbers = torch.tensor([1, 200], dtype=narrow)
    assert torch.equal(dtypes.cast("ids", numbers), torch.tensor([1, 200]))
    for name in ("few", "x", "target"):  # would lose numbers, or hide that they are not scaled
        assert dtypes.cast(name, numbers).dtype is narrow
    assert dtypes.cast("ids", torch.tensor([True])).dtype is torch.bool


def test_complex_data_keep_their_imaginary_parts() -> None:
    number = torch.tensor([1 + 2j], dtype=torch.complex128)
    dtypes = InputDtypes({"real": torch.float32, "complex": torch.complex64}, torch.float32)
    for name in ("complex", "target"):
        assert dtypes.cast(name, number).dtype is torch.complex64
    assert dtypes.cast("complex", number.real).dtype is torch.complex64
    of_complex = InputDtypes({}, torch.complex64)
    assert of_complex.cast("target", number.real).dtype is torch.float32


@pytest.mark.parametrize("dtype", [None, "float64"])
def test_complex_data_of_an_input_of_real_numbers_are_refused(
    dtype: str | None, tmp_path: Path
) -> None:
    dtypes = input_dtypes(read_plan(folder_of(*build("float64"), tmp_path / "cut")), dtype)
    with pytest.raises(DataError, match=r"x of the data is torch\.complex64, .* torch\.float64\."):
        dtypes.cast("x", torch.ones(1, dtype=torch.complex64))
