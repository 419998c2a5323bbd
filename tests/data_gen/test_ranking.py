"""Rankings by any corpus or blend: how it is blended, what is chosen, what users get wrong."""

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.vocabulary.template_tokens import template_tokens
from draftsmith.eval.decoding.contenders import contender_of, vocab_of
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import (
    BLEND_SCALE,
    DraftVocab,
    always_inside,
    blend,
    cut_vocab,
    load_token_counts,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.sections.eval import ContenderSection, TreeSection
from tests import reference
from tests.conftest import VOCAB_SIZE, make_tokenizer
from tests.data_gen.ranking_cases import (
    TEMPLATE,
    Script,
    as_counter,
    counted,
    load_corpora,
    some_texts,
    token_counts,
    write_lines,
)
from tests.data_gen.ranking_cases import place as place
from tests.data_gen.ranking_cases import rank_by as rank_by


def regenerated(*output: int) -> dict[str, Any]:
    """A line of answers."""
    turn = {"prompt_token_ids": [2, 60, 4, 3], "output_token_ids": [*output], "finish_reason": "stop"}
    return {"id": "c", "messages": [{"role": "user", "content": "x"}], "turns": [turn]}


# The blend.


def test_blend_equals_its_slow_twin() -> None:
    chance = random.Random(0)
    for _ in range(60):
        corpora = [[chance.choice([0, 0, 1, 3, 10**6, 10**12]) for _ in range(20)] for _ in range(chance.randint(2, 4))]
        for corpus in corpora:
            corpus[chance.randrange(20)] += 1
        weights = [chance.choice([1.0, 0.1, 2.5, 1e-9, 1e6]) for _ in corpora]
        ours = blend([(torch.tensor(c), w) for c, w in zip(corpora, weights, strict=True)])
        assert ours.dtype == torch.int64
        assert ours.tolist() == reference.blended_counts(corpora, weights, BLEND_SCALE)
    alone = torch.tensor([0, 0, 3])
    assert torch.equal(blend([(alone, 7.0)]), alone) and blend([(alone, 7.0)]) is not alone


# What is chosen.


def test_stop_and_template_tokens_are_inside_of_everything(place: Path, rank_by: Script) -> None:
    source = {"source": str(write_lines(place / "a.jsonl", [{"text": text} for text in some_texts(30, 10)]))}
    rank_by([source], "drafter.vocab_size=12")
    vocab = DraftVocab.load(place / "out/draft_vocab.safetensors")
    counts, metadata = load_token_counts(token_counts(place))
    assert not counts[TEMPLATE].any()  # foreign text holds none of them
    assert vocab.size == 12 == len(set(vocab.target_ids.tolist())) and vocab.t2d[TEMPLATE].all()
    assert vocab.target_ids.tolist() == reference.most_frequent(list(range(VOCAB_SIZE)), counts.tolist(), 12, TEMPLATE)
    assert metadata["stop_ids"] == "[4]" and metadata["template_ids"] == "[1, 2, 3, 4]"
    # A cut while decoding takes them from the file.
    recipe = load_recipe(place / "recipe.yaml")
    tree = TreeSection(vocab_size=4)
    contender = contender_of(recipe, ContenderSection(tree=tree), "eval.tree")
    contender = type(contender)(**{**vars(contender), "drafter": None})
    target = TargetFiles.read(recipe.target)
    assert (target.config.vocab_size, target.stop_ids) == (VOCAB_SIZE, (4,))
    assert vocab_of(contender, target).size == 4
    less = type(contender)(**{**vars(contender), "tree": TreeSection(vocab_size=3)})
    with pytest.raises(UserError, match=r"3 has no room for the 4 stop and template tokens \[1, 2, 3, 4\]"):
        vocab_of(less, target)
    assert cut_vocab(DraftVocab.full(VOCAB_SIZE), counts, 12, always_inside(metadata)).same_as(vocab)


THINKING = (
    "{%- for message in messages -%}<|{{ message['role'] }}|>"
    "{%- if message['role'] == 'assistant' %}say: {% endif %}{{ message['content'] }}"
    "<|end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def test_template_tokens_are_the_marks_and_what_stands_in_answers() -> None:
    tokenizer = make_tokenizer()
    assert template_tokens(tokenizer) == ((1, 2, 3, 4), (4,))
    tokenizer.chat_template = THINKING
    written = set(tokenizer.encode("say:", add_special_tokens=False))
    found, in_answers = map(set, template_tokens(tokenizer))
    assert {1, 2, 3, 4} | written <= found and found - written <= {1, 2, 3, 4, *tokenizer.encode(" ")}
    assert in_answers == found - {1, 2, 3}
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(UserError, match=r"takes no conversation of a question and an answer: .*never"):
        template_tokens(tokenizer)


CALLING = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}<|assistant|>{% generation %}say: "
    "{% if message['tool_calls'] %}<|system|>{{ message['tool_calls'][0]['function']['name'] }}{% endif %}"
    "{{ message['content'] }}<|end|>{% endgeneration %}"
    "{%- else -%}<|user|>{{ message['content'] }}<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def test_what_the_template_writes_into_answers_is_inside_of_a_ranking_by_answers(place: Path, rank_by: Script) -> None:
    template = place / "calling.jinja"
    template.write_text(CALLING)
    recipe = yaml.safe_load((place / "recipe.yaml").read_text())
    recipe["target"]["chat_template"] = str(template)
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    say = make_tokenizer().encode("say: ", add_special_tokens=False)
    wanted = sorted({1, 4, *say})  # here <|system|> opens a call; the marks of turns nobody has to draft
    rare = next(token for token in range(70, 200) if token not in wanted)
    write_lines(place / "out/conversations.jsonl", [regenerated(*[rare] * 9, 4)])
    rank_by([], f"drafter.vocab_size={len(wanted) + 1}")
    vocab = DraftVocab.load(place / "out/draft_vocab.safetensors")
    assert vocab.target_ids.tolist() == sorted([*wanted, rare])
    counts, metadata = load_token_counts(token_counts(place))
    assert not counts[sorted({*wanted} - {4})].any() and always_inside(metadata) == set(wanted)
    assert metadata["stop_ids"] == "[4]" and 4 not in json.loads(metadata["template_ids"])
    with pytest.raises(UserError, match=rf"has no room for the {len(wanted)} stop and template tokens"):
        rank_by(
            [],
            "drafter.vocab_size=2",
            f"output_dir={place / 'new'}",
            f"data.conversations={place}/out/conversations.jsonl",
        )


def test_answers_that_are_wanted_for_comparison_alone_block_nothing(place: Path, rank_by: Script) -> None:
    source = {"source": str(write_lines(place / "a.jsonl", [{"text": "the cat sat"}]))}
    for content, words in (("", ""), ("{torn\n", ""), (regenerated(VOCAB_SIZE + 7, 4), "is outside")):
        write_lines(place / "out/conversations.jsonl", [content])
        printed = rank_by([source])
        assert re.search(rf"note: the coverage of the target's own answers is unknown: .*{words}", printed), printed
        assert [corpus.source for corpus in load_corpora(token_counts(place))] == [source["source"]]
        with pytest.raises(UserError, match=rf"answers holds no token|data\.conversations|{words or 'never'}"):
            rank_by([source, {"source": "answers"}])


def test_coverage_by_corpus_and_size(place: Path, rank_by: Script, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = [some_texts(30, 11), ["zebra quiz box jam " * 20]]
    paths = [write_lines(place / f"{i}.jsonl", [{"text": text} for text in part]) for i, part in enumerate(texts)]
    write_lines(place / "out/conversations.jsonl", [regenerated(70, 71, 70, 4)])
    weights = [3.0, 0.5]
    sources = [{"source": str(path), "weight": weight} for path, weight in zip(paths, weights, strict=True)]
    printed = rank_by(sources)
    found = [counted(part, tokenizer) for part in texts]
    both = [[part[token] for token in range(VOCAB_SIZE)] for part in found]
    ranking = reference.blended_counts(both, weights, BLEND_SCALE)
    answers = Counter([70, 71, 70, 4])
    columns = [Counter(dict(enumerate(ranking))), *found, answers]  # answers: not counted in, but compared with
    header, *rows = [
        line.split() for line in printed.splitlines() if line.startswith("    tokens") or line.endswith("%")
    ]
    assert header[:2] == ["tokens", "blend"] and header[-1] == "answers" and len(header) == 5
    assert [row[0] for row in rows] == ["4", "8", "16", "32", "64", "128", "256", str(VOCAB_SIZE)]
    for size, *shares in rows:
        inside = reference.most_frequent(list(range(VOCAB_SIZE)), ranking, int(size), TEMPLATE)
        wanted = [sum(corpus[token] for token in inside) / corpus.total() for corpus in columns]
        assert shares == [f"{share:.2%}" for share in wanted]
    assert [corpus.weight for corpus in load_corpora(token_counts(place))] == [3.0, 0.5, None]
    assert load_token_counts(token_counts(place))[0].tolist() == ranking
    # As a source of the blend, the answers come in the recipe's order.
    rank_by([{"source": "answers", "weight": 1}, sources[0]])
    assert [corpus.source for corpus in load_corpora(token_counts(place))] == ["answers", str(paths[0])]
    assert as_counter(load_corpora(token_counts(place))[0].counts) == answers


def test_the_answers_alone_are_counted_as_without_a_ranking(place: Path, rank_by: Script) -> None:
    write_lines(place / "out/conversations.jsonl", [regenerated(70, 71, 70, 4)])
    rank_by([])
    plain, metadata = load_token_counts(token_counts(place))
    assert set(metadata) == {"tokenizer_fingerprint", "counted_tokens", "stop_ids"}
    assert not (place / "out/ranking").exists()
    rank_by([{"source": "answers", "weight": 0.25}])
    assert torch.equal(load_token_counts(token_counts(place))[0], plain)


# What users get wrong.


def test_all_sources_that_are_wrong_are_told_at_once(place: Path, rank_by: Script) -> None:
    good = write_lines(place / "good.jsonl", [{"text": "the cat"}])
    write_lines(place / "blank.jsonl", ["\n", "\n"])
    write_lines(place / "nofield.jsonl", [{"body": "x", "n": 1}])
    (place / "fake.parquet").write_bytes(b"no parquet")
    wrong = {
        f"{place}/missing.txt": "no such file",
        f"{place}/blank.jsonl": "it holds no records",
        f"{place}/nofield.jsonl": "no field `text` .* among body, n",
        f"{place}/fake.parquet": "cannot be read as parquet",
        "hf:": "write hf:org/name",
        f"hf:{place}/no-such:train": "datasets cannot load it",
        "hf:org/name:train[:10]": "parts of a split",
        str(good): "listed twice",
    }
    with pytest.raises(UserError) as caught:
        rank_by([{"source": name} for name in (str(good), *wrong)])
    for number, pattern in enumerate(wrong.values(), start=1):
        assert any(re.search(rf"sources\.{number}: .*{pattern}", problem) for problem in caught.value.problems), pattern
    assert [path.name for path in (place / "out").iterdir()] == [".lock"]  # nothing was counted


def test_a_corpus_smaller_than_the_vocabulary_is_filled_up(place: Path, rank_by: Script) -> None:
    a = write_lines(place / "a.jsonl", [{"text": "the cat sat"}])
    seen = len(counted(["the cat sat"], make_tokenizer()))
    assert "note:" not in rank_by([{"source": str(a)}], f"drafter.vocab_size={seen + 4}")
    assert f"note: only {seen + 4} of 100 draft" in rank_by([{"source": str(a)}], "drafter.vocab_size=100")
