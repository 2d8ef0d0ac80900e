"""A strict parser for JSON from files, and a validator of JSON values against a schema."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from foremoe.base.fields import shown

# A header's JSON takes up to 25 times its bytes in memory.
MAX_JSON_BYTES = 4 * 2**20
_KINDS: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int, "number": (int, float),
}  # fmt: skip


def parse_json(text: str | bytes, limit: int = MAX_JSON_BYTES) -> Any:
    """Parses a JSON text of at most `limit` bytes and returns its value.

    Raises:
        ValueError: The text is too long, is not valid JSON, or contains NaN or infinities.
    """
    if len(text) > limit:
        raise ValueError(f"{len(text)} bytes of JSON, more than {limit}")
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("JSON nested too deep") from None


def faults(value: Any, schema: dict[str, Any], at: str = "header") -> Iterator[str]:
    """Yields every violation of a JSON schema by `value`, with its location. Supports the keywords in foremoe's schemas."""
    names = schema.get("type", [])
    names = [names] if isinstance(names, str) else names
    fits = [isinstance(value, _KINDS[name]) and (name == "boolean" or not isinstance(value, bool)) for name in names]
    if names and not any(fits):
        yield f"{at} must be of type {' or '.join(names)}; got {shown(value)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at} must be {' or '.join(map(str, schema['enum']))}; got {shown(value)}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{at} must match {schema['pattern']}; got {shown(value)}"
    if isinstance(value, int | float):
        low, above, high = (schema.get(key, value) for key in ("minimum", "exclusiveMinimum", "maximum"))
        finite = isinstance(value, int) or math.isfinite(value)
        if not finite or not low <= value <= high or ("exclusiveMinimum" in schema and value <= above):
            yield f"{at} is out of range: {shown(value)}"
    if isinstance(value, dict):
        yield from (f"{at} lacks {key}" for key in schema.get("required", []) if key not in value)
        for key, part in schema.get("properties", {}).items():
            if key in value:
                yield from faults(value[key], part, f"{at}.{key}")
    for i, item in enumerate(value) if isinstance(value, list) else ():
        yield from faults(item, schema["items"], f"{at}[{i}]")
    if "oneOf" in schema and sum(next(faults(value, part, at), None) is None for part in schema["oneOf"]) != 1:
        yield f"{at} must have exactly one of {' or '.join(', '.join(part['required']) for part in schema['oneOf'])}"


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
