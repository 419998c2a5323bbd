"""Rotary embeddings: scalings that change with the length, and rotations of a part of each head.

Tiny random weights in float32.
"""

from typing import Any

import pytest

from draftsmith.models.families import usable_positions
from tests.conftest import make_config

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 32,
}
SAME_FACTORS = LONGROPE | {"short_factor": LONGROPE["long_factor"]}


@pytest.mark.parametrize(
    ("family", "settings", "usable"),
    [
        ("llama", {"rope_parameters": LONGROPE}, 32),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, 64),  # as Phi-3 is published
        ("llama", {"rope_parameters": SAME_FACTORS}, 512),
        ("phimoe", {"rope_parameters": SAME_FACTORS | {"short_mscale": 1.0, "long_mscale": 1.2}}, 32),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}, 512),
        ("gemma3_text", {}, 512),
    ],
)
def test_usable_positions_end_where_the_rotation_changes(family: str, settings: dict[str, Any], usable: int) -> None:
    assert usable_positions(make_config(family, max_position_embeddings=512, **settings)) == usable
