"""Which drafter a C2T classifier belongs to: another drafter, ranking, target or other weights are refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.decoding.contenders import (
    Lineup,
    check_contenders,
    drafter_identity,
    main_contender,
)
from draftsmith.models.c2t import C2tClassifier, C2tConfig
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from tests.c2t_cases import place as place
from tests.c2t_cases import recipe_of
from tests.c2t_cases import script as script


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
