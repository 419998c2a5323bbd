"""The bench of a training step: it runs, counts what it says, and refuses what makes no step."""

import json
import shlex
from pathlib import Path

import pytest

from tests.bench.train_step import SHAPES, compared, layout, main, parsed

SMALL = shlex.split("--device cpu --hidden 64 --vocab 128 --seq 64 --steps 1 --warmup 0 --rounds 1 --threads 1 --ttt 3")
measures = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")


@pytest.mark.slow
@measures
def test_a_step_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.json"
    monkeypatch.setattr("sys.argv", ["train_step.py", *SMALL, "--attention", "blocks", "--json", str(path)])
    main()
    found = json.loads(path.read_text())
    assert all(found[key] > 0 for key in ("tokens_per_second", "cpu_ms_per_step"))
    assert found["attention"] == "plain blocks" and found["flops_per_step"] > 0
    assert "attention by plain blocks" in capsys.readouterr().out


@pytest.mark.slow
@measures
def test_another_side_that_fails_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And our numbers stand."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'CUDA out of memory' >&2\nexit 1\n")
    broken.chmod(0o755)
    found = compared([*SMALL, "--peer", str(broken)])
    assert found["peer"] == {"failed": "CUDA out of memory"} and found["tokens_per_second"] > 0
    assert "peer   failed: CUDA out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, words",
    [
        ("--supervised 0", "--supervised 0.0: give more than 0"),
        ("--supervised 1.5", "--supervised 1.5"),
        ("--spans 100", "--seq 64: nothing to train on"),
        ("--steps 0", "--steps 0: give 1 or more"),
        ("--kv-heads 2", "--heads 1: not a multiple of --kv-heads, 2"),
        ("--heads 3", "--hidden 64: not a multiple of twice --heads, 3"),
        ("--draft-vocab 129", "more than --vocab"),
        ("--peer /no/python", "no such program"),
        ("--json /no/folder/x.json", "/no/folder is no folder"),
        ("--plot x.png", "give some"),
    ],
)
def test_what_makes_no_step_is_refused(given: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parsed([*SMALL, *given.split()])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_supervised_tokens_lie_in_spans_over_every_document() -> None:
    wanted = parsed(shlex.split("--seq 1000 --docs 3 --spans 4 --supervised 0.3 --device cpu"))
    lengths, spans = layout(wanted)
    assert sum(lengths) == 1000 and len(set(lengths)) == 3 and len(spans) == 12
    assert sum(end - first for first, end in spans) == pytest.approx(300, abs=12)
    ends = [0, *(end for _, end in spans)]
    assert all(first > before for (first, _), before in zip(spans, ends, strict=False)) and ends[-1] == 1000


def test_every_shape_is_one() -> None:
    for shapes in SHAPES.values():
        for shape in shapes.values():
            assert parsed([*shape.split(), "--device", "cpu"]).seq >= 512
