"""JSON as others hand it to us: whatever cannot be used is a ValueError, deep nesting included."""

import json
from typing import Any

# No real data is nested this deep. Writing, comparing and rendering values is recursive and must not run out of stack.
MAX_DEPTH = 100


def parse_json(text: str | bytes) -> Any:
    """The value that `text` holds. Raises ValueError, "kind: detail", for everything that cannot be used."""
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


def check_depth(value: Any, brackets: int) -> None:
    """Raises ValueError beyond MAX_DEPTH; `brackets` in its text, if no more, say at once that it is not."""
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
