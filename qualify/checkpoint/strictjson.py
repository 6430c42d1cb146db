"""JSON from an untrusted file: bounded, without duplicate keys, without NaN and infinity.

``json.loads`` alone keeps the last of two equal keys, accepts ``NaN``, reads ``1e999`` as infinity, recurses until the
interpreter gives up and turns 3 bytes of ``[],`` into 60 bytes of objects.
"""

from __future__ import annotations

import json
import math
from typing import Any

#: No config, index or header of a real checkpoint comes near; the safetensors library has the same bound.
MAX_BYTES = 100_000_000

#: Below this size even the worst document costs little.
_DENSITY_FROM = 2_000_000


class JsonDefect(ValueError):
    """The bytes are not the JSON document they should be."""


def parse(raw: bytes) -> tuple[Any, list[str]]:
    """Return (document, duplicate keys in the order met).

    Of two equal keys the last wins, as in every JSON library; the caller reports the duplicates. Raises
    ``JsonDefect`` for anything that is not one JSON document in UTF-8.
    """
    if len(raw) > MAX_BYTES:
        raise JsonDefect(f"{len(raw):,} bytes, more than the {MAX_BYTES:,} that are read")
    if len(raw) > _DENSITY_FROM:
        _check_density(raw)
    duplicates: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(items)
        if len(mapping) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen and len(duplicates) < 1000:
                    duplicates.append(key)
                seen.add(key)
        return mapping

    try:
        text = raw.decode("utf-8")
        document = json.loads(text, object_pairs_hook=pairs, parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise JsonDefect(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise JsonDefect("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise JsonDefect(f"not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:  # a number with thousands of digits, NaN
        raise JsonDefect(f"not JSON: {str(error)[:80]}") from None
    return document, duplicates


def _no_constant(name: str):
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _check_density(raw: bytes) -> None:
    """Refuse a large document that is mostly punctuation: it would grow twentyfold in memory.

    A header entry has 3 opening brackets and 8 separators in at least 55 bytes, an index entry fewer.
    """
    opening = raw.count(b"[") + raw.count(b"{")
    separators = raw.count(b",") + raw.count(b":")
    if opening > len(raw) // 16 or separators > len(raw) // 6:
        raise JsonDefect("a large document of almost nothing but brackets and commas")
