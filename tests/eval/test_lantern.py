"""LANTERN's relaxed acceptance: against its slow twin, with its bound, and down to exact acceptance; and from the
recipe to the table, the report and its pictures."""

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from draftsmith.eval.decoding import lantern
from draftsmith.eval.decoding.accept import Acceptance
from draftsmith.eval.decoding.contenders import check_contenders, contenders_of
from draftsmith.eval.decoding.decode import TargetVerifier, decode
from draftsmith.eval.decoding.lantern import LanternAcceptance, Relaxation, nearest
from draftsmith.eval.report_page import result_files
from draftsmith.models.draft_tree import DraftTree
from draftsmith.models.image_tokens import ImageTokens
from draftsmith.models.sampling import GREEDY, Sampling
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.sections.target import TargetSection
from tests import reference
from tests.eval import test_sampling as laws
from tests.evaluation_cases import Page, measure, read_lines, save_untrained, write_lines
from tests.image_cases import CODES, VOCABULARY, make_image_target
from tests.thinning import a_few, thinned

# Of each token; one stands for itself alone.
NEAR = [[1, 2, 4], [4, 2, 0], [1, 4, 0], [], [2, 1, 0]]
TABLE = torch.tensor([row + [-1] * (3 - len(row)) for row in NEAR])
BUDGETS = {"delta 0.3": ("delta", 0.3), "delta 0.05": ("delta", 0.05), "lambda 2": ("lambda", 2.0)}


def relaxed(budget: tuple[str, float], k: int = 3) -> Relaxation:
    kind, value = budget
    return Relaxation(TABLE[:, :k], **({"delta": value} if kind == "delta" else {"factor": value}))


def law_of(rule: Acceptance, tree: DraftTree, logits: torch.Tensor) -> tuple[laws.Law, dict[int, float]]:
    """(the law of (path, bonus), what was moved at each node)."""
    moved: dict[int, float] = {}

    def round_of(draws: laws.EnumeratedDraws) -> Hashable:
        accepted = rule.accept(tree, logits[None], [draws])
        path = laws.path_of(accepted)
        assert accepted.moved is not None
        moved.update(zip(path, accepted.moved[0].tolist(), strict=False))
        return path, int(accepted.bonus)

    return laws.enumerate_law(round_of), moved


@pytest.mark.parametrize(
    ("shape", "seed", "drawn_as", "bound"),
    thinned(laws.SHAPES, range(3), ["T=1", "T=0.5, top-k, top-p"], BUDGETS, together=2),
)
def test_a_ranked_tree_equals_the_slow_walk(shape: str, seed: int, drawn_as: str, bound: str) -> None:
    sampling, budget = laws.SAMPLINGS[drawn_as], BUDGETS[bound]
    chance = torch.Generator().manual_seed(seed)
    tree = laws.SHAPES[shape](chance)
    logits = torch.randn(tree.nodes, laws.VOCAB, generator=chance) * 2
    p = [reference.processed(row.tolist(), sampling.temperature, sampling.top_p, sampling.top_k) for row in logits]
    expected, variation = reference.lantern_walk(tree.tokens[0].tolist(), tree.parents[0].tolist(), p, NEAR, budget)
    law, moved = law_of(LanternAcceptance(sampling, relaxed(budget)), tree, logits)
    laws.assert_same_law(law, expected)
    assert moved == pytest.approx({node: variation[node] for node in moved}, abs=1e-6)
    if budget[0] == "delta":
        assert max(moved.values()) <= budget[1] + 1e-9


def test_siblings_share_one_budget() -> None:
    """Each has a neighbour of its own with a tenth of the mass; the budget is enough for two of them."""
    near, p, tree = [[3], [4], [5], [], [], [], []], [0.2] * 3 + [0.1] * 4, laws.one_tree([6, 0, 1, 2], [-1, 0, 0, 0])
    relaxation = Relaxation(torch.tensor([each or [-1] for each in near]), delta=0.25)
    law, moved = law_of(LanternAcceptance(Sampling(1.0), relaxation), tree, torch.tensor([p] * 4).log())
    laws.assert_same_law(law, reference.lantern_walk([6, 0, 1, 2], [-1, 0, 0, 0], [p] * 4, near, ("delta", 0.25))[0])
    assert moved[0] == pytest.approx(0.2, abs=1e-6)


@pytest.mark.parametrize("siblings", [1, 2, 3])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_drawn_children_equal_the_slow_walk_and_stay_within_their_bound(
    budget: Any, siblings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lantern, "FIRST", 1)  # neighbours one by one
    chance, parents = torch.Generator().manual_seed(1), [-1, *[0] * siblings]
    logits = torch.randn(siblings + 1, laws.VOCAB, generator=chance) * 2
    q = torch.zeros(siblings + 1, laws.VOCAB)
    q[0] = torch.tensor([0.05, 0.4, 0.35, 0.1, 0.1])
    p = logits[0].softmax(-1).tolist()
    first: laws.Law = defaultdict(float)
    mean = 0.0
    for nodes, weight in laws.all_drawn(parents, q.tolist()):
        chances, rest, expected = reference.lantern_drawn(p, q[0].tolist(), NEAR, budget, nodes[1:])
        law, moved = law_of(LanternAcceptance(Sampling(1.0), relaxed(budget)), laws.one_tree(nodes, parents, q), logits)
        assert moved[0] == pytest.approx(expected, abs=1e-6)
        mean += weight * expected
        reached = 1.0
        for child, accepted in enumerate(chances, start=1):
            got = sum(w for (path, _), w in law.items() if path == (0, child))
            assert got == pytest.approx(reached * accepted, abs=1e-6)
            reached *= 1 - accepted
        for (path, bonus), w in law.items():
            first[nodes[path[1]] if len(path) == 2 else bonus] += weight * w
            if len(path) == 1:
                assert w == pytest.approx(reached * rest[bonus], abs=1e-6)
    found = sum(abs(first[token] - p[token]) for token in range(laws.VOCAB)) / 2
    assert 0.02 < found <= mean + 1e-6
    if siblings == 1:
        assert found == pytest.approx(mean, abs=1e-6)
    if budget[0] == "delta":
        assert mean <= budget[1] + 1e-6
    else:
        assert all(first[token] <= budget[1] * p[token] + 1e-6 for token in range(laws.VOCAB))


@pytest.mark.slow
@pytest.mark.parametrize("proposer", a_few(["chain", "drawn chain", "drawn siblings", "tree"], "drawn siblings"))
def test_the_law_of_first_tokens_stays_within_delta(proposer: str) -> None:
    """The first token is the prefill's. The two behind it may each move by delta."""
    delta, sampling, length = 0.1, laws.SAMPLINGS["T=1"], 2 if proposer.startswith("drawn") else 3  # of many outcomes
    target, drafter = laws.small_pair(None)
    prompt = [0, 2, 1, 2, 1]

    def answer(draws: laws.EnumeratedDraws) -> Hashable:
        drafting = laws.PROPOSERS[proposer](drafter, sampling)
        rule = LanternAcceptance(sampling, relaxed(("delta", delta)))
        [done] = decode(TargetVerifier(target, drafting, rule), drafting, [prompt], {laws.STOP}, length, [draws])
        moved.append(draws.weight * sum(done.moved))
        return tuple(done.token_ids)

    moved: list[float] = []
    law, exact = laws.enumerate_law(answer), laws.answers_of(target, prompt, length, sampling)

    def variation(first: int) -> float:
        between: laws.Law = defaultdict(float)
        for tokens, weight in itertools.chain(law.items(), ((tokens, -w) for tokens, w in exact.items())):
            between[tokens[:first]] += weight  # type: ignore[index]
        return sum(map(abs, between.values())) / 2

    assert variation(1) < 1e-5
    assert variation(length) <= sum(moved) + 1e-5 <= delta * (length - 1) + 2e-5
    assert 0.005 < variation(2) <= delta + 1e-5
    assert variation(3) <= 2 * delta + 1e-5


def test_greedy_takes_a_near_token_that_with_its_neighbours_reaches_the_likeliest() -> None:
    """Token 2 has 0.30 and, with 1 and 4, 0.50: as much as the likeliest, 3, has. Without 4 it falls short."""
    p = torch.tensor([[0.0, 0.15, 0.30, 0.48, 0.07], [0.9, 0.025, 0.025, 0.025, 0.025]])
    tree = laws.one_tree([0, 2], [-1, 0])
    for k, budget, length in ((3, 0.3, 2), (1, 0.3, 1), (3, 0.2, 1)):
        rule = LanternAcceptance(GREEDY, relaxed(("delta", budget), k))
        accepted = rule.accept(tree, p.clamp(min=1e-30).log()[None])
        assert int(accepted.length) == length
        assert int(accepted.bonus) == (0 if length == 2 else 3)
        assert accepted.moved is not None
        assert accepted.moved[0, 0] == pytest.approx(0.22 if length == 2 else 0, abs=1e-6)


def test_nearest_is_an_exact_search() -> None:
    vectors = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) + 1000  # far from the origin
    table = nearest(vectors, 7).tolist()
    for x, row in enumerate(table):
        others = sorted((y for y in range(50) if y != x), key=lambda y: float((vectors[x] - vectors[y]).norm()))
        assert row == others[:7]


# By the command.

RULES: dict[str, dict[str, Any]] = {
    "lantern": {"rule": "lantern", "delta": 0.4, "k": 8},
    "lantern++": {"rule": "lantern++", "lambda": 3, "k": 4},
    "embedding": {"rule": "lantern", "delta": 0.4, "k": 8, "neighbours": "embedding"},
    "none": {"rule": "lantern", "delta": 0},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    make_image_target(folder / "target")
    save_untrained(folder / "run/drafter", folder / "target", (0, 1, 2), draftable=range(len(VOCABULARY)))
    turns = ({"id": f"q{i}", "turns": [text]} for i, text in enumerate(["a red one", "two", "a blue two"]))
    prompts = write_lines(folder / "prompts.jsonl", *turns)
    model, chain = {"model": str(folder / "target"), "dtype": "float32"}, {"policy": "chain", "nodes": 4}
    small = {"proposer": "causal_lm", "draft_model": model, "tree": chain}
    rows = {name: {"acceptance": rule} for name, rule in RULES.items()} | {"exact": {}}
    evaluated = {"prompts": str(prompts), "max_new_tokens": 16, "temperature": 1}
    evaluated |= {"tree": {"nodes": 8, "draft_calls": 3, "top_k": 3}}
    evaluated |= {"also": [{"name": name, **row, **small} for name, row in rows.items()]}
    content = {"output_dir": str(folder / "run"), "target": model | {"guidance": {"scale": 2}}, "eval": evaluated}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return folder


def images_of(place: Path) -> ImageTokens:
    images = ImageTokens.of(TargetFiles(TargetSection(model=str(place / "target"), dtype="float32")).load_model())
    assert images is not None
    return images


def test_relaxed_rows_are_measured_and_their_pictures_shown(place: Path) -> None:
    measure(place)
    out = place / "run/eval"
    rows = result_files.read_acceptance(out / "acceptance.json")["contenders"]
    assert [rows[name]["lossless"] for name in ("exact", *RULES)] == [True, False, False, False, False]
    moved = {name: rows[name]["total_variation"] for name in ("exact", *RULES)}
    assert moved["exact"] is None and moved["none"] == 0
    assert 0 < moved["lantern"] <= 0.4 and moved["lantern++"] > 0 and moved["embedding"] > 0
    assert rows["lantern"]["tau"] > rows["exact"]["tau"]
    assert rows["lantern++"]["acceptance"] == {"delta": None, "neighbours": "codebook", **RULES["lantern++"]}
    lines, images = read_lines(out / "generations.jsonl"), images_of(place)
    for line in lines:
        picture = images.picture(line["token_ids"])
        assert ("image" in line) == (picture is not None)
        if picture is not None:
            assert Image.open(line["image"]["path"]).tobytes() == picture.tobytes()
    made = [line for line in lines if "image" in line]
    assert {line["contender"] for line in made} >= {"plain decoding", "lantern"}
    source = (out / "report.html").read_text()
    assert len(re.findall(r'<img src="data:image/png', source)) == len(made)  # the figures are SVG
    page = " ".join(Page(source).text.split())
    assert f"lantern {moved['lantern']:.3f}" in page.partition("Total variation from the target's distribution")[2]
    assert f"but not of {'; '.join(RULES)}: their output is not the target's" in page and "defect" not in page
    tables = [load_file(path)["neighbours"] for path in out.glob("neighbours-*.safetensors")]
    assert len(tables) == 4  # 4, 8 and all 15 codes; 8 embeddings
    codes = {VOCABULARY[name] for name in CODES}
    assert sum(set(table.unique().tolist()) <= {-1, *codes} for table in tables) == 3
    # Replay takes the answers of all others.
    exact = {"proposer": "prompt_lookup", "tree": {"policy": "chain", "nodes": 4}}

    def replay(**more: Any) -> None:
        measure(place, "eval.mode=replay", "eval.max_prompts=1", f"eval.also={json.dumps([exact | more])}")

    replay()
    with pytest.raises(UserError, match="the answers of 'lantern': written by an acceptance rule"):
        replay(name="lantern")
    with pytest.raises(UserError, match="accepts tokens that the target would not"):
        replay(name="nobody's", acceptance=RULES["lantern"])


def test_rows_of_codes_are_pictures_and_anything_else_is_none(place: Path) -> None:
    images, tokens = images_of(place), [VOCABULARY[name] for name in CODES]
    assert images.codes([VOCABULARY["<image>"], *tokens[:4], VOCABULARY["<eos>"]]) == [[0, 1], [2, 3]]
    assert images.codes(tokens[:6]) is None and images.codes([]) is None
    images.end_of_line = end = VOCABULARY["<null>"]
    assert images.codes([*tokens[:3], end, *tokens[3:6], end]) == [[0, 1, 2], [3, 4, 5]]
    assert images.codes([*tokens[:3], end, tokens[3]]) is None


def test_impossible_sources_of_neighbours_are_named(place: Path, tmp_path: Path) -> None:
    def refused(said: str, path: Path) -> None:
        recipe = load_recipe(str(place / "recipe.yaml"), [f"eval.acceptance={{rule: lantern, neighbours: {path}}}"])
        with pytest.raises(UserError, match=said):
            check_contenders(recipe, TargetFiles.read(recipe.target), contenders_of(recipe))

    path = tmp_path / "codes.safetensors"
    path.write_text("no tensors")
    refused("neighbours: .*not a readable safetensors file", path)
    for tokens, said in (
        (torch.arange(4), r"needs codebook \[C, d\]"),
        (torch.tensor([1, 2, 9_000], dtype=torch.uint16), "tokens 1 to 9,000, but the target has 26"),
    ):
        save_file({"codebook": torch.zeros(3, 2), "token_ids": tokens}, path)
        refused(said, path)
