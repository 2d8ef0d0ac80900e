"""The first option of a trainer's job that foremoe refuses, found in its resolved settings or its flags before the job runs."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from foremoe.base.errors import InputError, first_line
from foremoe.base.files import read_file
from foremoe.integrations.supported import Parallel, refusal_of

_LIMIT = 256 << 10  # bytes of a file; YAML is read slowly
_SIZE, _DISPATCHER = "expert_model_parallel_size", "moe_token_dispatcher_type"
# Flags of Megatron's command line that name an option differently.
_RENAMED = {
    "fp8_format": "fp8", "fp4_format": "fp4", "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
}  # fmt: skip
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class Judged(NamedTuple):
    """A job's part that runs experts, its parallel sizes, and the reason why foremoe would refuse it, or an empty string."""

    place: str
    sizes: str
    refused: str


def judge_job(path: str) -> Judged:
    """Judges the options of the job that a file describes.

    The file has the resolved settings of veRL or NeMo-RL, or Megatron's options, as YAML, JSON or TOML. Other files have
    Megatron's flags, as on a command line. A dispatcher that is not set counts as supported, because trainers set it themselves.

    Raises:
        InputError: The file cannot be read, or has no expert parallelism.
    """
    settings = _settings_of(path)
    try:
        judged = _judge(settings)
    except (TypeError, AttributeError) as error:
        raise InputError(f"{path!r} has a setting of the wrong type ({first_line(error)}); check the file.") from None
    if judged is None:
        raise InputError(f"{path!r} has no {_SIZE} above 1; give the resolved settings or the flags of a job with experts.")
    return judged


def _judge(settings: Mapping[str, Any]) -> Judged | None:
    """Returns the verdict, or None without expert parallelism."""
    place, options = "the job", dict(settings)
    policy: Mapping[str, Any] | None = None
    actor = _at(settings, "actor_rollout_ref", "actor", "megatron")
    if _at(settings, "policy", "megatron_cfg") is not None:
        from foremoe.integrations import nemo_rl  # imports torch

        policy = settings["policy"]
        place, options = "policy.megatron_cfg", nemo_rl.options_of(policy)
    elif actor is not None:
        place, options = "actor_rollout_ref.actor.megatron", {**actor, **(_at(actor, "override_transformer_config") or {})}
    if any(options.get(old) for old in ("enable_cuda_graph", "external_cuda_graph")):
        options.setdefault("cuda_graph_impl", "local")
    get = _get(options)
    parallel, dispatcher = Parallel.of(get), get(_DISPATCHER, None)
    if (get(_SIZE, None) or 1) < 2:
        return None
    assumed = get if dispatcher else _get({**options, _DISPATCHER: "alltoall"})
    refusal = refusal_of(assumed, parallel) if policy is None else nemo_rl.refusal_in(policy, assumed)
    sizes = f"EP{get(_SIZE, None)}, TP{parallel.tp}, PP{parallel.pp}, {dispatcher or 'dispatcher not set here'}"
    return Judged(place, sizes, "" if refusal is None else refusal.reason)


def _at(settings: Mapping[str, Any], *names: str) -> Mapping[str, Any] | None:
    found: Any = settings
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _get(options: Mapping[str, Any]) -> Callable[[str, Any], Any]:
    """Returns a function that looks up an option, and refuses a reference or a parallel size that is not a number."""

    def get(name: str, default: Any) -> Any:
        value = options.get(name, default)
        if isinstance(value, str):
            value = _WORDS.get(value.lower(), value)
        if isinstance(value, str) and "$" in value:
            raise InputError(f"{name} is {value!r}; give settings without references.")
        number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if name.endswith("_parallel_size") and value is not None and not number:
            raise InputError(f"{name} is {str(value)[:40]!r}; a parallel size is a whole number of at least 1.")
        return value

    return get


def _settings_of(path: str) -> Mapping[str, Any]:
    readers: dict[str, Callable[[str], Any]] = {".json": json.loads, ".toml": tomllib.loads, ".yaml": _yaml, ".yml": _yaml}
    kind = PurePath(path).suffix.lower()
    raw = read_file(path, _LIMIT)
    try:
        settings = readers.get(kind, _flags)(raw.decode("utf-8-sig"))
    except InputError:
        raise
    except (Exception, RecursionError) as error:  # readers raise many kinds of errors
        form = kind[1:].upper() if kind in readers else "flags"
        raise InputError(f"{path!r} cannot be read as {form} ({first_line(error)}); check the file.") from None
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
    given: dict[str, list[Any]] = {}
    name = ""
    for word in re.findall(r"[^\s()\\]+", re.sub(r"(?m)(^|\s)#.*", "", text)):
        word = word.strip("\"';,")
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            name = _RENAMED.get(name, name)
            given[name] = [_value(value)] if equals else []
        elif name and word:
            given[name].append(_value(word))
    options = {name: values if len(values) > 1 else values[0] if values else True for name, values in given.items()}
    layers, of_chunk = options.get("num_layers"), options.get("num_layers_per_virtual_pipeline_stage")
    if isinstance(layers, int) and isinstance(of_chunk, int) and of_chunk > 0:
        stages = options.get("pipeline_model_parallel_size", 1)
        options["virtual_pipeline_model_parallel_size"] = max(1, layers // (of_chunk * stages)) if isinstance(stages, int) else 1
    return options


def _value(word: str) -> Any:
    word = word.strip("\"'")
    return int(word) if re.fullmatch(r"-?\d{1,9}", word) else word
