"""Which drafter a C2T classifier belongs to: another drafter, ranking, target or other weights are refused."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.data_gen import label_trees
from draftsmith.data_gen.trees.labelled_trees import Trees
from draftsmith.eval.decoding.contenders import (
    Lineup,
    check_contenders,
    contenders_of,
    drafter_identity,
    main_contender,
)
from draftsmith.models.c2t import C2tClassifier, C2tConfig
from draftsmith.models.chat import load_config, tokenizer_fingerprint
from draftsmith.models.vocab import DraftVocab, load_token_counts, save_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetSection
from draftsmith.train import c2t
from tests.c2t_cases import place as place
from tests.c2t_cases import recipe_of
from tests.c2t_cases import script as script
from tests.conftest import make_tokenizer


def test_a_classifier_for_another_drafter_is_refused(place: Path, tmp_path: Path) -> None:
    recipe = recipe_of(place)
    mine = drafter_identity(main_contender(recipe), DraftVocab.full(64))
    assert mine["proposer"] == "drafter" and len(mine["weights_sha256"]) == 64

    def check(words: dict[str, Any], drafter: Path = place / "run/drafter") -> None:
        C2tClassifier(C2tConfig(drafter=words)).save(tmp_path / "c2t")
        tree = f"eval.tree={{policy: c2t, c2t: {{classifier: {tmp_path / 'c2t'}}}}}"
        contender = replace(main_contender(recipe_of(place, tree)), drafter=drafter)
        check_contenders(recipe, [contender])
        Lineup(recipe.target).proposer(contender)

    shutil.copytree(place / "run/drafter", tmp_path / "moved")
    check(mine)
    check({})  # nobody knows
    check(mine, tmp_path / "moved")
    for words, told in (
        ({"proposer": "causal_lm"}, "proposer: 'causal_lm' there, 'drafter' here"),
        ({"weights_sha256": "0" * 64}, "weights_sha256: '00000000"),
        ({"vocab_sha256": "0" * 64}, "vocab_sha256: '0+... there, None here"),
    ):
        with pytest.raises(UserError, match=rf"tree.c2t.classifier: .*for another drafter.*{told}.*init_from"):
            check(mine | words)
    contender = main_contender(recipe_of(place, f"eval.tree={{policy: c2t, c2t: {{classifier: {tmp_path / 'c2t'}}}}}"))
    with pytest.raises(UserError, match="a classifier for another drafter"):  # the Python API checks no contenders
        Lineup(recipe.target).proposer(contender)


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
    same = tmp_path / "same.safetensors"  # other counts, the same tokens
    save_token_counts(same, 3 * load_token_counts(ranked[0])[0], tokenizer_fingerprint(make_tokenizer()), [2])
    out, cut = f"labels.out={tmp_path / 'rows'}", "eval.tree.vocab_size=64"
    script(label_trees, out, cut, f"eval.token_counts={ranked[0]}", "labels.max_rows=300")
    C2tClassifier(C2tConfig(drafter=Trees.read(tmp_path / "rows").about["drafter"])).save(tmp_path / "c2t")
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


def test_a_causal_lm_is_known_by_its_weights_and_its_target(
    place: Path, target_dir: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    """Labelled and trained on; the same models in other folders may use the classifier, others may not."""
    for name in ("small", "copy", "moved"):
        shutil.copytree(target_dir, tmp_path / name)
    also = f"eval.also=[{{name: small, proposer: causal_lm, draft_model: {{model: {tmp_path / 'small'}}}}}]"
    rows, out = f"labels.out={tmp_path / 'rows'}", f"classifier.out={tmp_path / 'c2t'}"
    script(label_trees, rows, also, "--contender", "small", "labels.max_rows=300")
    script(c2t, f"classifier.rows={tmp_path / 'rows'}", out)

    def load(model: Path, target: Path) -> None:
        tree = f"{{policy: c2t, c2t: {{classifier: {tmp_path / 'c2t'}}}}}"
        row = f"eval.also=[{{name: lm, proposer: causal_lm, draft_model: {{model: {model}}}, tree: {tree}}}]"
        recipe = recipe_of(place, row, f"target.model={target}")
        check_contenders(recipe, contenders_of(recipe)[1:])
        Lineup(recipe.target).proposer(contenders_of(recipe)[1])

    load(tmp_path / "copy", tmp_path / "moved")
    for changed, told in ((tmp_path / "copy", "draft_model"), (tmp_path / "moved", "target")):
        weights = changed / "model.safetensors"
        written = weights.read_bytes()
        save_file({name: each + 0.01 for name, each in load_file(weights).items()}, weights, metadata={"format": "pt"})
        with pytest.raises(UserError, match=rf"another drafter .{told}.embedding_digest: "):
            load(tmp_path / "copy", tmp_path / "moved")
        weights.write_bytes(written)
