"""Regeneration that drafts for itself: the same file, in fewer passes of the target."""

from collections import Counter
from pathlib import Path

from draftsmith.models.chat import render_prompt
from draftsmith.models.checkpoint import save_drafter
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.sections.target import TargetSection
from tests.data_gen.test_regenerate import Workspace
from tests.data_gen.test_regenerate import place as place  # the fixture
from tests.pairs import taught

LAYERS = (0, 1, 2)  # that the drafter reads


def add_drafter(place: Workspace, steps: int = 60) -> Path:
    """One that knows what this target says to a few prompts."""
    section = TargetSection(model=str(place.target))
    target, tokenizer = Target(TargetFiles(section).load_model("cpu"), LAYERS), TargetFiles(section).tokenizer
    prompts = tuple(render_prompt(tokenizer, [{"role": "user", "content": f"the cat {i} 0"}]) for i in range(4))
    drafter = taught(target, DraftVocab.full(target.vocab_size), prompts, length=20, steps=steps)
    identity = TargetFiles(section).identity_of(target)
    save_drafter(place.folder / "drafter", drafter, identity, "", {})
    return place.folder / "drafter"


def test_greedy_files_are_the_same_with_a_drafter_and_without(place: Workspace) -> None:
    """Rows of several turns, stop tokens within accepted chains, answers cut by both limits."""
    drafted = f"data.generator.drafter={add_drafter(place)}"
    place.ask(12)
    place.run("data.max_length=48")
    expected = place.by_id()
    printed = place.run("data.max_length=48", f"data.conversations={place.folder / 'all.jsonl'}", drafted)
    place.path = place.folder / "all.jsonl"
    drafted_by = {"drafter": str(place.folder / "drafter"), "draft_tokens": 3}
    found = place.by_id()
    assert [record["generator"].pop("drafted_by") for record in found.values()] == [drafted_by] * 12
    assert found == expected
    reasons = Counter(turn["finish_reason"] for record in expected.values() for turn in record["turns"])
    assert min(reasons["stop"], reasons["length"]) > 0
    tau = float(printed.partition("drafted: ")[2].split()[0])
    assert tau > 1.05  # it did draft
    # A part without, the rest with: one file.
    place.path = place.folder / "parts.jsonl"
    parts = f"data.conversations={place.path}"
    place.run("data.max_length=48", parts, "data.max_prompts=5")
    assert "5 of 12 conversations are done, going on" in place.run("data.max_length=48", parts, drafted)
    found = place.by_id()
    assert [record["generator"].pop("drafted_by", None) for record in found.values()].count(drafted_by) == 7
    assert found == expected
