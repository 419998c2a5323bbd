"""Parses foreign JSON. Raises ValueError for unusable text, including deep nesting."""

import json
import math
from typing import Any

# Deeper than real data. Writing, comparing and rendering values is recursive and must not exhaust the stack.
MAX_DEPTH = 100


def parse_json(text: str | bytes) -> Any:
    """The value of `text`. Raises ValueError, "kind: detail", for unusable text."""
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = json.loads(text)
    except RecursionError:
        raise too_deep() from None
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
    """`value`, but floats as their author meant them: pandas writes a column of whole numbers with a gap as 1.0, NaN.

    1.0 becomes 1, and NaN None.
    """
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else int(value) if value.is_integer() else value


def check_depth(value: Any, brackets: int) -> None:
    """Raises ValueError beyond MAX_DEPTH. A text with at most MAX_DEPTH `brackets` needs no walk."""
    level, depth = [value], 0
    while level and brackets > MAX_DEPTH:
        depth += 1
        if depth > MAX_DEPTH:
            raise too_deep()
        inner: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                inner += container.values()
            elif isinstance(container, list):
                inner += container
        level = [entry for entry in inner if isinstance(entry, dict | list)]


def too_deep() -> ValueError:
    return ValueError(f"nested too deeply: lists and objects more than {MAX_DEPTH} deep")
