"""The structure of receipts and of the files they are made of: ``schema-v1.json``, read without a library.

``defect`` knows the keywords of JSON Schema draft 2020-12 that this one file uses, and refuses a file that uses others;
a test holds it against the jsonschema library.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from qualify.checkpoint.problems import show
from qualify.errors import CannotRun

PATH = Path(__file__).resolve().parent / "schema-v1.json"
_ANNOTATIONS = {"$schema", "$id", "$defs", "title", "description"}
_KEYWORDS = {
    "$ref", "anyOf", "type", "const", "enum", "pattern", "minLength", "maxLength", "minimum", "required", "properties",
    "additionalProperties", "propertyNames", "items", "prefixItems", "minItems", "maxItems", "uniqueItems",
}  # fmt: skip
_TYPES = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    # 1.0 is an integer since draft 6.
    "integer": lambda value: (
        not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ),
}


@functools.cache
def document() -> dict[str, Any]:
    """The whole schema. Raises ``CannotRun`` when it is not to be read."""
    try:
        return json.loads(PATH.read_text())
    except (OSError, ValueError) as error:
        raise CannotRun(f"{PATH.name} cannot be read: {error}") from None


def defect(value: Any, definition: str | None = None) -> str | None:
    """The first thing wrong with a receipt (or with a ``runFile``, ``stageFile``), as half a sentence; None: nothing.

    ``value`` is a parsed JSON document without NaN.
    """
    whole = document()
    try:
        return _defect(value, whole["$defs"][definition] if definition else whole, "")
    except RecursionError:
        return "the document is nested too deeply"


def _defect(value: Any, schema: dict[str, Any], where: str) -> str | None:
    if unknown := set(schema) - _KEYWORDS - _ANNOTATIONS:
        raise CannotRun(f"{PATH.name} uses {sorted(unknown)[0]}, which this version cannot check")
    if "$ref" in schema:
        return _defect(value, document()["$defs"][schema["$ref"].removeprefix("#/$defs/")], where)
    at = where or "the document"
    if "anyOf" in schema:
        found = [_defect(value, option, where) for option in schema["anyOf"]]
        if None not in found:
            # The option that got furthest says most.
            return max(found, key=lambda text: text.partition(" ")[0].count("."))
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(_TYPES[name](value) for name in types):
            return f"{at} is not of type {' or '.join(types)}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{at} is not {show(str(schema['const']))}"
    if "enum" in schema and not any(_same(value, option) for option in schema["enum"]):
        return f"{at} is none of {', '.join(map(str, schema['enum']))}"
    if "minimum" in schema and _TYPES["number"](value) and value < schema["minimum"]:
        return f"{at} is less than {schema['minimum']}"
    check = {str: _string, list: _array, dict: _object}.get(type(value))
    return check(value, schema, where, at) if check else None


def _string(value: str, schema: dict[str, Any], where: str, at: str) -> str | None:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return f"{at} has {len(value)} characters"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return f"{at} is {show(value)}, which does not match {schema['pattern']}"
    return None


def _array(value: list, schema: dict[str, Any], where: str, at: str) -> str | None:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        return f"{at} has {len(value)} entries"
    if schema.get("uniqueItems") and any(_same(a, b) for n, a in enumerate(value) for b in value[:n]):
        return f"{at} has one entry twice"
    first, rest = schema.get("prefixItems", ()), schema.get("items", {})
    for n, item in enumerate(value):
        if found := _defect(item, first[n] if n < len(first) else rest, f"{where}[{n}]"):
            return found
    return None


def _object(value: dict, schema: dict[str, Any], where: str, at: str) -> str | None:
    if missing := [key for key in schema.get("required", ()) if key not in value]:
        return f"{at} has no {missing[0]}"
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    for key, item in value.items():
        below = f"{where}.{show(key)}" if where else show(key)
        if "propertyNames" in schema and (found := _defect(key, schema["propertyNames"], below)):
            return found
        if key not in properties and others is False:
            return f"{at} has the unknown field {show(key)}"
        if found := _defect(item, properties.get(key, others or {}), below):
            return found
    return None


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, and true is not 1. Composite constants do not occur."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b
