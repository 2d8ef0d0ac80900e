"""Options of a trainer's job that foremoe refuses, found in its resolved settings or command line before the job runs."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from foremoe.base.errors import InputError, first_line
from foremoe.base.files import read_file
from foremoe.integrations.supported import Parallel, refusal_of

_LIMIT, _DEPTH, _NODES = 4 << 20, 32, 100_000  # bytes, levels and entries of a file of settings
_SIZE, _DISPATCHER = "expert_model_parallel_size", "moe_token_dispatcher_type"
_RENAMED = {"fp8_format": "fp8", "fp4_format": "fp4"}  # flags that name an option differently
# Dispatcher of a job that sets none: Megatron's own default, and what veRL sets.
_DEFAULT, _DEFAULT_OF_VERL = "allgather", "alltoall"


def judge_job(path: str) -> list[tuple[str, str, str]]:
    """Returns the place, the parallel sizes and the first refused option of every part of a job that has expert parallelism.

    The file has the settings as YAML, JSON or TOML, or else Megatron's flags as on a command line. A part is a mapping with
    `expert_model_parallel_size`, together with all that it contains.

    Raises:
        InputError: The file cannot be read or has no such part.
    """
    settings = _settings_of(path)
    default = _DEFAULT_OF_VERL if "actor_rollout_ref" in settings else _DEFAULT
    found: list[tuple[str, str, str]] = []
    for place, options in _parts_of(settings):
        for name, value in options.items():
            if name.endswith("_parallel_size") and not isinstance(value, int | None):
                raise InputError(f"{name} of {place} is {value!r}, not a number; give settings without references.")
        get = ({_DISPATCHER: default} | options).get
        parallel = Parallel.of(get)
        refusal = refusal_of(get, parallel)
        sizes = f"EP{options[_SIZE]}, TP{parallel.tp}, PP{parallel.pp}, {get(_DISPATCHER)}"
        found.append((place, sizes, "" if refusal is None else refusal.reason))
    if not found:
        raise InputError(f"{path!r} has no {_SIZE}; give the resolved settings or the flags of a Megatron job.")
    return found


def _settings_of(path: str) -> Mapping[str, Any]:
    kind = PurePath(path).suffix.lower()
    raw = read_file(path, _LIMIT)
    readers: dict[str, Callable[[str], Any]] = {".json": json.loads, ".toml": tomllib.loads, ".yaml": _yaml, ".yml": _yaml}
    try:
        settings = readers.get(kind, _flags)(raw.decode("utf-8-sig"))
    except InputError:
        raise
    except (Exception, RecursionError) as error:  # readers raise many kinds of errors
        raise InputError(f"{path!r} cannot be read as {kind[1:]} ({first_line(error)}); check the file.") from None
    if not isinstance(settings, Mapping):
        raise InputError(f"{path!r} holds a {type(settings).__name__}; give a file of named settings.")
    return settings


def _yaml(text: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError:
        raise InputError("YAML files need PyYAML; pip install pyyaml, or give the settings as JSON.") from None
    return yaml.safe_load(text)


def _flags(text: str) -> dict[str, Any]:
    """Reads Megatron's flags, such as ``--tensor-model-parallel-size 2 --sequence-parallel``. Other words are ignored."""
    options: dict[str, Any] = {}
    name = ""
    for word in re.findall(r"""[^\s"'()\\]+""", re.sub(r"(?m)(^|\s)#.*", "", text)):
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            name = _RENAMED.get(name, name)
            options[name] = _value(value) if equals else True
        elif name and options[name] is True:
            options[name] = _value(word)
    return options


def _value(word: str) -> Any:
    try:
        return json.loads(word.lower())
    except ValueError:
        return word


def _parts_of(settings: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place and the options of every part. Mappings in a part add their options, unless they are not enabled."""
    left = [(settings, "", 0)]
    num = 0
    while left:
        node, place, depth = left.pop()
        options: dict[str, Any] = {}
        inner = [(node, place, depth)]
        is_part = _SIZE in node
        while inner:
            at, where, deep = inner.pop()
            for key, value in at.items():
                num += 1
                if num > _NODES or deep > _DEPTH:
                    raise InputError(f"the settings have over {_NODES:,} entries or {_DEPTH} levels; give those of one job.")
                below = f"{where}.{key}" if where else str(key)
                if not isinstance(value, Mapping):
                    options.setdefault(str(key), value)
                elif is_part and _SIZE not in value:
                    if value.get("enabled") is not False:
                        inner.append((value, below, deep + 1))
                else:
                    left.append((value, below, deep + 1))
        if is_part:
            yield place or "the job", options
