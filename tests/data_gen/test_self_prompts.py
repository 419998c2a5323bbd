"""Prompts that the target writes: where they begin and end, which are kept, and what a stopped run leaves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith.data_gen import self_prompt
from draftsmith.data_gen.answers.generators import GenerationSettings
from draftsmith.data_gen.answers.self_prompts import usable
from draftsmith.models.sampling import Sampling, SeededDraws
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.turn_ends import user_turn
from draftsmith.recipes.command.stages import stages_of
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import CHAT_TEMPLATE, make_tokenizer
from tests.training_runs import run_main

SETTINGS = GenerationSettings(64, 200, (4,), Sampling(1.0), seed=3)


def recipe_for(folder: Path, target: Path, prompts: Any = "self") -> Path:
    path = folder / "recipe.yaml"
    own = {"count": 3, "seed": 3, "max_new_tokens": 64}
    data = {"prompts": prompts, "self_prompts": own, "max_length": 200, "generator": {"batch_size": 8}}
    section = {"model": str(target), "dtype": "float32", "device": "cpu"}
    path.write_text(yaml.safe_dump({"output_dir": str(folder / "out"), "target": section, "data": data}))
    return path


@pytest.mark.parametrize(
    ("template", "opening", "end"),
    [
        (CHAT_TEMPLATE, "<|user|>", "<|end|>"),
        ("<|system|>Be kind.<|end|>" + CHAT_TEMPLATE, "<|system|>Be kind.<|end|><|user|>", "<|end|>"),
        (CHAT_TEMPLATE.replace("}}<|end|>{%- endif", "}}\n<|assistant|>{%- endif"), "<|user|>", "<|assistant|>"),
    ],
)
def test_where_a_question_begins_and_ends(template: str, opening: str, end: str) -> None:
    tokenizer = make_tokenizer(template)
    begun, ends = user_turn(tokenizer)
    assert (tokenizer.decode(begun), tokenizer.decode([ends])) == (opening, end)


def test_a_template_without_an_end_is_refused() -> None:
    tokenizer = make_tokenizer("{% for message in messages %}USER: {{ message['content'] }} NEXT: {% endfor %}")
    with pytest.raises(UserError, match="special token"):
        user_turn(tokenizer)


def test_a_stopped_run_goes_on_and_a_larger_count_keeps_the_first(
    tmp_path: Path, target_dir: Path, capsys: pytest.CaptureFixture
) -> None:
    recipe, out = recipe_for(tmp_path, target_dir), tmp_path / "out/self_prompts.jsonl"
    run_main(self_prompt, recipe)
    whole, log = out.read_bytes(), out.with_suffix(".drawn.jsonl")
    prompts = [json.loads(line) for line in whole.splitlines()]
    assert len({prompt["messages"][0]["content"] for prompt in prompts}) == 3
    assert all(
        prompt["meta"] == {"seed": 3} and [m["role"] for m in prompt["messages"]] == ["user"] for prompt in prompts
    )
    lines = log.read_bytes().splitlines(keepends=True)
    assert len(lines) > 3  # random weights: some are cut
    log.write_bytes(b"".join(lines[:2]) + lines[2][:20])  # as a kill leaves it
    out.unlink()
    run_main(self_prompt, recipe)
    assert out.read_bytes() == whole
    drawn = len(log.read_bytes().splitlines())
    run_main(self_prompt, recipe, "data.self_prompts.count=2")
    assert (out.read_bytes(), len(log.read_bytes().splitlines())) == (b"".join(whole.splitlines(True)[:2]), drawn)
    run_main(self_prompt, recipe, "data.self_prompts.count=4")
    assert out.read_bytes().startswith(whole)
    with pytest.raises(UserError, match="seed 3, this run has 4"):
        run_main(self_prompt, recipe, "data.self_prompts.seed=4")


def test_a_draw_is_the_target_s_own_by_name_and_seed(tmp_path: Path, target_dir: Path) -> None:
    """Against the target's distribution, position by position, with the same random numbers."""
    recipe = recipe_for(tmp_path, target_dir)
    run_main(self_prompt, recipe, "data.self_prompts.count=1")
    drawn = json.loads((tmp_path / "out/self_prompts.drawn.jsonl").read_text().splitlines()[0])
    target = TargetFiles(TargetSection(model=str(target_dir), dtype="float32")).load()
    opening, _ = user_turn(make_tokenizer())
    draws, ids = SeededDraws(3, (drawn["id"], 0)), list(opening)
    written = drawn["turns"][0]["output_token_ids"]
    for token in written:
        logits = target.model(torch.tensor([ids])).logits[0, -1]
        assert draws.token(logits.softmax(-1)) == token
        ids.append(token)


def test_which_draws_are_kept() -> None:
    texts = {
        "What is a prime?": "stop",
        "Tell me more": "length",  # cut
        " ... \n": "stop",  # empty
        "what IS a  prime?": "stop",  # repeated
        "go on and " * 6: "stop",  # in circles
        "Why?": "stop",
    }
    drawn = {
        f"self.3.{i}": {"messages": [{"role": "user", "content": text}], "turns": [{"finish_reason": reason}]}
        for i, (text, reason) in enumerate(texts.items())
    }
    good, left_out = usable(drawn, SETTINGS, 6)
    assert [record["id"] for record in good] == ["self.3.0", "self.3.5"]
    assert left_out == {"cut at 64 tokens": 1, "empty": 1, "repeated": 1, "in circles": 1}
    assert len(usable(drawn, SETTINGS, 5)[0]) == 1


def test_self_stands_beside_other_prompts(tmp_path: Path, target_dir: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": "Who?"}\n')
    recipe = load_recipe(recipe_for(tmp_path, target_dir, ["self", str(mine)]))
    assert recipe.data.prompts == [str(tmp_path / "out/self_prompts.jsonl"), str(mine)]
    assert stages_of(recipe)[:2] == ["self-prompt", "regenerate"]
    with pytest.raises(UserError, match="does not name `self`"):
        run_main(self_prompt, recipe_for(tmp_path, target_dir, str(mine)))
