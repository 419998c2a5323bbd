"""Parses foreign JSON. Raises ValueError for unusable text, including deep nesting."""

import json
import math
from typing import Any

# Deeper than real data. Writing, comparing and rendering values is recursive and must not exhaust the stack.
MAX_DEPTH = 100
TOO_DEEP = f"nested too deeply: lists and objects more than {MAX_DEPTH} deep"


def parse_json(text: str | bytes) -> Any:
    """The value of `text`. Raises ValueError, "kind: detail", for unusable text."""
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start + 1}") from None
    except ValueError as error:
        raise ValueError(f"malformed JSON: {error}") from None
    check_depth(value, text.count("[") + text.count("{"))
    return value


def json_object(text: bytes, *keys: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises ValueError if there is none, or if it lacks one of `keys`."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"lacks {', '.join(missing)}")
    return value


def whole_number(value: Any) -> Any:
    """`value`, but 1.0 as 1 and NaN as None: pandas writes so a column of whole numbers with a gap."""
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else int(value) if value.is_integer() else value


def check_depth(value: Any, brackets: int, most: int = MAX_DEPTH) -> None:
    """Raises ValueError for lists and objects more than `most` deep. A text with fewer `brackets` needs no walk."""
    if brackets <= most or not isinstance(value, dict | list):
        return
    if most == 0:
        raise ValueError(TOO_DEEP)
    for inner in value.values() if isinstance(value, dict) else value:
        check_depth(inner, brackets, most - 1)
