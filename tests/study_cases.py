"""Places that the tests of the study share."""

from pathlib import Path

from docs.study.cells import Places

HERE = Path(__file__).parents[1]
PLACES = Places(Path("out"), Path("demo"))
ANSWERS = 30  # of the fake study
