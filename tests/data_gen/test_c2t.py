"""Labels of C2T: rows of uncut trees against a slow twin, the folder that holds them, and the scripts to acceptance."""

import json
import math
import random
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from draftsmith.data_gen import label_trees
from draftsmith.data_gen.c2t_labels import labelling
from draftsmith.data_gen.c2t_labels.labelled_trees import Trees
from draftsmith.data_gen.c2t_labels.labelling import Labelled, label
from draftsmith.eval import acceptance
from draftsmith.eval.decoding.contenders import (
    check_contenders,
    drafter_identity,
    loaded_drafting,
    loaded_identity,
    loaded_proposer,
    main_contender,
)
from draftsmith.eval.replay.recorded_answers import RecordedAnswer
from draftsmith.models.c2t import C2tClassifier, C2tConfig, read_c2t_config
from draftsmith.models.checkpoint import save_drafter
from draftsmith.models.draft_tree import Committed
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.recipes.sections.train import LabelSection
from draftsmith.train import c2t
from tests import reference
from tests.crash_states import state_of
from tests.evaluation_cases import write_lines
from tests.pairs import PROMPTS, greedy, pair_of
from tests.scripted_drafting import VOCAB, Nodes, Scripted, Table, unasked_target
from tests.training_runs import run_main, write_recipe


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
    sizes = torch.tensor([*map(len, accepted)])
    return Trees(torch.cat(features), torch.cat(accepted), sizes, {"drafter": {"proposer": "toy"}})


@pytest.fixture(scope="session")
def place(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe over a drafter that was taught half of the recorded answers."""
    folder = tmp_path_factory.mktemp("c2t")
    section = TargetSection(model=str(target_dir), dtype="float32")
    target = Target(TargetFiles(section).load_model("cpu"))
    _, drafter = pair_of("llama", None)  # of the same weights
    identity = TargetFiles(section).identity_of(target)
    save_drafter(folder / "run/drafter", drafter, identity, "", {})
    lines = []
    for i, prompt in enumerate([*PROMPTS, *([20 + i, 30, 40 + i] for i in range(4))]):
        turn = {"prompt_token_ids": prompt, "output_token_ids": greedy(target, prompt, 24 + i)}
        lines.append({"id": f"c{i}", "turns": [turn], "generator": {"temperature": 0.0}})
    answers = str(write_lines(folder / "answers.jsonl", *lines))
    write_recipe(
        folder,
        target_dir,
        drafter={},
        labels={"answers": answers, "top_k": 4, "draft_calls": 4, "batch_size": 3},
        classifier={"epochs": 4, "validation_share": 0.2},
        eval={
            "answers": answers,
            "tree": {"draft_calls": 4, "top_k": 4, "nodes": 10},
            "also": [{"name": "lookup", "proposer": "prompt_lookup", "tree": {"policy": "chain", "nodes": 6}}],
        },
    )
    return folder


@pytest.fixture
def script(place: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(module: ModuleType, *arguments: str) -> str:
        capsys.readouterr()
        run_main(module, place / "recipe.yaml", *arguments)
        return capsys.readouterr().out

    return run


def recipe_of(place: Path, *overrides: str) -> Recipe:
    return load_recipe(place / "recipe.yaml", overrides)


class Along(Scripted):
    """A drafter that knows another table after every committed text."""

    def __init__(self, table: type[Table] = Table) -> None:
        super().__init__([table(0)])
        self.table = table

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


def slow_rows(answer: RecordedAnswer, section: LabelSection, over: int) -> tuple[list[list[tuple]], int]:
    """(rows of each tree, sorted; nodes below the end) along one answer, root by root."""
    trees, below, done = [], 0, 1
    while done < len(answer.tokens):
        said = tuple((token - 1) // 2 if token % 2 else -1 for token in answer.tokens[done:])
        table = Table(text_seed([*answer.prompt, *answer.tokens[:done]]))
        rows, accepted, beyond = reference.c2t_rows(table, section.top_k, section.draft_calls, over, said)
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
    LabelSection(top_k=3, draft_calls=4),
    LabelSection(top_k=1, draft_calls=3),
    LabelSection(top_k=5, draft_calls=1),
    LabelSection(top_k=VOCAB + 2, draft_calls=3),  # more than there are tokens
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: f"{section.top_k} x {section.draft_calls}")
def test_rows_are_those_of_the_slow_twin_answer_by_answer(
    section: LabelSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = 5 if section.draft_calls == 4 else 1000
    monkeypatch.setattr("draftsmith.models.c2t.ENTROPY_OVER", over)
    chance = random.Random(section.top_k)
    answers = [written_answer(chance, tokens) for tokens in (2, 9, 30, 17, 30)]
    together = label(Along(), answers, None, unasked_target(1000), section)
    accepted = beyond = 0
    for answer, labelled in zip(answers, together, strict=True):
        expected, below = slow_rows(answer, section, over)
        for mine, its in zip(found := fast_rows(labelled), expected, strict=True):
            assert [(row[0], row[3]) for row in mine] == [(row[0], row[3]) for row in its]
            np.testing.assert_allclose([row[1:3] for row in mine], [row[1:3] for row in its], atol=1e-5)
        assert (labelled.dropped_beyond, labelled.dropped_nan) == (below, 0)
        accepted, beyond = accepted + sum(row[3] for tree in expected for row in tree), beyond + below
        (alone,) = label(Along(), [answer], None, unasked_target(1000), section)
        assert fast_rows(alone) == found
    assert accepted > 5
    assert beyond > 0 or section.draft_calls == 1


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
        assert list(map(len, labelled.features)) == list(map(len, labelled.accepted))
        assert (kept + labelled.dropped_nan + labelled.dropped_beyond) % (3 + 3 * 9) == 0  # whole trees
        dropped += labelled.dropped_nan
    assert dropped > 20


def test_trees_come_back_as_they_were_written(tmp_path: Path) -> None:
    trees = made_trees(7, 30)
    trees.write(tmp_path / "rows")
    again = Trees.read(tmp_path / "rows")
    assert again.about == trees.about and again.sizes.tolist() == [30, 29, 28, 30, 29, 28, 30]
    chosen = again.chosen(torch.tensor([5, 0, 3]))
    assert chosen.sizes.tolist() == [28, 30, 30]
    for name in ("features", "accepted"):
        written = getattr(trees, name)
        assert torch.equal(getattr(again, name), written)
        parts = written.split(trees.sizes.tolist())
        assert torch.equal(getattr(chosen, name), torch.cat([parts[tree] for tree in (5, 0, 3)]))


def test_from_answers_to_acceptance(place: Path, script: Callable[..., str], tmp_path: Path) -> None:
    labels, rows = f"labels.out={tmp_path / 'rows'}", f"classifier.rows={tmp_path / 'rows'}"
    out = f"classifier.out={tmp_path / 'c2t'}"
    assert "52 nodes a tree" in script(label_trees, labels, "--plan") and not (tmp_path / "rows").exists()
    script(label_trees, labels)
    trees = Trees.read(tmp_path / "rows")
    lineup, drafts = LoadedModels(TargetFiles(recipe_of(place).target)), main_contender(recipe_of(place))
    assert trees.about["drafter"] == loaded_identity(lineup, drafts, loaded_drafting(lineup, drafts).vocab)
    assert trees.about["answers"] == 8
    assert len(trees.accepted) + trees.about["dropped_beyond"] == 52 * len(trees.sizes)
    assert int(trees.accepted.sum()) > 20 and trees.features[:, 2].unique().tolist() == [0, 1, 2, 3]

    assert "to train on" in script(c2t, rows, out, "--plan") and not (tmp_path / "c2t").exists()
    script(c2t, rows, out)
    first, config = state_of(tmp_path / "c2t"), read_c2t_config(tmp_path / "c2t")
    assert {"config.json", "metrics.jsonl", "model.safetensors", "provenance.json", "recipe.yaml"} == set(first)
    assert config == C2tConfig(drafter=trees.about["drafter"])
    script(c2t, rows, out)
    assert state_of(tmp_path / "c2t") == first
    again = f"classifier.out={tmp_path / 'again'}", f"classifier.init_from={tmp_path / 'c2t'}"
    script(c2t, rows, *again, "classifier.share=1")
    assert read_c2t_config(tmp_path / "again") == config

    row = "{}: eval.tree={{policy: c2t, draft_calls: 4, top_k: 4, c2t: {{classifier: {}, beta: {}}}}}"
    compared = [row.format(name, tmp_path / "c2t", beta) for name, beta in (("loose", 0.01), ("strict", 0.9))]
    script(acceptance, f"eval.out={tmp_path / 'eval'}", "eval.mode=replay", "--compare", *compared)
    found = json.loads((tmp_path / "eval/replay/acceptance.json").read_text())["contenders"]
    loose, strict = found["loose"], found["strict"]
    assert loose["tree_nodes_per_round"] > strict["tree_nodes_per_round"] >= 1
    assert loose["tau"] > strict["tau"]


def test_answers_come_from_validation_conversations_by_default(place: Path, tmp_path: Path) -> None:
    shutil.copy(place / "answers.jsonl", tmp_path / "conversations.jsonl")
    for kept_out, count, note in (
        (3, 1, "answers are taken from the 1 conv"),  # a fifth of the eight at most
        (0, 8, "has learnt these answers"),
    ):
        own = ["labels.answers=null", f"output_dir={tmp_path}", f"train.validation_conversations={kept_out}"]
        recipe = recipe_of(place, *own)
        recording, chosen = labelling.answers_to_label(recipe, TargetFiles(recipe.target))
        assert len(chosen) == count and note in recording.note


def test_max_rows_ends_with_a_whole_answer(place: Path) -> None:
    recipe = recipe_of(place, "labels.top_k=2", "labels.draft_calls=2")
    files = TargetFiles(recipe.target)
    models, contender = LoadedModels(files), labelling.labelled_contender(recipe, files)
    _, answers = labelling.answers_to_label(recipe, files)

    def labelled(most: int | None) -> Trees:
        return labelling.label_all(models, contender, recipe.labels.model_copy(update={"max_rows": most}), answers)

    whole, most = labelled(None), 1
    for count in (1, 2, 3):  # the third ends a batch
        some = labelled(most)
        assert some.about["answers"] == count and len(some.accepted) >= most
        first = whole.chosen(torch.arange(len(some.sizes)))
        assert torch.equal(some.features, first.features) and torch.equal(some.accepted, first.accepted)
        assert len(labelled(len(some.accepted)).accepted) == len(some.accepted)
        most = len(some.accepted) + 1


def test_a_classifier_for_another_drafter_is_refused(place: Path, tmp_path: Path) -> None:
    tree = f"eval.tree={{policy: c2t, c2t: {{classifier: {tmp_path / 'c2t'}}}}}"
    recipe, own = recipe_of(place), place / "run/drafter"
    files = TargetFiles.read(recipe.target)
    models, contender = LoadedModels(files), main_contender(recipe_of(place, tree))
    mine = drafter_identity(main_contender(recipe), DraftVocab.full(64))
    assert mine["proposer"] == "drafter" and len(mine["weights_sha256"]) == 64
    moved = shutil.copytree(own, tmp_path / "moved")
    # The Python API checks no contenders.
    checks = (lambda used: check_contenders(recipe, files, [used])), (lambda used: loaded_proposer(models, used))
    for check in checks:
        for words, drafter in (mine, own), ({}, own), (mine, moved):  # {}: nobody knows
            C2tClassifier(C2tConfig(drafter=words)).save(tmp_path / "c2t")
            check(replace(contender, drafter=drafter))
        for words, told in (
            ({"proposer": "causal_lm"}, "proposer: 'causal_lm' there, 'drafter' here"),
            ({"weights_sha256": "0" * 64}, "weights_sha256: '00000000"),
            ({"vocab_sha256": "0" * 64}, "vocab_sha256: '0+... there, None here"),
        ):
            C2tClassifier(C2tConfig(drafter=mine | words)).save(tmp_path / "c2t")
            with pytest.raises(UserError, match=rf"a classifier for another drafter.*{told}.*init_from"):
                check(contender)
