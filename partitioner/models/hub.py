"""A folder of transformers, a published configuration or a name on the hub -> a model.

Weights are read from safetensors alone, and code next to a configuration never runs. Nothing is
downloaded but the configuration of a name on the hub and, with `--pretrained`, its weights and
tokenizer; the cache of huggingface_hub serves both.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...runtime.errors import ModelError
from ...runtime.extras import install
from ...runtime.formatting import counted
from ...runtime.plan.plan import READ_FROM
from ...runtime.user_code import user_errors_as
from .builtin import BUILTIN, PRESETS


def known_names() -> list[str]:
    """The names that `--model` knows without a network."""
    return [*PRESETS, *BUILTIN]


def unknown_model(spec: str) -> ModelError:
    """Error E1: no model of that name; suggests the nearest known name."""
    close = difflib.get_close_matches(spec, known_names(), 1)
    suggestion = f" Did you mean {close[0]}?" if close else ""
    return ModelError(
        f'no model "{spec}": not a folder, not importable, not on the hub.{suggestion}',
        "Your own model: --model my_pkg.file:build",
    )


def load_transformers(
    spec: str, arguments: dict[str, Any], device: Any, meta: bool, pretrained: bool
) -> tuple[nn.Module, str, dict[str, str]]:
    """The model, where its weights come from ("" if random), and the files of its export."""
    folder = Path(spec)
    local = folder.is_dir()
    if spec not in PRESETS and not local and "/" not in spec:
        raise unknown_model(spec)
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"--model {spec} needs transformers, which is not installed.",
            install("hf"),
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    preset = PRESETS.get(spec)
    if preset is not None and not pretrained:
        config = getattr(transformers, preset.config_class)(**preset.fields)
    else:
        config = _read_configuration(transformers, spec, local)
    model_class = (
        _class_of(transformers, config, spec)
        if preset is None
        else getattr(transformers, preset.model_class)
    )
    for key, value in arguments.items():
        if not hasattr(config, key):
            close = difflib.get_close_matches(key, vars(config), 1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ModelError(f"{type(config).__name__} has no field {key!r}.{hint}")
        with user_errors_as(ModelError, f"--model-arg {key}"):
            setattr(config, key, value)
    config.architectures = [model_class.__name__]
    files = {"config.json": config.to_json_string()}
    is_stored = pretrained or (local and any(folder.glob("*.safetensors")))
    if local or pretrained:
        files |= _tokenizer_files(transformers, spec)
    if is_stored and not meta:
        model, weights = _with_weights(model_class, config, spec, local)
        return model, weights, files
    with device, user_errors_as(ModelError, f"--model {spec}"):
        return model_class(config), "", files


def _with_weights(model_class: Any, config: Any, spec: str, local: bool) -> tuple[nn.Module, str]:
    """The model with its stored weights, which are never read from pickles, and their origin."""
    try:
        model, report = model_class.from_pretrained(
            spec,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=local,
            output_loading_info=True,
        )
    except Exception as error:
        raise _weights_error(spec, error, local) from error
    missing = sorted(report["missing_keys"])
    origin = f"{READ_FROM}{Path(spec).name if local else f'{spec} on the hub'}"
    if missing:
        origin += f", but random for {counted(len(missing), 'tensor')}: {missing[0]}"
    return model, origin + (", ..." if len(missing) > 1 else "")


def _read_configuration(transformers: Any, spec: str, local: bool) -> Any:
    """The configuration in a folder or on the hub; never runs the code next to it."""
    try:
        return transformers.AutoConfig.from_pretrained(
            spec, local_files_only=local, trust_remote_code=False
        )
    except Exception as error:
        causes = {type(cause).__name__ for cause in _causes(error)}
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{spec} needs code from the model repository (trust_remote_code), which is not "
                "run.",
                "Read it, and write a function that builds the model: --model my_pkg.file:build",
            ) from error
        if "GatedRepoError" in causes:
            raise ModelError(
                f"cannot download {spec}: it is gated, and this account has no access.",
                f"Request access at https://huggingface.co/{spec}, and log in: hf auth login. "
                "Planning needs no weights: --model FOLDER with its config.json is enough.",
            ) from error
        if _is_offline(error, local):
            if spec in PRESETS:
                raise _weights_error(spec, error, local) from error
            raise ModelError(
                f"cannot download {spec}: no network ({_offline_state()}).",
                "Planning needs no weights: use --model FOLDER with its config.json, or a name "
                f"known without a network: {', '.join(known_names()[:4])}, ...",
            ) from error
        if local:
            raise ModelError(
                f"{spec} has no configuration that transformers can read: "
                f"{str(error).splitlines()[0]}",
                "Give a folder with the config.json of a transformers model.",
            ) from error
        raise unknown_model(spec) from error


_NO_NETWORK = frozenset(
    {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError"}
)


def _is_offline(error: BaseException, local: bool) -> bool:
    return not local and any(type(cause).__name__ in _NO_NETWORK for cause in _causes(error))


def _offline_state() -> str:
    return f"HF_HUB_OFFLINE {'set' if os.environ.get('HF_HUB_OFFLINE') else 'unset'}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _class_of(transformers: Any, config: Any, spec: str) -> Any:
    """The model class that a configuration names."""
    usual = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    default = getattr(usual, "__name__", f"{config.model_type} without architectures")
    name = str((config.architectures or [default])[0])
    model_class = getattr(transformers, name, None)
    is_class = isinstance(model_class, type) and issubclass(
        model_class, transformers.PreTrainedModel
    )
    if not (name.isidentifier() and is_class):
        raise ModelError(
            f"{spec} is a {name[:60]}, which is missing from transformers.",
            "Install a newer transformers, or write a function that builds the model: "
            "--model my_pkg.file:build",
        )
    return model_class


def _weights_error(spec: str, error: Exception, local: bool) -> ModelError:
    """The error about weights that cannot be read, from the one of transformers."""
    random = "omit --pretrained for random weights"
    if _is_offline(error, local):
        return ModelError(
            f"cannot download the weights of {spec}: no network ({_offline_state()}).",
            f"Download them where there is one (hf download {shlex.quote(spec)}), or {random}.",
        )
    if "safetensors" in str(error):
        return ModelError(
            f"{spec} has no weights as safetensors, and pickled ones are not read.",
            f"Convert them with save_pretrained of transformers and give the folder, or {random}.",
        )
    if "mismatched" in str(error):
        return ModelError(
            f"the weights of {spec} have other shapes than its configuration.",
            f"Leave out --model-arg that changes sizes, or {random}.",
        )
    first = str(error).strip().partition("\n")[0]
    return ModelError(f"cannot read the weights of {spec}: {type(error).__name__}: {first}")


def _tokenizer_files(transformers: Any, spec: str) -> dict[str, str]:
    """The small files next to the weights, of a folder or of the hub, by name."""
    files = {}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        with contextlib.suppress(OSError):
            if path := transformers.utils.cached_file(
                spec, name, _raise_exceptions_for_missing_entries=False
            ):
                files[name] = Path(path).read_text(encoding="utf-8")
    return files
