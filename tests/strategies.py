"""What hypothesis draws: records and lines as users damage them, and how many of them a test looks at."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.models.test_tools_and_thoughts import FORMS, THOUGHTFUL
from tests.thinning import effort

GOOD: list[dict[str, Any]] = [
    *FORMS.values(),
    {"id": "m", "messages": THOUGHTFUL, "images": [], "meta": {"k": {"a": [1, 2]}}, "category": "c"},
    {"id": "p", "messages": [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}, THOUGHTFUL[1]]},
    {"question_id": 81, "category": "writing", "turns": ["the cat", "and the dog"], "reference": ["x"]},
    {"instruction": "say", "input": "the cat", "output": "sat", "history": [["q", "a"]], "system": "in the rain"},
    {"question": "where is the cat?", "answer": "on the mat", "tools": [{"name": "f"}]},
    {"prompt": "the cat", "completion": "sat"},
    {
        "id": "r",
        "messages": THOUGHTFUL[:2],
        "turns": [{"prompt_token_ids": [2, 9, 4, 3], "output_token_ids": [9, 4], "finish_reason": "stop"}],
    },
]
# Values that `json.dumps` cannot write are put into its text afterwards.
RAW = {
    "@huge@": "9" * 4000,
    "@too huge@": "9" * 6000,
    "@infinite@": "1e999",
    "@nan@": "NaN",
    "@deep@": "[" * 90 + "]" * 90,
    "@deeper@": '{"a":' * 300 + "1" + "}" * 300,
    "@deepest@": "[" * 100_000,
    "@surrogate@": '"a\\ud800b"',
    "@nul@": '"\\u0000"',
}
TEXTS = ["", " \n", "x", "\x00", "\u2028", "\ufeff", "<|end|>", "{{ 1 }}", "\U0001f600", "assistant", "[1", "x" * 5000]
KEYS = ["role", "content", "from", "value", "turns", "messages", "prompt", "tool_calls", "function", "\ud800", "id", ""]
PIECES = [b"\n", b"\r", b"\r\n", b"\x00", b"\xff", b"\xef\xbb\xbf", b'"', b"{", b"]", b",", b"\\", b"\xed\xa0\x80", b""]

scalars = st.sampled_from([None, True, 0, -1, 2**63, 1.5, *TEXTS, *RAW])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=5,
)


def for_all(examples: int, **drawn: st.SearchStrategy) -> Callable[[Callable[..., None]], None]:
    """Calls the decorated function with so many values of the strategies, always the same ones."""
    return lambda check: effort(examples)(given(**drawn)(check))()


def spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) within a value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from spots(value[key])


@st.composite
def damaged_records(draw: st.DrawFn) -> Any:
    """A good record in which up to three values are replaced, wrapped, moved, cut, renamed or gone."""
    record = json.loads(json.dumps(draw(st.sampled_from(GOOD))))
    for _ in range(draw(st.integers(0, 3))):
        if not (found := list(spots(record))):
            break
        container, key = draw(st.sampled_from(found))
        value = container.pop(key)
        deed = draw(st.sampled_from(["drop", "replace", "wrap", "rename", "text", "mix"]))
        if deed == "wrap":
            value = draw(st.sampled_from([[value], {"a": value}, json.dumps(value), [value] * 50, str(value)]))
        elif deed == "text" and isinstance(value, str):
            at = draw(st.integers(0, len(value)))
            value = value[:at] + draw(st.sampled_from(TEXTS)) + value[at:]
        elif deed == "mix":
            value = draw(st.sampled_from([each for good in GOOD for each in good.values()]))
        elif deed != "rename":
            value = draw(values)
        if isinstance(container, dict) and deed != "drop":
            container[draw(st.sampled_from(KEYS)) if deed == "rename" else key] = json.loads(json.dumps(value))
        elif isinstance(container, list) and deed != "drop":
            container.insert(key, json.loads(json.dumps(value)))
    return record


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes, most: int = 2) -> bytes:
    """With up to `most` stretches replaced by bytes that hurt, doubled or gone."""
    for _ in range(draw(st.integers(0, most))):
        start = draw(st.integers(0, len(content)))
        length = draw(st.sampled_from([0, 0, 1, 4, 50, 10**9]))
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=4) | st.just(content[start : start + 200] * 20))
        content = content[:start] + piece + content[start + length :]
    return content


@st.composite
def damaged_lines(draw: st.DrawFn) -> bytes:
    """A line of a file, which may have line breaks in it."""
    text = json.dumps(draw(damaged_records()))
    for placeholder, raw in RAW.items():
        text = text.replace(json.dumps(placeholder), raw)
    text = draw(st.sampled_from([text, text, text, text.replace("{", '{"messages": 3, ', 1), text * 2, " \t"]))
    whole = text.encode()
    return draw(st.just(whole) | damaged_bytes(whole) | st.sampled_from([whole + b"\r", text.encode("utf-16"), b""]))
