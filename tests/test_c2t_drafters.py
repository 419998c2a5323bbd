"""Which drafter a C2T classifier belongs to: another drafter, ranking, target or other weights are refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.data_gen import label_trees
from draftsmith.data_gen.trees.labelled_trees import TreesManifest
from draftsmith.eval import c2t_sweep
from draftsmith.eval.decoding.contenders import Lineup, check_contenders, drafter_record, main_contender
from draftsmith.models import c2t as models_c2t
from draftsmith.models.c2t import C2tClassifier, C2tConfig, differing_keys, drafter_identity, weights_digest
from draftsmith.models.chat import load_config, tokenizer_fingerprint
from draftsmith.models.vocab import load_token_counts, save_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetSection
from draftsmith.train import c2t
from tests.c2t_cases import place as place
from tests.c2t_cases import recipe_of
from tests.c2t_cases import script as script
from tests.conftest import make_tokenizer


def test_a_classifier_for_another_drafter_is_refused(place: Path, tmp_path: Path) -> None:
    recipe = recipe_of(place)
    mine = drafter_record(main_contender(recipe), None, recipe.target)
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
        with pytest.raises(UserError, match=r"tree.c2t.classifier: .*for another drafter.*init_from") as e:
            check(mine | words)
        assert told in str(e.value)
    contender = main_contender(recipe_of(place, f"eval.tree={{policy: c2t, c2t: {{classifier: {tmp_path / 'c2t'}}}}}"))
    with pytest.raises(UserError, match="a classifier for another drafter"):  # the Python API checks no contenders
        Lineup(recipe.target).proposer(contender)
    moved = replace(contender, drafter=tmp_path / "moved")
    shutil.copytree(place / "run/drafter", tmp_path / "moved")
    C2tClassifier(C2tConfig(drafter=mine)).save(tmp_path / "c2t")
    check_contenders(recipe, [moved])


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
    manifest = TreesManifest.read(tmp_path / "rows")
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


@pytest.mark.slow
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
    script(c2t_sweep, *settings[1:], small_lm(tmp_path / "copy"), *sweep)
    found = json.loads((tmp_path / "eval/c2t_sweep.json").read_text())
    assert found["drafter"] == str(tmp_path / "copy")
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
        with pytest.raises(UserError, match=r"--contender: (no contender is called 'x'|prompt_lookup has no )"):
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
        return drafter_identity(None, TargetSection(model=model, revision=revision), None, TargetSection(model=target))

    mine = words("org/small", "a")
    assert differing_keys(mine, words("org/small", "a")) == []
    assert differing_keys(mine, words("org/small", "b")) == ["revision"]
    assert differing_keys(words("org/other", "a"), mine) == ["model"]
    assert differing_keys(mine, words("org/small", "a", "org/larger")) == ["target"]  # where acceptance is another one


def test_a_local_target_is_known_by_its_weights(place: Path, tmp_path: Path) -> None:
    def words(target: Path) -> dict[str, Any]:
        return drafter_identity(None, TargetSection(model="org/small"), None, TargetSection(model=str(target)))

    own = Path(recipe_of(place).target.model)
    shutil.copytree(own, tmp_path / "moved")
    assert differing_keys(words(own), words(tmp_path / "moved")) == []
    weights = tmp_path / "moved/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\x01\x02\x03\x04")
    assert differing_keys(words(own), words(tmp_path / "moved")) == ["target"]
