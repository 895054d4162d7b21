"""A configuration of transformers -> the keyword arguments that make one like it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

# What a configuration knows of its model as a whole, and its layers never ask.
_OF_THE_MODEL = frozenset(
    {"architectures", "transformers_version", "name_or_path", "id2label", "label2id", "dtype"}
    | {"problem_type", "tokenizer_class", "use_cache", "return_dict", "finetuning_task"}
)
_SWITCHES = {
    "_attn_implementation_internal": "attn_implementation",
    "_experts_implementation_internal": "experts_implementation",
}


def is_configuration(value: Any) -> bool:
    """Whether a value is a configuration of transformers, which need not be imported for this."""
    return hasattr(value, "to_diff_dict") and not isinstance(value, (type, nn.Module))


def configuration_arguments(configuration: Any) -> dict[str, Any] | None:
    """The fields in which it is not what its class makes by default; None if they do not make
    one like it."""
    kind = type(configuration)
    wanted = _fields(configuration)
    try:
        plain = _fields(kind())
        known = {name: value for name, value in wanted.items() if name in plain}
        for fields in (wanted, known):
            # What the class does not know itself may be an older name of what it does.
            changed = {
                name: value
                for name, value in fields.items()
                if name not in plain or not _is_same(plain[name], value)
            }
            made = _fields(kind(**changed))
            if all(name in made and _is_same(made[name], fields[name]) for name in fields):
                return changed
    except Exception:
        # Whatever a constructor says of made-up arguments means only that they do not do.
        return None
    return None


def configurations_around(model: nn.Module, path: str) -> Iterator[Any]:
    """The configurations that a module may have been made from: those that it and the modules
    around it keep, the innermost first, each followed by those inside it."""
    names = path.split(".")
    seen: set[int] = set()
    waiting: list[Any] = []
    for length in range(len(names), -1, -1):
        around = model.get_submodule(".".join(names[:length]))
        waiting += [value for value in vars(around).values() if is_configuration(value)]
        while waiting:
            found = waiting.pop(0)
            if id(found) not in seen:
                seen.add(id(found))
                yield found
                waiting += [value for value in vars(found).values() if is_configuration(value)]


def is_asked_for(parameter: inspect.Parameter) -> bool:
    """Whether a constructor's parameter is a configuration, going by its name or annotation."""
    return "config" in parameter.name.lower() or "Config" in str(parameter.annotation)


def _fields(configuration: Any) -> Mapping[str, Any]:
    return {
        _SWITCHES.get(name, name): value
        for name, value in vars(configuration).items()
        if (name in _SWITCHES or not name.startswith("_")) and name not in _OF_THE_MODEL
    }


def _is_same(one: Any, other: Any) -> bool:
    if is_configuration(one) and is_configuration(other):
        return type(one) is type(other) and _fields(one) == _fields(other)
    return type(one) is type(other) and bool(one == other)
