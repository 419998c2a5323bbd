"""C2T: rows of uncut trees against a slow twin, the classifier's training, its growth, and the sweep of beta."""

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftsmith.data_gen import label_trees
from draftsmith.data_gen.trees import labelling
from draftsmith.data_gen.trees.labelled_trees import (
    Manifest,
    Trees,
    check_rows,
    read_manifest,
    read_trees,
    write_shard,
)
from draftsmith.data_gen.trees.labelling import Labelled, batches_of, label
from draftsmith.eval import c2t_sweep
from draftsmith.eval.decoding.contenders import Lineup, check_contenders, main_contender, words_of
from draftsmith.eval.decoding.decode import Generation, run_rounds
from draftsmith.eval.decoding.policies import C2T, Eagle2, PolicyProposer
from draftsmith.eval.measured.c2t_curves import Point, points_of, sweep_numbers
from draftsmith.eval.recorded.answers import RecordedAnswer
from draftsmith.eval.recorded.replay import Agreement, RecordedVerifier, read_states, replay
from draftsmith.models import c2t as models_c2t
from draftsmith.models import checkpoint
from draftsmith.models.c2t import (
    DEPTH_CONVENTION,
    C2tClassifier,
    C2tConfig,
    drafter_words,
    read_config,
    unequal_words,
    weights_digest,
)
from draftsmith.models.chat import load_config, tokenizer_fingerprint
from draftsmith.models.checkpoint import save_drafter, target_identity
from draftsmith.models.draft_tree import Drafting, DraftTree
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.sampling import Draws
from draftsmith.models.target import Target, load_causal_lm
from draftsmith.models.vocab import DraftVocab, load_token_counts, save_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import ClassifierSection, LabelSection, Recipe, TargetSection
from draftsmith.train import c2t
from draftsmith.train.run import classifier as classifier_training
from draftsmith.train.run.classifier import better, epoch_batches, rate_of, rates, share_of, split, train, validate
from tests import reference
from tests.conftest import make_tokenizer
from tests.crash import CAN_FORK, CrashLab, Fault
from tests.pairs import KINDS, PROMPTS, greedy, pair_of_kind, taught
from tests.test_policies import VOCAB, Nodes, Scripted, Table, linear_classifier, paths_of, roots

# Rows of uncut trees.


class Along(Scripted):
    """A drafter that knows another table after every committed text."""

    def __init__(self, table: type[Table] = Table) -> None:
        super().__init__([table(0)])
        self.table = table

    def keep(self, rows: Sequence[int]) -> None: ...

    def observe(self, committed: Sequence[Sequence[int]], features: torch.Tensor | None, counts: Sequence[int]) -> None:
        self.tables = [self.table(text_seed(tokens)) for tokens in committed]


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
    together = label(Along(), answers, None, 1000, section)
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
        (alone,) = label(Along(), [answer], None, 1000, section)
        assert fast_rows(alone) == found
    assert accepted > 5
    assert beyond > 0 or section.draft_calls == 1


def test_trees_of_the_published_size_have_1010_rows() -> None:
    section = LabelSection()
    (labelled,) = label(Along(), [written_answer(random.Random(0), 12)], None, 1000, section)
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
    for labelled in label(Along(Broken), answers, None, 1000, section):
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
    (labelled,) = label(Along(), [answer], None, positions, section)
    deepest = [int(features[:, 2].max()) for features in labelled.features]
    assert deepest[0] == 4 and deepest[-1] < 4
    free, cut = label(Along(), [answer], None, 1000, section)[0], labelled
    assert [int(said.sum()) for said in free.accepted] == [int(said.sum()) for said in cut.accepted]


def test_the_loop_goes_on_where_replay_with_the_whole_tree_does() -> None:
    """Through `eval.recorded.replay`'s own verifier, which looks at all nodes and their ancestors."""
    section = LabelSection(top_k=3, draft_calls=4)
    answers = [written_answer(random.Random(seed), 25) for seed in range(5)]
    verifier = RecordedVerifier(answers, None, 1000, torch.device("cpu"))
    proposer = PolicyProposer(Along(), Eagle2(10**6, 4, 3))
    prompts, budgets = [answer.prompt for answer in answers], [len(answer.tokens) for answer in answers]
    generations = run_rounds(verifier, proposer, prompts, (), budgets)
    for generation, labelled in zip(generations, label(Along(), answers, None, 1000, section), strict=True):
        assert [int(said.sum()) for said in labelled.accepted] == generation.accepted_per_round


# The folder of rows.


def made_trees(trees: int, rows: int, seed: int = 0, law: Callable[..., torch.Tensor] | None = None) -> Trees:
    """Trees of `rows` nodes or a few fewer; accepted by a law of P, H and d, by default what is probable."""
    chance = torch.Generator().manual_seed(seed)
    features, accepted = [], []
    for tree in range(trees):
        count = rows - tree % 3
        P, H = torch.rand(count, generator=chance) ** 3, 3 * torch.rand(count, generator=chance)
        d = torch.randint(0, 10, (count,), generator=chance).float()
        features.append(torch.stack((P, H, d), dim=-1))
        accepted.append((P > 0.7) & (d < 7) if law is None else law(P, H, d))
    return Trees.of(features, accepted, range(trees))


MADE_OF = {"depth_convention": DEPTH_CONVENTION, "entropy_over": 1000, "drafter": {"kind": "toy", "vocab_size": None}}


def write_trees(directory: Path, shards: Sequence[Trees], **made_of: Any) -> Manifest:
    directory.mkdir(parents=True, exist_ok=True)
    manifest = Manifest({**MADE_OF, **made_of}, len(shards), complete=True)
    for number, trees in enumerate(shards):
        counts = {"answers": 1, "dropped_nan": 0, "dropped_beyond": 0}
        manifest.shards.append(write_shard(directory, number, trees, counts))
    manifest.write(directory)
    return manifest


def same_trees(a: Trees, b: Trees) -> bool:
    names = ("P", "H", "d", "accepted", "starts", "answer")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    parts = [made_trees(4, 30), made_trees(3, 20, seed=1)]
    written = write_trees(tmp_path, parts)
    manifest = read_manifest(tmp_path)
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


def change_manifest(directory: Path, **words: Any) -> None:
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    made_of = content["made_of"] | {key: words.pop(key) for key in list(words) if key in content["made_of"]}
    path.write_text(json.dumps(content | words | {"made_of": made_of}))


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
    change_shards(directory, lambda shards: [shards[0] | {"sha256": checkpoint.file_digest(path)}, *shards[1:]])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "no labelled trees here"),
    "no json": (lambda d: (d / "manifest.json").write_text("{"), "malformed JSON"),
    "a list": (lambda d: (d / "manifest.json").write_text("[]"), "not a manifest of labelled trees"),
    "another kind": (lambda d: change_manifest(d, kind="c2t"), "not a manifest of labelled trees"),
    "no counts": (lambda d: change_manifest(d, shards=[{"file": "x", "sha256": "y"}]), "manifest.json: damaged"),
    "depths from 1": (lambda d: change_manifest(d, depth_convention="root's children 1"), "other depths than training"),
    "another M": (lambda d: change_manifest(d, entropy_over=50), r"over 50 tokens.*labels.entropy_over=1000"),
    "no M": (lambda d: change_manifest(d, entropy_over=None), "entropy_over: None must be a whole number"),
    "unfinished": (lambda d: change_manifest(d, complete=False), "labelled 2 of 2 answers so far.*goes on"),
    "shard gone": (lambda d: (d / "shard-00001.safetensors").unlink(), "shard-00001.safetensors: missing"),
    "shard cut": (lambda d: (d / "shard-00000.safetensors").write_bytes(b"123"), "shard-00000.safetensors: damaged"),
    "shard changed": (change_shard, "not the bytes that the manifest was written for"),
    "drafter a list": (lambda d: change_manifest(d, drafter=["x"]), "damaged: made_of, and drafter inside it"),
    "no objects": (lambda d: change_manifest(d, shards=["x"]), "shards must be a list of objects"),
    "a shard twice": (lambda d: change_shards(d, lambda s: s + s[:1]), "shard 2 names the file 'shard-00000.safe"),
    "a shard elsewhere": (lambda d: change_shards(d, lambda s: [s[0] | {"file": "../x"}]), "shard 0 names .*../x"),
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
        return read_trees(tmp_path, check_rows(tmp_path, read_manifest(tmp_path), entropy_over=1000))

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


# Training.


def trained(
    section: ClassifierSection, trees: Trees, start: C2tClassifier | None = None, **made_of: Any
) -> classifier_training.Trained:
    manifest = Manifest({**MADE_OF, **made_of}, 1)
    return train(section, manifest, trees, start, lambda line: None)


def test_a_separable_law_is_learnt_and_the_ratio_is_stored() -> None:
    trees = made_trees(200, 100)
    section = ClassifierSection(epochs=120, learning_rate=0.01, negative_ratio=8.0, hidden=12)
    found = trained(section, trees, entropy_over=77)
    assert found.best["recall"] > 0.95
    assert found.best["precision"] > 0.9
    assert abs(found.best["positive_rate"] - float(trees.accepted.float().mean())) < 0.02
    other = made_trees(50, 100, seed=9)
    right = (found.classifier.confidence(other.features) >= 0.5) == other.accepted
    assert float(right.float().mean()) > 0.98
    assert found.classifier.config == C2tConfig(12, 77, 8.0, MADE_OF["drafter"])
    assert trained(
        section.model_copy(update={"epochs": 1, "negative_ratio": None}), trees
    ).classifier.config == C2tConfig(12, 1000, None, MADE_OF["drafter"])


def test_equal_seeds_give_equal_classifiers_and_nobody_else_s_draws_move() -> None:
    trees, section = made_trees(40, 50), ClassifierSection(epochs=3)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = trained(section, trees)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = trained(section, trees), trained(section.model_copy(update={"seed": 1}), trees)
    assert first.metrics == again.metrics != other.metrics
    for mine, its in zip(first.classifier.parameters(), again.classifier.parameters(), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("ratio", [None, 0.5, 2.0, 1e9])
def test_every_epoch_draws_its_rejected_rows_anew(ratio: float | None) -> None:
    accepted = made_trees(20, 100).accepted
    section = ClassifierSection(negative_ratio=ratio, batch_size=64)
    positives, negatives = int(accepted.sum()), int((~accepted).sum())
    wanted = negatives if ratio is None else min(negatives, round(ratio * positives))
    epochs = []
    for epoch in (1, 2, 1):
        batches = list(epoch_batches(accepted, section, epoch))
        assert {len(batch) for batch in batches[:-1]} == {64}
        rows = torch.cat(batches)
        assert len(rows.unique()) == len(rows) == positives + wanted
        assert int(accepted[rows].sum()) == positives
        assert 0 < int(accepted[batches[0]].sum()) < 64  # shuffled
        epochs.append(rows)
    assert torch.equal(epochs[0], epochs[2])
    assert not torch.equal(epochs[0].sort().values, epochs[1].sort().values) or wanted == negatives


def test_whole_trees_are_kept_out() -> None:
    section = ClassifierSection(validation_share=0.3)
    train_on, kept_out = split(50, section)
    assert sorted([*train_on.tolist(), *kept_out.tolist()]) == list(range(50))
    assert len(kept_out) == 15
    assert not torch.equal(split(50, section.model_copy(update={"seed": 1}))[1], kept_out)
    train_on, kept_out = split(50, section.model_copy(update={"share": 0.5}))
    assert (len(train_on), len(kept_out)) == (17, 8)
    with pytest.raises(UserError, match="1 of 1 trees are too few"):
        split(1, section)


def test_numbers_of_an_epoch_equal_their_slow_twins() -> None:
    trees, section = made_trees(30, 40), ClassifierSection(negative_ratio=1.5)
    torch.manual_seed(0)
    classifier = C2tClassifier(C2tConfig(hidden=5)).requires_grad_(False)
    classifier.output.bias.fill_(-0.1)
    confidence = reference.c2t_confidence(dict(classifier.state_dict()))
    C = [confidence(p, h, d) for p, h, d in trees.features.tolist()]
    said = trees.accepted.tolist()
    passed = [c >= 0.5 for c in C]
    hits = sum(p and s for p, s in zip(passed, said, strict=True))
    assert 0 < hits < sum(passed) < len(passed)
    found = validate(classifier, trees, section)
    assert found["recall"] == hits / sum(said)
    assert found["positive_rate"] == sum(passed) / len(passed)
    assert found["precision"] == hits / sum(passed)
    positives, negatives = sum(said), len(said) - sum(said)
    drawn = round(1.5 * positives)
    loss = -sum(math.log(c) for c, s in zip(C, said, strict=True) if s)
    loss -= drawn / negatives * sum(math.log(1 - c) for c, s in zip(C, said, strict=True) if not s)
    assert found["validation_loss"] == pytest.approx(loss / (positives + drawn), rel=1e-5)


def test_recall_selects_the_epoch_then_the_lower_positive_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = [(0.5, 0.01), (0.9, 0.3), (0.9, 0.2), (0.9, 0.2), (0.8, 0.01), (0.9, 0.25)]
    weights = []

    def validated(classifier: C2tClassifier, trees: Trees, section: ClassifierSection) -> dict[str, float]:
        recall, positive_rate = scripted[len(weights)]
        weights.append({name: tensor.clone() for name, tensor in classifier.state_dict().items()})
        return {"validation_loss": 1.0, "recall": recall, "positive_rate": positive_rate, "precision": 0.0}

    monkeypatch.setattr(classifier_training, "validate", validated)
    found = trained(ClassifierSection(epochs=6), made_trees(40, 50))
    assert found.epoch == 3
    for name, tensor in found.classifier.state_dict().items():
        assert torch.equal(tensor, weights[2][name]) and not torch.equal(tensor, weights[3][name])
    assert better({"recall": 0.2, "positive_rate": 0.9}, {"recall": 0.1, "positive_rate": 0.0})
    assert not better({"recall": 0.2, "positive_rate": 0.1}, {"recall": 0.2, "positive_rate": 0.1})


def test_a_tenth_of_the_trees_calibrates_a_classifier() -> None:
    """Another target's nodes are accepted less often at the same P: what passes moves with it."""
    section = ClassifierSection(epochs=40, learning_rate=0.01, hidden=12)
    start = trained(section, made_trees(200, 100)).classifier
    calibration = ClassifierSection(hidden=12, init_from="x", batch_size=64)
    assert (rate_of(calibration), share_of(calibration)) == (1e-4, 0.1)
    assert (rate_of(ClassifierSection()), share_of(ClassifierSection())) == (1e-3, 1.0)
    other = made_trees(400, 100, seed=3, law=lambda P, H, d: (P > 0.5) & (d < 7))
    kept = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    found = trained(calibration, other, start, drafter={"kind": "another"})
    assert found.metrics[0]["rows"] < 40 * 100 * 0.95
    assert found.classifier.config.drafter == {"kind": "another"}
    unseen = made_trees(50, 100, seed=4, law=lambda P, H, d: (P > 0.5) & (d < 7))
    before, after = (
        rates(each.confidence(unseen.features), unseen.accepted, 0.5)["recall"] for each in (start, found.classifier)
    )
    assert after > before
    assert all(torch.equal(tensor, kept[name]) for name, tensor in start.state_dict().items())
    # It begins where the other one ended: a tenth of the learning rate leaves it near.
    moved = [(a - b).abs().max() for a, b in zip(start.parameters(), found.classifier.parameters(), strict=True)]
    assert 0 < max(moved) < 0.1


def test_parts_without_an_accepted_node_are_refused() -> None:
    rare = made_trees(30, 20, law=lambda P, H, d: torch.zeros_like(P, dtype=torch.bool))
    rare.accepted[0] = True
    with pytest.raises(UserError, match=r"trees to (train|validate) on none were accepted"):
        trained(ClassifierSection(), rare)


@pytest.mark.parametrize("rate", [1e30, 1e38])
def test_training_that_diverges_says_so(rate: float) -> None:
    with pytest.raises(UserError, match=r"loss is not finite after epoch \d+; lower classifier.learning_rate"):
        trained(ClassifierSection(learning_rate=rate, epochs=30), made_trees(40, 50))


# Growth.


@pytest.mark.parametrize("rows", [1, 3])
def test_trees_of_any_classifier_are_those_of_the_slow_twin(rows: int) -> None:
    sizes = set()
    for seed in range(25):
        torch.manual_seed(seed)
        chance = random.Random(seed)
        classifier = C2tClassifier(C2tConfig(hidden=6)).requires_grad_(False)
        classifier.output.weight *= 3
        classifier.hidden.weight[:, 0] *= 20  # P tells siblings apart
        confidence = reference.c2t_confidence(dict(classifier.state_dict()))
        beta, beam = chance.uniform(0.3, 0.7), chance.choice([None, 2, 5])
        policy = C2T(classifier, beta, beam, 3, 4)
        # Where probabilities are tiny, confidences differ by less than float32 holds: no near ties for the beam.
        tables = [Table(100 * seed + row, sharpness=(0.3, 1.0)) for row in range(rows)]
        tree, calls = policy.grow(Scripted(tables), roots(rows))
        for row, table in enumerate(tables):
            expected, expected_calls = reference.c2t_tree(table, confidence, beta, beam, 3, 4, None, 1000)
            assert sorted(paths_of(tree, row)[1:]) == sorted(expected)
            assert calls[row] == expected_calls
            sizes.add(len(expected))
    assert len(sizes) > 5


def test_a_larger_beta_never_verifies_more_nodes() -> None:
    """Per root and without second pruning: what passes a larger beta passes a smaller one, with all above it."""
    different = 0
    for seed in range(60):
        chance = random.Random(seed)
        if seed % 2:
            torch.manual_seed(seed)
            classifier = C2tClassifier(C2tConfig(hidden=8)).requires_grad_(False)
            classifier.output.weight *= chance.uniform(1, 6)
        else:
            classifier = linear_classifier(chance.uniform(-2, 8), chance.uniform(-1, 1), chance.uniform(-1, 1), 0.0)
        table = Table(seed, sharpness=chance.choice([(0.5,), (3.0,), (0.5, 3.0, 6.0)]))
        kept: set[Nodes] | None = None
        for beta in sorted(chance.random() for _ in range(6)):
            tree, _ = C2T(classifier, beta, None, 3, 4).grow(Scripted([table]), roots(1))
            nodes = set(paths_of(tree, 0))
            assert kept is None or nodes <= kept
            different += kept is not None and nodes < kept
            kept = nodes
    assert different > 60


# From recorded answers to a sweep, by the scripts.


@pytest.fixture(scope="module")
def place(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe over a drafter that was taught half of the recorded answers."""
    folder = tmp_path_factory.mktemp("c2t")
    section, tokenizer = TargetSection(model=str(target_dir), dtype="float32"), make_tokenizer()
    target = Target(load_causal_lm(section))
    drafter = taught(target, DraftVocab.full(target.vocab_size), steps=80)
    identity = target_identity(target, section.model, None, tokenizer_fingerprint(tokenizer))
    save_drafter(folder / "run/drafter", drafter, identity, "", {})
    prompts = [*PROMPTS, *([20 + i, 30, 40 + i] for i in range(4))]
    lines = [
        {
            "id": f"c{i}",
            "turns": [{"prompt_token_ids": prompt, "output_token_ids": greedy(target, prompt, 24 + i)}],
            "generator": {"temperature": 0.0},
        }
        for i, prompt in enumerate(prompts)
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {
        "output_dir": str(folder / "run"),
        "target": {"model": str(target_dir), "dtype": "float32", "device": "cpu"},
        "labels": {"answers": str(folder / "answers.jsonl"), "top_k": 4, "draft_calls": 4, "batch_size": 3},
        "classifier": {"epochs": 4, "validation_share": 0.2},
        "eval": {
            "answers": str(folder / "answers.jsonl"),
            "bootstrap_samples": 100,
            "tree": {"draft_calls": 4, "top_k": 4, "nodes": 10},
            "also": [{"name": "lookup", "proposer": "prompt_lookup", "tree": {"policy": "chain", "nodes": 6}}],
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture
def script(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(module: ModuleType, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [module.__name__, str(place / "recipe.yaml"), *arguments])
        capsys.readouterr()
        module.main()
        return capsys.readouterr().out

    return run


def recipe_of(place: Path, *overrides: str) -> Recipe:
    return load_recipe(place / "recipe.yaml", overrides)


def content_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_from_answers_to_a_sweep(place: Path, script: Callable[..., str], tmp_path: Path) -> None:
    rows, out = f"labels.out={tmp_path / 'rows'}", f"classifier.out={tmp_path / 'c2t'}"
    said = script(label_trees, rows, "--plan")
    assert "52 nodes a tree (4 calls, top 4)" in said and "done         nothing yet" in said
    assert "drawn otherwise" not in said
    assert "drawn otherwise (greedy)" in script(label_trees, rows, "eval.temperature=1", "--plan")
    assert not (tmp_path / "rows").exists()
    script(label_trees, rows)
    manifest = read_manifest(tmp_path / "rows")
    assert manifest is not None and manifest.complete
    assert [shard["answers"] for shard in manifest.shards] == [3, 3, 2]
    assert manifest.made_of["drafter"] == words_of(main_contender(recipe_of(place)), None, recipe_of(place).target)
    trees = read_trees(tmp_path / "rows", manifest)
    assert (trees.rows, trees.count) == (manifest.total("rows"), manifest.total("trees"))
    assert trees.rows + manifest.total("dropped_beyond") == 52 * trees.count
    assert int(trees.accepted.sum()) == manifest.total("accepted") > 20
    assert trees.answer.unique().tolist() == list(range(8))
    assert int(trees.d.min()) == 0 and int(trees.d.max()) == 3

    # The rounds are those of decoding with the uncut tree.
    lineup = Lineup(recipe_of(place).target)
    proposer = PolicyProposer(lineup.drafting(main_contender(recipe_of(place))), Eagle2(53, 4, 4))
    _, answers = labelling.answers_to_label(recipe_of(place))
    replayed = replay(lineup.target, proposer, answers, 3)
    in_rounds = [g.accepted_per_round for g in replayed]
    per_tree = [int(part.sum()) for part in trees.accepted.split(trees.starts.diff().tolist())]
    per_answer = [[n for n, a in zip(per_tree, trees.answer.tolist(), strict=True) if a == i] for i in range(8)]
    assert per_answer == in_rounds

    said = script(c2t, rows, out, "--plan")
    assert f"of {trees.count:,} trees" in said and not (tmp_path / "c2t").exists()
    script(c2t, rows, out)
    assert sorted(content_of(tmp_path / "c2t")) == [
        *("config.json", "metrics.jsonl", "model.safetensors", "provenance.json", "recipe.yaml")
    ]
    config, _ = read_config(tmp_path / "c2t")
    assert config == C2tConfig(48, 1000, 10.0, manifest.made_of["drafter"])
    assert len((tmp_path / "c2t/metrics.jsonl").read_text().splitlines()) == 4
    first = content_of(tmp_path / "c2t")
    script(c2t, rows, out)
    assert content_of(tmp_path / "c2t") == first

    script(
        c2t,
        rows,
        f"classifier.out={tmp_path / 'again'}",
        f"classifier.init_from={tmp_path / 'c2t'}",
        "classifier.share=1",
    )
    assert read_config(tmp_path / "again")[0] == config
    with pytest.raises(UserError, match=r"hidden: 12, but the classifier in .* has 48; set classifier.hidden=48"):
        script(c2t, rows, out, f"classifier.init_from={tmp_path / 'c2t'}", "classifier.hidden=12")

    settings = out, f"eval.out={tmp_path / 'eval'}", "--betas", "0.02", "0.5", "0.3", "--nodes", "4", "9"
    script(c2t_sweep, *settings, "--plan")
    assert not (tmp_path / "eval").exists()
    said = script(c2t_sweep, *settings, "--beams", "2:0.01,0.5,0.3", "all")
    found = json.loads((tmp_path / "eval/c2t_sweep.json").read_text())
    assert (tmp_path / "eval/c2t_sweep.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "eval").iterdir())) == 2
    assert [(row["curve"], row["value"]) for row in found["points"]] == [
        *(("c2t, beam 2", beta) for beta in (0.5, 0.3, 0.01)),
        *(("c2t, beam all", beta) for beta in (0.5, 0.3, 0.02)),
        *(("eagle2", nodes) for nodes in (4, 9)),
    ]
    eagle2 = replay(
        lineup.target, PolicyProposer(lineup.drafting(main_contender(recipe_of(place))), Eagle2(9, 4, 4)), answers, 3
    )
    rounds = sum(g.rounds for g in eagle2)
    row = found["points"][-1]
    assert row["candidates"] == 9 * rounds
    assert row["tau"] == round(sum(len(g.token_ids) - 1 for g in eagle2) / rounds, 4)
    assert f"{row['candidates']:,}" in said


def test_answers_come_from_validation_conversations_by_default(place: Path, tmp_path: Path) -> None:
    answers = (place / "answers.jsonl").read_text().splitlines()
    (tmp_path / "conversations.jsonl").write_text("".join(line + "\n" for line in answers))
    here = recipe_of(place, "labels.answers=null", f"output_dir={tmp_path}")
    recording, chosen = labelling.answers_to_label(here)
    assert len(chosen) == 1 and not recording.note  # a fifth of the eight at most
    none = recipe_of(place, "labels.answers=null", f"output_dir={tmp_path}", "train.validation_conversations=0")
    recording, chosen = labelling.answers_to_label(none)
    assert len(chosen) == 8 and "is surer of these answers" in recording.note
    with pytest.raises(UserError, match=r"labels\.answers: not given, and there are no conversations"):
        labelling.answers_to_label(recipe_of(place, "labels.answers=null", "output_dir=/nowhere"))


def test_max_rows_ends_with_a_whole_answer_and_more_go_on_behind_it(
    place: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    script(label_trees, f"labels.out={tmp_path / 'all'}")
    out = f"labels.out={tmp_path / 'some'}"
    whole = read_manifest(tmp_path / "all")
    assert whole is not None
    trees = read_trees(tmp_path / "all", whole)
    per_answer = [int((trees.answer.repeat_interleave(trees.starts.diff()) == i).sum()) for i in range(8)]
    most = sum(per_answer[:4]) - 5
    script(label_trees, out, f"labels.max_rows={most}")
    some = read_manifest(tmp_path / "some")
    assert some is not None and some.complete
    assert [shard["answers"] for shard in some.shards] == [3, 1]
    assert some.total("rows") == sum(per_answer[:4])
    assert "all is labelled" in script(label_trees, out, f"labels.max_rows={most}")
    first = (tmp_path / "some/shard-00000.safetensors").stat().st_mtime_ns
    assert "3 of 8 answers are done, going on" in script(label_trees, out)  # the cut batch is made whole
    assert content_of(tmp_path / "some") == content_of(tmp_path / "all")
    assert (tmp_path / "some/shard-00000.safetensors").stat().st_mtime_ns == first
    assert "all is labelled" in script(label_trees, out)


def test_rows_that_were_made_otherwise_are_not_gone_on_with(
    place: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    out = f"labels.out={tmp_path / 'rows'}"
    script(label_trees, out)
    for override, told in {
        "labels.top_k=3": "top_k: 4 there, 3 now",
        "labels.draft_calls=2": "draft_calls: 4 there, 2 now",
        "labels.entropy_over=9": "entropy_over: 1000 there, 9 now",
        "target.dtype=bfloat16": "target.dtype: 'float32' there, 'bfloat16' now",
        "data.max_length=100": "",  # says nothing of the rows
    }.items():
        if told:
            with pytest.raises(UserError, match=told):
                script(label_trees, out, override)
        else:
            assert "all is labelled" in script(label_trees, out, override)
    (tmp_path / "rows/shard-00001.safetensors").write_bytes(b"")
    before = content_of(tmp_path / "rows")
    assert "shard 1 is missing or damaged; labelling goes on from there" in script(label_trees, out)
    after = content_of(tmp_path / "rows")
    assert len(after["shard-00001.safetensors"]) > 0
    assert after["manifest.json"] == before["manifest.json"]


def test_who_can_be_labelled(place: Path) -> None:
    recipe = recipe_of(place)
    with pytest.raises(UserError, match=r"nobody is called 'x'; there are .*'lookup'"):
        labelling.labelled_contender(recipe, "x")
    with pytest.raises(UserError, match="prompt lookup copies"):
        labelling.labelled_contender(recipe, "lookup")
    (place / "file").touch()
    with pytest.raises(UserError) as error:
        labelling.check_place(recipe_of(place, "labels.draft_calls=600", f"labels.out={place / 'file'}"))
    assert "labels.out: " in error.value.problems[0] and "is a file; name a folder" in error.value.problems[0]
    assert error.value.problems[1].startswith("labels.draft_calls: 600 draft calls deep, in a target of ")
    with pytest.raises(UserError, match=r"labels.out: .*cannot be made: .*file is a file"):
        labelling.check_place(recipe_of(place, f"labels.out={place / 'file/x'}"))
    assert len(batches_of([RecordedAnswer([1], [2])] * 7, 3)) == 3


def test_a_classifier_for_another_drafter_is_refused(place: Path, tmp_path: Path) -> None:
    recipe = recipe_of(place)
    mine = words_of(main_contender(recipe), None, recipe.target)
    assert mine["kind"] == "eagle3" and len(mine["weights_sha256"]) == 64

    def check(words: dict[str, Any], *overrides: str) -> None:
        C2tClassifier(C2tConfig(drafter=words)).save(tmp_path / "c2t")
        tree = f"eval.tree={{policy: c2t, c2t: {{classifier: {tmp_path / 'c2t'}}}}}"
        contender = main_contender(recipe_of(place, tree, *overrides))
        check_contenders(recipe, [contender])
        Lineup(recipe.target).proposer(contender)

    check(mine)
    check({})  # nobody knows
    check({"hidden_size": 64})
    check(mine | {"directory": "moved"})
    for words, told in (
        ({"kind": "poss"}, "kind: 'poss' there, 'eagle3' here"),
        ({"weights_sha256": "0" * 64}, "weights_sha256: '0000000000000000' there"),
        ({"vocab_size": 64}, "vocab_size: 64 there, None here"),
        ({"kind": "causal_lm", "model": "x"}, "kind: 'causal_lm' there"),
    ):
        with pytest.raises(
            UserError, match=r"eval.tree.c2t.classifier: .*a classifier for another drafter.*init_from"
        ) as e:
            check(mine | words)
        assert told in str(e.value)
    contender = main_contender(recipe_of(place, f"eval.tree={{policy: c2t, c2t: {{classifier: {tmp_path / 'c2t'}}}}}"))
    with pytest.raises(UserError, match="a classifier for another drafter"):  # the Python API checks no contenders
        Lineup(recipe.target).proposer(contender)
    moved = replace(contender, drafter=tmp_path / "moved")
    shutil.copytree(place / "run/drafter", tmp_path / "moved")
    C2tClassifier(C2tConfig(drafter=mine)).save(tmp_path / "c2t")
    check_contenders(recipe, [moved])


def test_a_folder_that_is_no_classifier_is_not_replaced(
    place: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    write_trees(tmp_path / "rows", [made_trees(30, 40)])
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/one.txt").write_text("dear")
    for out in (tmp_path / "letters", place / "run/drafter"):
        with pytest.raises(UserError, match="holds something that is no classifier"):
            script(c2t, f"classifier.rows={tmp_path / 'rows'}", f"classifier.out={out}")
    assert (tmp_path / "letters/one.txt").exists()


def test_nothing_that_lies_in_a_classifier_s_folder_is_replaced_with_it(
    place: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    out = tmp_path / "c2t"
    C2tClassifier(C2tConfig()).save(out)
    write_trees(out / "trees", [made_trees(30, 40)])
    write_trees(tmp_path / "rows", [made_trees(30, 40)])
    before = content_of(out / "trees")
    settings = f"classifier.out={out}", "classifier.epochs=1"
    for place_of in ("classifier.rows", "labels.out", "eval.out", "output_dir"):
        with pytest.raises(UserError, match=rf"{place_of} \(.*trees\) lies in .*c2t, which is replaced"):
            script(c2t, *settings, f"classifier.rows={tmp_path / 'rows'}", f"{place_of}={out / 'trees'}")
    with pytest.raises(UserError, match=r"holds more than a classifier \(trees\)"):
        script(c2t, *settings, f"classifier.rows={tmp_path / 'rows'}")
    assert content_of(out / "trees") == before
    shutil.rmtree(out / "trees")
    script(c2t, *settings, f"classifier.rows={tmp_path / 'rows'}")
    script(c2t, *settings, f"classifier.rows={tmp_path / 'rows'}")  # its own files are no strangers


def test_a_classifier_that_lets_nothing_pass_says_so(script: Callable[..., str], tmp_path: Path) -> None:
    write_trees(tmp_path / "rows", [made_trees(30, 40)])
    here = f"classifier.rows={tmp_path / 'rows'}", f"classifier.out={tmp_path / 'c2t'}"
    said = script(c2t, *here, "classifier.epochs=1", "classifier.batch_size=16", "classifier.negative_ratio=null")
    assert "recall 0.0000" in said and "note: no accepted node" in said
    said = script(c2t, *here, "classifier.epochs=100", "classifier.learning_rate=0.01")
    assert "recall 0.0000" not in said and "note: no accepted node" not in said


def test_a_classifier_s_mistakes_are_told_at_once_and_before_training(
    place: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    write_trees(tmp_path / "rows", [made_trees(30, 40)])
    rows = f"classifier.rows={tmp_path / 'rows'}"
    for plan in ((), ("--plan",)):
        with pytest.raises(UserError) as error:
            init = f"classifier.init_from={tmp_path / 'nowhere'}"
            script(c2t, "classifier.rows=/nowhere", init, f"classifier.out={tmp_path / 'file'}", *plan)
        for problem, told in zip(
            error.value.problems, ("no C2T classifier here", "no labelled trees here", "is a file; name"), strict=True
        ):
            assert told in problem
        with pytest.raises(UserError, match=r"classifier.out: .*cannot be made: .*file is a file"):
            script(c2t, rows, f"classifier.out={tmp_path / 'file/c2t'}", *plan)
        C2tClassifier(C2tConfig()).save(tmp_path / "old")
        (tmp_path / "old/model.safetensors").write_bytes(b"123")
        with pytest.raises(UserError, match="not a readable safetensors file"):
            script(c2t, rows, f"classifier.init_from={tmp_path / 'old'}", f"classifier.out={tmp_path / 'new'}", *plan)
    assert not (tmp_path / "new").exists()


def counts_of(path: Path, target_dir: Path, favoured: int) -> Path:
    """Token counts of the target's tokenizer, by which the tokens from `favoured` on are the most frequent."""
    vocab_size = load_config(TargetSection(model=str(target_dir))).vocab_size
    counts = torch.arange(vocab_size, 0, -1).roll(favoured)
    save_token_counts(path, counts, tokenizer_fingerprint(make_tokenizer()), [2])
    return path


def test_a_cut_by_another_ranking_is_another_drafter(
    place: Path, target_dir: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    ranked = [counts_of(tmp_path / f"{i}.safetensors", target_dir, 40 * i) for i in range(2)]
    same = tmp_path / "same.safetensors"
    save_token_counts(same, 3 * load_token_counts(ranked[0])[0], tokenizer_fingerprint(make_tokenizer()), [2])
    out, cut = f"labels.out={tmp_path / 'rows'}", "eval.tree.vocab_size=64"
    script(label_trees, out, cut, f"eval.token_counts={ranked[0]}", "labels.max_rows=300")
    with pytest.raises(UserError, match=r"drafter.vocab_sha256: .* there, .* now"):
        script(label_trees, out, cut, f"eval.token_counts={ranked[1]}")
    script(label_trees, out, cut, f"eval.token_counts={same}")  # other counts, the same tokens
    manifest = read_manifest(tmp_path / "rows")
    assert manifest is not None and manifest.complete
    C2tClassifier(C2tConfig(drafter=manifest.made_of["drafter"])).save(tmp_path / "c2t")
    keys = f"policy: c2t, vocab_size: 64, c2t: {{classifier: {tmp_path / 'c2t'}}}"

    def check(counts: Path, *through: str) -> None:
        recipe = recipe_of(place, f"eval.tree={{{keys}}}", f"eval.token_counts={counts}")
        if "python" in through:
            Lineup(recipe.target).proposer(main_contender(recipe))
        else:
            check_contenders(recipe, [main_contender(recipe)])

    for through in ((), ("python",)):
        check(ranked[0], *through)
        check(same, *through)
        with pytest.raises(UserError, match=r"another drafter .vocab_sha256: "):
            check(ranked[1], *through)


def small_lm(model: Path, name: str = "small") -> str:
    return f"eval.also=[{{name: {name}, proposer: causal_lm, draft_model: {{model: {model}}}}}]"


def test_a_causal_lm_is_known_by_its_weights(
    place: Path, target_dir: Path, script: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labelled, trained on and swept; the same folder by another path goes on, other weights do not."""
    model = tmp_path / "small"
    shutil.copytree(target_dir, model)
    shutil.copytree(target_dir, tmp_path / "copy")
    settings = f"labels.out={tmp_path / 'rows'}", f"classifier.out={tmp_path / 'c2t'}", "--contender", "small"
    script(label_trees, *settings, small_lm(model), "labels.max_rows=300")
    monkeypatch.chdir(tmp_path)
    for path in (Path("small"), tmp_path / "copy"):
        script(label_trees, *settings, small_lm(path))
        assert "all is labelled" in script(label_trees, *settings, small_lm(path))
    script(c2t, *settings[:2])
    sweep = f"eval.out={tmp_path / 'eval'}", "--betas", "0.3", "0.3000001", "--nodes", "4", "9"
    said = script(c2t_sweep, *settings[1:], small_lm(tmp_path / "copy"), *sweep)
    found = json.loads((tmp_path / "eval/c2t_sweep.json").read_text())
    assert found["drafter"] == str(tmp_path / "copy") and "0.3000001" in said
    assert [row["value"] for row in found["points"]] == [0.3000001, 0.3, 4, 9]
    assert found["points"][-1]["tau"] > 1.5  # a copy of the target is often right
    with pytest.raises(UserError, match=r"another drafter \(kind: 'causal_lm' there, 'eagle3' here"):
        script(c2t_sweep, settings[1], *sweep)

    weights = tmp_path / "copy/model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor + 0.01 for name, tensor in tensors.items()}, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"drafter.weights_sha256: .* there, .* now"):
        script(label_trees, *settings, small_lm(tmp_path / "copy"))
    with pytest.raises(UserError, match=r"another drafter .weights_sha256: "):
        script(c2t_sweep, *settings[1:], small_lm(tmp_path / "copy"), *sweep)
    for name in ("x", "lookup"):
        with pytest.raises(UserError, match=r"--contender: (nobody is called 'x'|prompt lookup copies)"):
            script(c2t_sweep, "--contender", name, settings[1], *sweep)


def test_weights_are_sampled_from_the_first_byte_to_the_last(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path, size = tmp_path / "model.safetensors", models_c2t.SAMPLED_BLOCKS * models_c2t.BLOCK_BYTES

    def digest(content: bytes) -> str:
        path.write_bytes(content)
        models_c2t._sampled_digest.cache_clear()
        return weights_digest(tmp_path)

    for length in (0, 1, 5000, size // 64 + 7, size):  # these are read whole
        content = bytearray(length)
        seen = {digest(bytes(content))}
        for at in {0, length // 2, length - 1, 4095, 4096} & set(range(length)):
            content[at] = 1
            seen.add(digest(bytes(content)))
            content[at] = 0
        assert len(seen) == 1 + len({0, length // 2, length - 1, 4095, 4096} & set(range(length)))
    large = bytearray(3 * size)
    before = digest(bytes(large))
    large[-1] = 1
    assert digest(bytes(large)) != before
    (tmp_path / "other.safetensors").write_bytes(b"")
    assert weights_digest(tmp_path) != digest(bytes(large[:-1]))
    before = weights_digest(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert weights_digest(tmp_path) != before


def test_a_hub_model_is_known_by_name_and_revision() -> None:
    def words(model: str, revision: str | None, target: str = "org/large") -> dict[str, Any]:
        return drafter_words(None, TargetSection(model=model, revision=revision), None, TargetSection(model=target))

    mine = words("org/small", "a")
    assert unequal_words(mine, words("org/small", "a")) == []
    assert unequal_words(mine, words("org/small", "b")) == ["revision"]
    assert unequal_words(words("org/other", "a"), mine) == ["model"]
    assert unequal_words(mine, words("org/small", "a", "org/larger")) == ["target"]  # where acceptance is another one


def test_a_local_target_is_known_by_its_weights(place: Path, tmp_path: Path) -> None:
    def words(target: Path) -> dict[str, Any]:
        return drafter_words(None, TargetSection(model="org/small"), None, TargetSection(model=str(target)))

    own = Path(recipe_of(place).target.model)
    shutil.copytree(own, tmp_path / "moved")
    assert unequal_words(words(own), words(tmp_path / "moved")) == []
    weights = tmp_path / "moved/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\x01\x02\x03\x04")
    assert unequal_words(words(own), words(tmp_path / "moved")) == ["target"]


def test_a_drafter_of_nan_is_told_after_the_first_shard(
    place: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    shutil.copytree(place / "run/drafter", tmp_path / "drafter")
    weights = tmp_path / "drafter/model.safetensors"
    tensors, words = load_file(weights), {}
    with safe_open(weights, framework="pt") as file:
        words = file.metadata()
    broken = {name: t.fill_(math.nan) if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(broken, weights, metadata=words)
    with pytest.raises(UserError, match=r"drafter: all [\d,]+ nodes drafted along 3 answers have NaN") as error:
        script(label_trees, f"labels.out={tmp_path / 'rows'}", f"eval.drafter={tmp_path / 'drafter'}")
    assert str(tmp_path / "drafter") in str(error.value)
    assert not list((tmp_path / "rows").iterdir())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "eagle3"])
def test_every_kind_of_drafter_is_labelled_as_it_drafts(kind: str) -> None:
    """Rounds of replay, and P and H of the accepted nodes from distributions that are drafted along the path alone."""
    target, drafter = pair_of_kind(kind, "llama")
    section, depth = LabelSection(top_k=4, draft_calls=4, entropy_over=20), 4
    answers = [RecordedAnswer(prompt, greedy(target, prompt, 24)) for prompt in PROMPTS[:3]]
    drafting = FeatureDrafting(drafter)
    states = read_states(target, answers, drafting.capture_layers, Agreement.of(target))
    found = label(drafting, answers, states, target.config.max_position_embeddings, section)
    replayed = replay(target, PolicyProposer(FeatureDrafting(drafter), Eagle2(10**4, depth, 4)), answers, 3)
    taken = [[int(said.sum()) for said in labelled.accepted] for labelled in found]
    assert taken == [generation.accepted_per_round for generation in replayed]
    assert sum(map(sum, taken)) > 20

    for answer, labelled, counts in zip(answers, found, taken, strict=True):
        alone = FeatureDrafting(drafter)
        states = read_states(target, [answer], alone.capture_layers, Agreement.of(target))
        path = AlongTheAnswer(answer, counts, section.entropy_over)
        verifier = RecordedVerifier([answer], states, target.config.max_position_embeddings, torch.device("cpu"))
        run_rounds(verifier, PolicyProposer(alone, path), [answer.prompt], (), [len(answer.tokens)])
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


# Kills.

BEHIND_SCRIPTS = (labelling.__name__, classifier_training.__name__)  # they import slowly
LABEL, TRAIN = label_trees.__name__, c2t.__name__


@pytest.fixture(scope="module")
def lab() -> Iterator[CrashLab]:
    if not CAN_FORK:
        pytest.skip("kills forked processes")
    with CrashLab(
        [
            LABEL,
            TRAIN,
            "draftsmith.data_gen.trees.labelling",
            "draftsmith.train.run.classifier",
            "transformers.models.llama.modeling_llama",
        ]
    ) as lab:
        yield lab


@pytest.mark.slow
def test_labelling_goes_on_after_a_kill_at_any_moment(place: Path, lab: CrashLab, tmp_path: Path) -> None:
    def run(directory: Path, **how: Any) -> Any:
        return lab.run(LABEL, [str(place / "recipe.yaml"), f"labels.out={directory}"], **how)

    whole = run(tmp_path / "whole", count_events=True)
    assert whole.status == 0, whole.output
    assert whole.events["rename"] == 6
    expected = content_of(tmp_path / "whole")
    faults = [Fault("rename", n) for n in range(1, 7)] + [Fault("fsync", n) for n in (1, 3, 7)]
    faults += [Fault("write", n, 0.4) for n in range(1, 1 + whole.events["write"])]
    for number, fault in enumerate(faults):
        directory = tmp_path / f"killed {number}"
        assert run(directory, fault=fault).status == -signal.SIGKILL
        done = read_manifest(directory)
        shards = (
            {shard["file"]: (directory / shard["file"]).stat().st_mtime_ns for shard in done.shards} if done else {}
        )
        ending = run(directory)
        assert ending.status == 0, ending.output
        assert content_of(directory) == expected
        assert all((directory / name).stat().st_mtime_ns == changed for name, changed in shards.items())
    directory = tmp_path / "by the clock"
    for share in (0.5, 0.7, 0.8, 0.9):
        run(directory, kill_after=share * whole.seconds)
    assert run(directory).status == 0
    assert content_of(directory) == expected


def test_a_kill_leaves_the_old_classifier_or_the_new_one(place: Path, lab: CrashLab, tmp_path: Path) -> None:
    write_trees(tmp_path / "rows", [made_trees(30, 40)])

    def run(directory: Path, seed: int, **how: Any) -> Any:
        settings = f"classifier.rows={tmp_path / 'rows'}", f"classifier.out={directory}", f"classifier.seed={seed}"
        return lab.run(TRAIN, [str(place / "recipe.yaml"), *settings], **how)

    def weights(directory: Path) -> torch.Tensor:
        return C2tClassifier.load(directory).output.weight

    for seed in (0, 1):
        assert run(tmp_path / f"seed {seed}", seed).status == 0
    old, new = (weights(tmp_path / f"seed {seed}") for seed in (0, 1))
    assert not torch.equal(old, new)
    whole = run(tmp_path / "seed 0", 0, count_events=True)  # a folder that is there, as below
    shutil.copytree(tmp_path / "seed 0", tmp_path / "before")
    events = {kind: count for kind, count in whole.events.items() if kind in ("rename", "fsync", "write", "mkdir")}
    assert events["rename"] >= 1 and events["fsync"] >= 5
    seen = set()
    for kind, count in {**events, "rename": 2}.items():
        for number in range(1, count + 1):
            directory = tmp_path / "killed"
            for leftover in tmp_path.glob("killed*"):
                shutil.rmtree(leftover)
            shutil.copytree(tmp_path / "before", directory)
            assert run(directory, 1, fault=Fault(kind, number)).status == -signal.SIGKILL
            found = weights(directory)
            assert torch.equal(found, old) or torch.equal(found, new)
            seen.add(torch.equal(found, new))
            assert run(directory, 1).status == 0
            assert torch.equal(weights(directory), new)
            assert not list(tmp_path.glob("killed.*"))
    assert seen == {True, False}


class Killed(BaseException):
    """In a kill's place: nothing of ours catches it."""


@contextmanager
def killed_at(number: int) -> Iterator[None]:
    """Whoever writes dies before its `number`-th (from 1) deed among renames, deletions, new folders and new files."""
    deeds = 0

    def counted(deed: Callable[..., Any]) -> Callable[..., Any]:
        def do(*arguments: Any, **settings: Any) -> Any:
            nonlocal deeds
            deeds += 1
            if deeds == number:
                raise Killed
            return deed(*arguments, **settings)

        return do

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", counted(os.replace))
        patch.setattr(checkpoint.shutil, "rmtree", counted(shutil.rmtree))
        patch.setattr(Path, "mkdir", counted(Path.mkdir))
        patch.setattr(Path, "write_text", counted(Path.write_text))
        yield


def write_version(directory: Path, version: str) -> None:
    with checkpoint.replaced(directory, ("a", "b")) as partial:
        (partial / "a").write_text(version)
        (partial / "b").write_text(version)


def version_of(directory: Path) -> str:
    folder = checkpoint.written(directory)
    (version,) = {(folder / name).read_text() for name in ("a", "b")}
    return version


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_is_whole_and_a_stranger_s_files_are_kept_whatever_was_killed(link: bool, tmp_path: Path) -> None:
    """Two saves in a row, each killed at every deed: the second one begins where the first one left off."""
    seen, states = set(), set()
    for first in range(1, 30):
        for second in range(1, 30):
            root = tmp_path / f"{first} {second}"
            directory = real = root / "it"
            if link:
                (root / "elsewhere").mkdir(parents=True)
                real = root / "elsewhere/it"
                directory.symlink_to(real)
            write_version(directory, "0")
            (real / "notes").mkdir()
            (real / "notes/mine.txt").write_text("dear")
            (real / "left.txt").write_text("self")

            def kill(number: int, version: str, directory: Path = directory) -> bool:
                try:
                    with killed_at(number):
                        write_version(directory, version)
                except Killed:
                    return True
                return False

            one = kill(first, "1")
            states.add(tuple(sorted(path.name for path in real.parent.iterdir() if path != directory or not link)))
            found = version_of(directory)
            assert found in "01"
            two = kill(second, "2")
            assert version_of(directory) in {found, "2"}
            seen.add((found, version_of(directory)))
            write_version(directory, "3")
            assert version_of(directory) == "3"
            assert {path.name for path in real.iterdir()} == {"a", "b", "notes", "left.txt"}
            assert (real / "notes/mine.txt").read_text() == "dear"
            assert [path for path in real.parent.iterdir() if path != directory] == ([real] if link else [])
            assert directory.is_symlink() == link
            if not two:
                break
        if not one:
            break
    assert seen == {("0", "0"), ("0", "2"), ("1", "1"), ("1", "2")}
    assert ("it.partial", "it.replaced") in states  # neither stands in its place


def test_a_folder_that_is_all_that_is_left_is_put_back_and_nothing_of_equal_name_is_lost(tmp_path: Path) -> None:
    write_version(tmp_path / "it", "0")
    (tmp_path / "it").rename(tmp_path / "it.replaced")
    with pytest.raises(Killed), killed_at(2):  # the first deed puts it back
        write_version(tmp_path / "it", "1")
    assert version_of(tmp_path / "it") == "0"
    for folder in ("it", "it.replaced"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "notes").write_text(folder)
    with pytest.raises(UserError, match="only one can be kept"):
        write_version(tmp_path / "it", "1")
    assert (tmp_path / "it.replaced/notes").read_text() == "it.replaced"
    (tmp_path / "file").write_text("dear")
    with pytest.raises(UserError, match="is a file; move it away"):
        write_version(tmp_path / "file", "1")
    assert (tmp_path / "file").read_text() == "dear"


def test_classifier_and_drafter_keep_what_is_not_theirs(place: Path, tmp_path: Path) -> None:
    recipe = recipe_of(place)
    lineup = Lineup(recipe.target)
    drafter = lineup.drafter(place / "run/drafter")
    writers: list[Callable[[], None]] = [
        lambda: C2tClassifier(C2tConfig()).save(tmp_path / "c2t", {"metrics.jsonl": ""}),
        lambda: save_drafter(tmp_path / "drafter", drafter, lineup.identity, "", {}),
    ]
    for name, write in zip(("c2t", "drafter"), writers, strict=True):
        write()
        own = set(content_of(tmp_path / name))
        (tmp_path / name / "README.md").write_text("dear")
        write()
        assert set(content_of(tmp_path / name)) == own | {"README.md"}
    C2tClassifier(C2tConfig()).save(tmp_path / "c2t")  # losses of another one do not stand beside it
    assert set(content_of(tmp_path / "c2t")) == {"config.json", "model.safetensors", "README.md"}


# The sweep's numbers.


def rounds_of(chance: random.Random, tokens: int, tau: float, nodes: int) -> Generation:
    accepted = []
    while sum(accepted) + len(accepted) < tokens - 1:
        accepted.append(min(int(chance.expovariate(1 / (tau - 1))), tokens - 2 - sum(accepted) - len(accepted)))
    trees = [chance.randint(1, 2 * nodes) for _ in accepted]
    return Generation([1], list(range(tokens)), accepted, False, trees, [3] * len(accepted))


def test_a_share_is_what_the_curve_needs_for_the_same_tau(place: Path, tmp_path: Path) -> None:
    C2tClassifier(C2tConfig()).save(tmp_path)
    recipe = recipe_of(place, f"classifier.out={tmp_path}")
    points = points_of(recipe, (0.2, 0.5, 0.8), (4, 9, 20))
    assert [(point.curve, point.value) for point in points] == [
        *(("c2t", beta) for beta in (0.8, 0.5, 0.2)),
        *(("eagle2", nodes) for nodes in (4, 9, 20)),
    ]
    assert {(p.contender.tree.width, p.contender.tree.calls) for p in points} == {(4, 4)}
    chance = random.Random(0)
    shapes = {"c2t 0.8": (2.0, 5), "c2t 0.5": (2.6, 9), "c2t 0.2": (3.4, 30)}
    shapes |= {"eagle2 4": (1.5, 3), "eagle2 9": (2.3, 12), "eagle2 20": (3.0, 40)}
    found = {name: [rounds_of(chance, 40, *shape) for _ in range(60)] for name, shape in shapes.items()}
    numbers = sweep_numbers(points, found, 200, 0)

    def total(name: str) -> tuple[float, float]:
        rounds = sum(g.rounds for g in found[name])
        return sum(len(g.token_ids) - 1 for g in found[name]) / rounds, sum(sum(g.tree_nodes) for g in found[name])

    for row, name in zip(numbers["points"], shapes, strict=True):
        tau, candidates = total(name)
        assert (row["tau"], row["candidates"]) == (pytest.approx(tau, abs=1e-4), candidates)
        assert row["tau_interval"][0] < tau < row["tau_interval"][1]
    curve = sorted((tau, math.log(candidates)) for tau, candidates in (total(f"c2t {b}") for b in (0.8, 0.5, 0.2)))
    for row, name in zip(numbers["at_equal_tau"], ("eagle2 4", "eagle2 9", "eagle2 20"), strict=True):
        tau, candidates = total(name)
        if tau < curve[0][0]:  # nothing was measured there
            assert row["share"] is None and row["share_interval"] is None and row["candidates"] is None
            assert row["beyond"] == "below"
            assert row["share_at_end"] == pytest.approx(math.exp(curve[0][1]) / candidates, abs=1e-4)
            continue
        needed = math.exp(reference.on_a_line(curve, tau))
        assert row["share"] == pytest.approx(needed / candidates, abs=1e-4)
        assert row["share_interval"][0] < row["share"] < row["share_interval"][1]
        assert row["beyond"] is None and row["share_at_end"] is None
    assert [row["share"] is None for row in numbers["at_equal_tau"]] == [True, False, False]


def test_a_sweep_s_settings_are_checked_and_the_recipe_s_own_tree_counts(place: Path, tmp_path: Path) -> None:
    C2tClassifier(C2tConfig(entropy_over=70)).save(tmp_path)
    recipe = recipe_of(place, f"classifier.out={tmp_path}")
    with pytest.raises(UserError) as error:
        points_of(recipe, (0.5,), (2, 4000), [(0, None)])
    assert [problem.split(":")[0] for problem in error.value.problems] == ["--betas", "--beams", "--nodes"]
    for text in ("wide", "15:0.1,", "all:x"):
        with pytest.raises(argparse.ArgumentTypeError, match="give K2 or all"):
            c2t_sweep._beam(text)
    with pytest.raises(UserError, match="from 0 to 1"):
        points_of(recipe, (0.5, 1.2), (4, 9))
    with pytest.raises(UserError, match="no C2T classifier here"):
        points_of(recipe_of(place, "classifier.out=/nowhere"), (0.2, 0.5), (4, 9))
    c2t_keys = f"c2t: {{classifier: {tmp_path}, beam: 7, entropy_over: 70}}"
    own = f"eval.tree={{policy: c2t, nodes: 30, draft_calls: 3, {c2t_keys}}}"
    point: Point = points_of(recipe_of(place, own), (0.2, 0.5), (4, 9))[0]
    tree = point.contender.tree
    assert (tree.nodes, tree.calls, tree.width, tree.c2t.beam, tree.c2t.beta) == (30, 3, 15, 7, 0.5)
    assert tree.c2t.entropy_over == 70
    assert points_of(recipe, (0.2, 0.5), (4, 9))[0].contender.tree.nodes is None
    small = recipe_of(place, f"classifier.out={tmp_path}", "eval.tree={policy: eagle2, draft_calls: 5, top_k: 4}")
    usual = [point.value for point in points_of(small, (0.2, 0.5)) if point.curve == "eagle2"]
    assert usual == [4, 8, 16, 24, 32, 48, 60]  # as far as the 1 + 4 + 4 * 16 nodes that are proposed
