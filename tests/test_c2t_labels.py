"""Labels of C2T: the rows of uncut trees against a slow twin, and the folder that holds them."""

import json
import math
import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.data_gen.trees.labelled_trees import Trees, TreesManifest, check_rows, read_trees
from draftsmith.data_gen.trees.labelling import Labelled, label
from draftsmith.eval.decoding.decode import decode
from draftsmith.eval.decoding.policies import Eagle2, PolicyProposer
from draftsmith.eval.recorded.answers import RecordedAnswer
from draftsmith.eval.recorded.replay import Agreement, RecordedVerifier, read_states, replay
from draftsmith.models.draft_tree import Committed, Drafting, DraftTree
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.sampling import Draws
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.digest import file_digest
from draftsmith.recipes.schema import LabelSection
from tests import reference
from tests.c2t_cases import made_trees, same_trees, write_trees
from tests.pairs import PROMPTS, greedy, pair_of_kind
from tests.scripted_drafting import VOCAB, Nodes, Scripted, Table, unasked_target
from tests.thinning import a_few


class Along(Scripted):
    """A drafter that knows another table after every committed text."""

    def __init__(self, table: type[Table] = Table) -> None:
        super().__init__([table(0)])
        self.table = table

    def keep(self, rows: Sequence[int]) -> None: ...

    def rollback(self, lengths: Sequence[int]) -> None:
        raise AssertionError("nothing is rolled back here")

    def observe(self, committed: Committed) -> None:
        self.tables = [self.table(text_seed(tokens)) for tokens in committed.tokens]


def text_seed(tokens: Sequence[int]) -> int:
    return zlib.crc32(str(list(tokens)).encode())


def written_answer(chance: random.Random, tokens: int, table: type[Table] = Table) -> RecordedAnswer:
    """What a target that often says a likely token would have written; even tokens are in no draft vocabulary."""
    prompt = [2 * chance.randrange(9) for _ in range(chance.randint(1, 4))]
    text = [*prompt, 2 * chance.randrange(9)]
    while len(text) < len(prompt) + tokens:
        here, path = table(text_seed(text)), ()
        while chance.random() < 0.8 and len(text) < len(prompt) + tokens - 1:
            path = (*path, reference.by_likelihood(here(path))[min(int(chance.expovariate(1.2)), VOCAB - 1)])
            text.append(2 * path[-1] + 1)
        text.append(2 * chance.randrange(9))
    if chance.random() < 0.7 and len(text) > len(prompt) + 2:
        text.pop()  # answers may end with a token that was drafted
    return RecordedAnswer(prompt, text[len(prompt) :], conversation_id=str(chance.random()))


def slow_rows(answer: RecordedAnswer, section: LabelSection) -> tuple[list[list[tuple]], int]:
    """(rows of each tree, sorted; nodes below the end) along one answer, root by root."""
    trees, below, done = [], 0, 1
    while done < len(answer.tokens):
        said = tuple((token - 1) // 2 if token % 2 else -1 for token in answer.tokens[done:])
        table = Table(text_seed([*answer.prompt, *answer.tokens[:done]]))
        rows, accepted, beyond = reference.c2t_rows(
            table, section.top_k, section.draft_calls, section.entropy_over, said
        )
        trees.append(sorted(rows))
        below += beyond
        done += accepted + 1
    return trees, below


def fast_rows(labelled: Labelled) -> list[list[tuple]]:
    return [
        sorted((int(d), p, h, accepted) for (p, h, d), accepted in zip(features.tolist(), said.tolist(), strict=True))
        for features, said in zip(labelled.features, labelled.accepted, strict=True)
    ]


SECTIONS = [
    LabelSection(top_k=3, draft_calls=4, entropy_over=5),
    LabelSection(top_k=1, draft_calls=3),
    LabelSection(top_k=5, draft_calls=1),
    LabelSection(top_k=VOCAB + 2, draft_calls=3, entropy_over=VOCAB),  # more than there are tokens
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: f"{section.top_k} x {section.draft_calls}")
def test_rows_are_those_of_the_slow_twin_answer_by_answer(section: LabelSection) -> None:
    chance = random.Random(section.top_k)
    answers = [written_answer(chance, tokens) for tokens in (2, 9, 30, 17, 30)]
    together = label(Along(), answers, None, unasked_target(1000), section)
    accepted = beyond = 0
    for answer, labelled in zip(answers, together, strict=True):
        expected, below = slow_rows(answer, section)
        found = fast_rows(labelled)
        assert [len(tree) for tree in found] == [len(tree) for tree in expected]
        for mine, its in zip(found, expected, strict=True):
            assert [row[0] for row in mine] == [row[0] for row in its]
            assert [row[3] for row in mine] == [row[3] for row in its]
            np.testing.assert_allclose([row[1:3] for row in mine], [row[1:3] for row in its], atol=1e-5)
        assert (labelled.dropped_beyond, labelled.dropped_nan) == (below, 0)
        accepted, beyond = accepted + sum(row[3] for tree in expected for row in tree), beyond + below
        (alone,) = label(Along(), [answer], None, unasked_target(1000), section)
        assert fast_rows(alone) == found
    assert accepted > 5
    assert beyond > 0 or section.draft_calls == 1


def test_trees_of_the_published_size_have_1010_rows() -> None:
    section = LabelSection()
    (labelled,) = label(Along(), [written_answer(random.Random(0), 12)], None, unasked_target(1000), section)
    sizes = [len(said) for said in labelled.accepted]
    assert sum(sizes) + labelled.dropped_beyond == 1010 * len(sizes)
    assert 1010 in sizes


class Broken(Table):
    """After some paths a distribution holds a NaN."""

    def row(self, path: Nodes) -> torch.Tensor:
        row = super().row(path).clone()
        if random.Random(f"broken {self.seed} {path}").random() < 0.15:
            row[3] = math.nan
        return row


def test_rows_with_nan_are_dropped_and_counted() -> None:
    section = LabelSection(top_k=3, draft_calls=4)
    answers = [written_answer(random.Random(seed), 20) for seed in range(4)]
    dropped = 0
    for labelled in label(Along(Broken), answers, None, unasked_target(1000), section):
        kept = sum(map(len, labelled.accepted))
        assert not any(features.isnan().any() for features in labelled.features)
        assert all(
            len(features) == len(said) for features, said in zip(labelled.features, labelled.accepted, strict=True)
        )
        assert (kept + labelled.dropped_nan + labelled.dropped_beyond) % (3 + 3 * 9) == 0  # whole trees
        dropped += labelled.dropped_nan
    assert dropped > 20


def test_no_row_lies_behind_the_target_s_last_position() -> None:
    answer = written_answer(random.Random(1), 12)
    section = LabelSection(top_k=2, draft_calls=5)
    positions = len(answer.prompt) + len(answer.tokens)
    (labelled,) = label(Along(), [answer], None, unasked_target(positions), section)
    deepest = [int(features[:, 2].max()) for features in labelled.features]
    assert deepest[0] == 4 and deepest[-1] < 4
    free, cut = label(Along(), [answer], None, unasked_target(1000), section)[0], labelled
    assert [int(said.sum()) for said in free.accepted] == [int(said.sum()) for said in cut.accepted]


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    parts = [made_trees(4, 30), made_trees(3, 20, seed=1)]
    written = write_trees(tmp_path, parts)
    manifest = TreesManifest.read(tmp_path)
    assert manifest == written
    trees = read_trees(tmp_path, check_rows(tmp_path, manifest))
    assert same_trees(trees, Trees.joined(parts))
    assert (trees.count, trees.rows) == (7, sum(part.rows for part in parts))
    for tree in range(7):
        part, number = (parts[0], tree) if tree < 4 else (parts[1], tree - 4)
        mine, its = (
            slice(*each.tolist()) for each in (trees.starts[tree : tree + 2], part.starts[number : number + 2])
        )
        assert torch.equal(trees.features[mine], part.features[its])
        assert torch.equal(trees.accepted[mine], part.accepted[its])
    chosen = trees.chosen(torch.tensor([5, 0, 3]))
    apart = Trees.joined([trees.chosen(torch.tensor([tree])) for tree in (5, 0, 3)])
    assert same_trees(chosen, apart)
    assert torch.equal(chosen.answer, trees.answer[[5, 0, 3]])
    assert same_trees(trees.chosen(torch.arange(7)), trees)


def change_manifest(directory: Path, **changes: Any) -> None:
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    made_of = content["made_of"] | {key: changes.pop(key) for key in list(changes) if key in content["made_of"]}
    path.write_text(json.dumps(content | changes | {"made_of": made_of}))


def change_shard(directory: Path) -> None:
    path = directory / "shard-00001.safetensors"
    tensors = load_file(path)
    tensors["accepted"][0] ^= True
    save_file(tensors, path)


def change_shards(directory: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    change_manifest(directory, shards=change(json.loads((directory / "manifest.json").read_text())["shards"]))


def rewrite_shard(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """The first one, with a manifest that knows the change."""
    path = directory / "shard-00000.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    written = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
    change_shards(directory, lambda shards: [shards[0] | written, *shards[1:]])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "no labelled trees here"),
    "no json": (lambda d: (d / "manifest.json").write_text("{"), "malformed JSON"),
    "a list": (lambda d: (d / "manifest.json").write_text("[]"), "not a manifest of labelled trees"),
    "another kind": (lambda d: change_manifest(d, kind="c2t"), "not a manifest of labelled trees"),
    "no counts": (lambda d: change_manifest(d, shards=[{"file": "x", "sha256": "y"}]), "manifest.json: damaged"),
    "depths from 1": (lambda d: change_manifest(d, depth_convention="root's children 1"), "other depths than training"),
    "another M": (lambda d: change_manifest(d, entropy_over=50), r"over 50 tokens.*labels.entropy_over=1000"),
    "no M": (lambda d: change_manifest(d, entropy_over=None), "entropy_over: None must be a whole number"),
    "unfinished": (lambda d: change_manifest(d, complete=False), "labelled 2 of 2 answers so far.*run .* again"),
    "shard gone": (lambda d: (d / "shard-00001.safetensors").unlink(), "shard-00001.safetensors: no such file"),
    "shard cut": (lambda d: (d / "shard-00000.safetensors").write_bytes(b"123"), "shard-00000.safetensors: damaged"),
    "shard changed": (change_shard, "its sha256 differs"),
    "drafter a list": (lambda d: change_manifest(d, drafter=["x"]), "damaged: made_of, and drafter inside it"),
    "no objects": (lambda d: change_manifest(d, shards=["x"]), "manifest.json: damaged"),
    "a shard twice": (lambda d: change_shards(d, lambda s: s + s[:1]), "'shard-00000.safetensors' is no file of it"),
    "a shard elsewhere": (lambda d: change_shards(d, lambda s: [s[0] | {"file": "../x"}]), "'../x' is no file of it"),
    "rows below 0": (lambda d: change_shards(d, lambda s: [s[0] | {"rows": -5}]), "rows: -5 must be a whole number"),
    "true rows": (lambda d: change_shards(d, lambda s: [s[0] | {"rows": True}]), "rows: True must be a whole number"),
    "more accepted": (lambda d: change_shards(d, lambda s: [s[0] | {"accepted": 999}]), "999 of .* rows are accepted"),
    "fewer rows": (lambda d: change_shards(d, lambda s: [s[0] | {"rows": 100}]), "counts 100 rows of 4 trees"),
    "fewer trees": (lambda d: change_shards(d, lambda s: [s[0] | {"trees": 3}]), "counts .* rows of 3 trees"),
    "fewer accepted": (lambda d: change_shards(d, lambda s: [s[0] | {"accepted": 1}]), "the manifest counts 1"),
    "a NaN": (lambda d: rewrite_shard(d, lambda t: t["P"].__setitem__(0, math.nan)), "of 1 rows is not finite"),
    "infinite": (lambda d: rewrite_shard(d, lambda t: t["H"].fill_(math.inf)), "rows is not finite"),
    "doubles": (lambda d: rewrite_shard(d, lambda t: t.update(P=t["P"].double())), "P is torch.float64"),
    "starts": (lambda d: rewrite_shard(d, lambda t: t["starts"].__setitem__(1, 90)), "starts do not divide the rows"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_and_other_rows_are_refused(damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    write_trees(tmp_path, [made_trees(4, 30), made_trees(3, 20, seed=1)])

    def read() -> Trees:
        return read_trees(tmp_path, check_rows(tmp_path, TreesManifest.read(tmp_path), entropy_over=1000))

    read()
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        read()
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(("all_or_none", "word"), [(torch.zeros_like, "none"), (torch.ones_like, "all")])
def test_rows_of_one_kind_are_refused(all_or_none: Any, word: str, tmp_path: Path) -> None:
    manifest = write_trees(tmp_path, [made_trees(4, 30, law=lambda P, H, d: all_or_none(P, dtype=torch.bool))])
    with pytest.raises(UserError, match=f"{word} were accepted, and nothing can be learnt"):
        check_rows(tmp_path, manifest)


@pytest.mark.parametrize("kind", a_few(["eagle", "poss", "poss over eagle3"], "poss over eagle3"))
def test_every_kind_of_drafter_is_labelled_as_it_drafts(kind: str) -> None:
    """Rounds of replay, and P and H of the accepted nodes from distributions that are drafted along the path alone."""
    target, drafter = pair_of_kind(kind, "llama", None)
    section, depth = LabelSection(top_k=4, draft_calls=4, entropy_over=20), 4
    answers = [RecordedAnswer(prompt, greedy(target, prompt, 24)) for prompt in PROMPTS[:3]]
    drafting = FeatureDrafting(drafter)
    states = read_states(target, answers, drafting.capture_layers, Agreement.of(target))
    found = label(drafting, answers, states, target, section)
    replayed = replay(target, PolicyProposer(FeatureDrafting(drafter), Eagle2(10**4, depth, 4)), answers, 3)
    taken = [[int(said.sum()) for said in labelled.accepted] for labelled in found]
    assert taken == [generation.accepted_per_round for generation in replayed]
    assert sum(map(sum, taken)) > 20

    for answer, labelled, counts in zip(answers, found, taken, strict=True):
        alone = FeatureDrafting(drafter)
        states = read_states(target, [answer], alone.capture_layers, Agreement.of(target))
        path = AlongTheAnswer(answer, counts, section.entropy_over)
        verifier = RecordedVerifier([answer], states, target)
        decode(verifier, PolicyProposer(alone, path), [answer.prompt], (), [len(answer.tokens)])
        assert len(path.rows) == len(labelled.features)
        for features, said, expected in zip(labelled.features, labelled.accepted, path.rows, strict=True):
            rows = features[said]
            np.testing.assert_allclose(rows[rows[:, 2].argsort()], np.array(expected).reshape(-1, 3), 2e-3, 1e-5)


class AlongTheAnswer:
    """A policy that drafts what the target says and nothing else: of every round so many tokens."""

    def __init__(self, answer: RecordedAnswer, counts: Sequence[int], entropy_over: int) -> None:
        self.answer, self.counts, self.entropy_over = answer, counts, entropy_over
        self.done, self.rows = 1, []

    def grow(
        self, drafting: Drafting, roots_B: torch.Tensor, draws: Sequence[Draws] | None = None
    ) -> tuple[DraftTree, list[int]]:
        said = self.answer.tokens[self.done : self.done + self.counts[len(self.rows)]]
        log_probs, joint, rows = drafting.root_log_probs()[0], 0.0, []
        for depth, token in enumerate(said):
            joint += float(log_probs[token])
            rows.append((math.exp(joint), reference.entropy_in_nats(log_probs.tolist(), self.entropy_over), depth))
            if depth + 1 < len(said):
                log_probs = drafting.expand(torch.tensor([[depth]]), torch.tensor([[token]]), depth + 1)[0, 0]
        self.rows.append(rows)
        self.done += len(said) + 1
        return DraftTree.chains([[int(roots_B[0]), *said]], roots_B.device), [len(said)]
