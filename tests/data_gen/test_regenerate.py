"""Regeneration: the decoding pool against `generate`, drafts, stored states, and the file that no kill can hurt."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data_gen.answers import generators
from draftsmith.data_gen.answers.conversation_log import ConversationLog
from draftsmith.data_gen.answers.generators import GenerationSettings, Writer
from draftsmith.data_gen.states import capturing
from draftsmith.data_gen.states.store import StoreManifest, WrittenRows
from draftsmith.data_gen.training_rows.rows import training_rows
from draftsmith.models.chat import prompt_date, render_prompt
from draftsmith.models.checkpoint import save_drafter
from draftsmith.models.sampling import GREEDY, Sampling, SeededDraws
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.target_session import TargetSession
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.prompt_reader import Rejects
from draftsmith.recipes.sections.target import TargetSection
from tests.clock import on
from tests.conftest import CHAT_TEMPLATE, make_target, make_tokenizer
from tests.crash_states import cut
from tests.data_gen.regeneration_place import STOPS, save_target
from tests.data_gen.regeneration_place import RegenerationPlace as Place
from tests.decoding import decode, write_answers
from tests.pairs import taught
from tests.store_cases import SMALL_SHARDS, assert_same_store, capture, rows_of
from tests.thinning import a_few


def some_prompts(count: int, seed: int = 0) -> list[tuple[tuple[str, int], list[int]]]:
    chance = random.Random(seed)
    lengths = [chance.choice([1, 2, 5, 17, 40]) for _ in range(count)]
    return [((f"c{i}", 0), [chance.randrange(5, 320) for _ in range(length)]) for i, length in enumerate(lengths)]


def answers(model: Any, prompts: Any, **settings: Any) -> dict[Any, tuple[list[int], str]]:
    defaults = {"max_new_tokens": 20, "max_length": 50, "stop_ids": STOPS, "sampling": Sampling(1.0), "batch_size": 4}
    found = list(write_answers(model, iter(prompts), GenerationSettings(**defaults | settings)))
    assert len({answer.key for answer in found}) == len(found)
    return {key: (tokens, reason) for key, tokens, reason, _ in found}


# The generator.


@pytest.mark.parametrize(("family", "overrides"), [("llama", {}), ("mistral", {"sliding_window": 8})])
def test_greedy_answers_equal_generate_one_by_one(family: str, overrides: dict[str, Any]) -> None:
    model = make_target(family, num_layers=3, **overrides)
    prompts = some_prompts(15)
    found = answers(model, prompts, sampling=GREEDY)
    for key, prompt in prompts:
        alone = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=min(20, 50 - len(prompt)),
            eos_token_id=list(STOPS),
        )[0, len(prompt) :].tolist()
        assert found[key] == (alone, "stop" if alone[-1] in STOPS else "length")
    assert Counter(reason for _, reason in found.values()).keys() == {"stop", "length"}


def test_draws_do_not_depend_on_neighbours_or_order() -> None:
    model, prompts, nucleus = make_target(num_layers=3), some_prompts(12), Sampling(1.0, top_p=0.9)
    found = answers(model, prompts, sampling=nucleus, seed=3)
    assert answers(model, prompts, sampling=nucleus, seed=3, batch_size=1) == found
    assert answers(model, prompts[::-1], sampling=nucleus, seed=3, batch_size=9) == found
    assert answers(model, prompts[5:6], sampling=nucleus, seed=3) == {prompts[5][0]: found[prompts[5][0]]}
    assert answers(model, prompts, sampling=nucleus, seed=4) != found
    # The same prompt under another key, as in a next turn, has draws of its own.
    twice = answers(model, [(("c", 0), [7, 8]), (("c", 1), [7, 8])])
    assert twice["c", 0] != twice["c", 1]


@pytest.mark.parametrize("sampling", [Sampling(0.8, top_p=0.8), Sampling(1.5, top_k=5)], ids=str)
def test_answers_are_drawn_by_the_settings(sampling: Sampling) -> None:
    """By the numbers of seed and key, from the law that tests/eval/test_sampling.py enumerates."""
    model, prompts = make_target(num_layers=2), some_prompts(12)
    found = answers(model, prompts, sampling=sampling, seed=3, max_new_tokens=9)
    for key, prompt in prompts:
        alone = decode(Target(model, (0,)), None, prompt, STOPS, 9, sampling, SeededDraws(3, key))
        assert found[key][0] == alone.token_ids


def test_no_row_is_decoded_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position of every round gives a token that is kept; the prompt's pass gives the first one."""
    writer = Writer(Target(make_target(num_layers=2), (0,)), GenerationSettings(20, 60, STOPS, GREEDY, batch_size=6))
    sizes: list[int] = []
    verify = TargetSession.verify
    monkeypatch.setattr(TargetSession, "verify", lambda at, tree: sizes.append(tree.rows) or verify(at, tree))
    found = [answer.token_ids for answer in writer(iter(some_prompts(30)))]
    assert sum(sizes) == sum(len(tokens) - 1 for tokens in found)
    assert len({len(tokens) for tokens in found}) > 3  # answers of unequal length: rows were replaced
    assert max(sizes) == 6 and len(sizes) < sum(sizes) / 2


# The script.


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture) -> Place:
    generator = {"batch_size": 4, "max_new_tokens": 20, "temperature": 0}
    return Place(tmp_path, save_target(tmp_path / "target"), capsys, generator)


def test_records_hold_every_turn_and_who_wrote_it(place: Place) -> None:
    place.ask(30)
    printed = place.run()
    records = place.check()
    for record in records:
        assert record["id"] == f"q{record['meta']['number']}"
        for turn in record["turns"]:
            *output, last = turn["output_token_ids"]
            assert turn["finish_reason"] == ("stop" if last in STOPS else "length") and not set(output) & set(STOPS)
            assert last in STOPS or len(output) == 19
        wanted = {"temperature": 0.0, "seed": 0, "dtype": "float32", "target": str(place.target)}
        assert wanted.items() <= record["generator"].items() and record["generator"]["tokenizer_fingerprint"]
    assert {len(record["turns"]) for record in records} == {1, 2, 3} and any("unasked_turns" in r for r in records)
    answered = [turn for record in records for turn in record["turns"]]
    tokens = sum(len(turn["output_token_ids"]) for turn in answered)
    assert f"30 of 30 conversations written\n{len(answered)} answers, {tokens:,} tokens" in printed
    spans = [s for row in training_rows(place.path, place.tokenizer, 200, Rejects()) for s in row.spans]
    assert sum(end - start for start, end in spans) == tokens


def test_the_recipe_s_sampling_comes_before_the_target_s(place: Place) -> None:
    place.ask(1)
    path = place.target / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"top_k": 7}))
    for given, wanted in (("null", 7), ("0", 0), ("5", 5)):
        output = place.folder / given
        place.run("data.generator.temperature=1", f"data.generator.top_k={given}", f"output_dir={output}")
        assert [r["generator"]["top_k"] for r in place.records(output / "conversations.jsonl")] == [wanted]


def test_every_prompt_has_the_date_of_the_first(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a run is resumed, trained on or measured; also another run that reads its answers."""
    template, other, kept = place.folder / "dated.jinja", place.folder / "other", place.out / "prompt_date.txt"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE)
    dated = f"target.chat_template={template}"
    place.ask(6)
    on("2025-07-25", monkeypatch)
    assert f"2025-07-25, kept in {kept}" in place.run(dated, "data.max_prompts=2")
    on("2025-07-26", monkeypatch)
    assert "the date into prompts" not in place.run(dated)
    prompts = [place.tokenizer.decode(t["prompt_token_ids"]) for record in place.records() for t in record["turns"]]
    assert len(place.by_id()) == 6 and all(str(prompt).startswith("25 Jul 2025") for prompt in prompts)
    with pytest.raises(UserError, match="written with date '2025-07-25', this run has '2025-07-27'"):
        place.run(dated, "target.date=2025-07-27")

    def date_of(*more: str) -> str | None:
        recipe = load_recipe(place.recipe, [dated, f"output_dir={other}", *more])
        recipe.keep_date()  # as an evaluation does
        return prompt_date(TargetFiles(recipe.target).tokenizer)

    for more, day in (
        ([], "2025-07-26"),
        ([f"data.conversations={place.path}"], "2025-07-25"),
        ([f"data.states={place.out / 'states'}"], "2025-07-25"),
    ):
        assert date_of(*more) == day and (other / kept.name).read_text() == f"{day}\n"
        shutil.rmtree(other)
    atomic_write(other / kept.name, "2025-07-20\n")  # its own comes first
    assert date_of(f"data.conversations={place.path}") == "2025-07-20"


def test_bad_prompts_are_kept_with_their_reason(place: Place) -> None:
    bad: dict[str, Any] = {
        "not UTF-8": b'{"id": "windows", "messages": [{"role": "user", "content": "caf\xe9"}]}',
        "malformed JSON": b'{"id": "torn", "messages": [',
        "no user turn": {"id": "mute", "messages": [{"role": "system", "content": "x"}]},
        "longer than data.max_length": {"id": "long", "prompt": "x" * 400},
        "not text only": {"id": "picture", "prompt": "What is this?", "images": ["x.png"]},
    }
    place.ask(3, *bad.values())
    printed = place.run()
    assert {record["id"] for record in place.records()} == {"q0", "q1", "q2"}
    rejected = place.records(place.rejects)
    assert {record["line"]: record["reason"].split(":")[0] for record in rejected} == dict(enumerate(bad, start=4))
    assert {record["source"] for record in rejected} == {str(place.prompts)}
    # Two that could be read were not written, and the summary says what became of them.
    assert "3 of 5 conversations written, 2 rejected\n" in printed and "\n5 records rejected" in printed
    # Asked again: the same answer, and no reject twice.
    assert "3 of 5 conversations are done" in place.run()
    assert len(place.records(place.rejects)) == 5 and len(place.records()) == 3


def test_a_prompt_of_all_tokens_that_a_row_may_have_is_not_asked(place: Place) -> None:
    prompt = "the cat and the dog ran after 12 345 678"
    place.write_prompts({"id": "q", "prompt": prompt})
    length = len(render_prompt(place.tokenizer, [{"role": "user", "content": prompt}]))
    with pytest.raises(UserError, match=r"none of 1 conversations was answered; 1 .*longer"):
        place.run(f"data.max_length={length}")
    place.run(f"data.max_length={length + 1}")
    assert [len(turn["output_token_ids"]) for turn in place.records()[0]["turns"]] == [1]


def test_a_finished_file_is_left_alone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it answers a repeated question, which is asked once by default."""
    place.ask(5, {"id": "again", "prompt": "the cat 0 0"})
    place.run("data.duplicates=keep")
    before = place.path.read_bytes()
    monkeypatch.setattr(generators, "LoadedModels", None)  # not needed
    printed = place.run()
    assert "repeated questions dropped: 1 (" in printed and "all 5 conversations are done" in printed
    assert "conversations that are not in data.prompts: 4; kept" in place.run("data.max_prompts=2")
    assert place.path.read_bytes() == before


def test_files_of_other_origin_are_refused(place: Place) -> None:
    place.ask(4)
    place.run()
    first, *rest = place.path.read_bytes().splitlines(keepends=True)
    with pytest.raises(UserError, match=r"jsonl:1: written with temperature 0\.0, .* 0\.7(.|\n)*top_k 0, .* 5"):
        place.run("data.generator.temperature=0.7", "data.generator.top_k=5", "--plan")
    # Other weights at the same place; the tokenizer is the same.
    place.ask(5)
    save_target(place.target, seed=1)
    with pytest.raises(UserError, match="the target was changed"):
        place.run()
    for second, said in ((b"not mine\n", "not a line of regenerate's"), (first, r"conversation 'q\d' is there twice")):
        place.path.write_bytes(first + second + b"".join(rest))
        with pytest.raises(UserError, match=rf"conversations\.jsonl:2: {said}"):
            place.run()


def test_other_prompts_of_the_same_ids_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are often a file's name and a line: answers to another file's questions must not count as done."""

    def record(asked: str = "u", answer: str = "a", **more: Any) -> dict[str, Any]:
        messages = [{"role": role, "content": text} for role, text in (("user", asked), ("assistant", answer))]
        return {"id": "a", "messages": [*messages, messages[0]], "tools": [{"name": "look_up"}]} | more

    place.ask(2, record())
    place.run()
    monkeypatch.setattr(generators, "LoadedModels", None)  # not needed
    for other in (record("w"), record(tools=[{"name": "f"}]), record(tools=[])):
        place.ask(2, other)
        with pytest.raises(UserError, match=rf"{place.path}:\d: .*'a'.* {place.prompts}:3 "):
            place.run()
    # The same question: other answers in the source, other metadata, another line.
    place.ask(1, record(answer="an answer that is not asked for", meta={}))
    assert "all 2 conversations are done" in place.run()


@pytest.mark.slow
def test_kills_of_the_process_change_no_answer(place: Place) -> None:
    place.ask(60)
    place.run(f"data.conversations={place.folder / 'whole.jsonl'}")
    for lines in (1, 20):
        place.kill_at(lines)
    place.run()
    place.check()
    assert place.by_id() == place.by_id(place.folder / "whole.jsonl")


OURS = {"id": "a", "asked_digest": "d", "turns": []}


@pytest.mark.parametrize(
    "torn",
    [b'{"', b'{"id": "a", "mess', b"\0" * 9, b"\0\n", b'{"id": "a", "turns": [], "asked_digest": "d"'],
)
def test_a_torn_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(torn)
    with ConversationLog(path, {"target": "t"}) as log:
        log.append(OURS)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    with ConversationLog(path, {"target": "t"}) as log:
        assert log.content.done == {"a": (1, "d")} and path.read_bytes() == whole
    for rest in (torn, whole[:-1]):
        path.write_bytes(rest)
        with ConversationLog(path, {"target": "t"}):
            pass
        assert not path.exists()  # nothing was appended: an empty file would look like a result


@pytest.mark.parametrize(
    "text",
    ['{"id": "a", "prompt": "x"}', "some text", '{"id": "a", "prompt": "x",}\n', "[" * 100_000, '{"id": "a"}\n'],
)
def test_what_somebody_else_wrote_is_never_taken_for_a_torn_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"c\.jsonl:1: not a line of regenerate's"):
        ConversationLog(tmp_path / "c.jsonl", {"target": "t"})
    assert (tmp_path / "c.jsonl").read_text() == text


def add_drafter(place: Place, steps: int = 60) -> Path:
    """One that knows what this target says to a few prompts."""
    files = TargetFiles(TargetSection(model=str(place.target)))
    target = Target(files.load_model("cpu"), (0, 1, 2))
    prompts = tuple(render_prompt(files.tokenizer, [{"role": "user", "content": f"the cat {i} 0"}]) for i in range(4))
    drafter = taught(target, DraftVocab.full(target.vocab_size), prompts, length=20, steps=steps)
    save_drafter(place.folder / "drafter", drafter, files.identity_of(target), "", {})
    return place.folder / "drafter"


def test_greedy_files_are_the_same_with_a_drafter_and_without(place: Place) -> None:
    """Rows of several turns, stop tokens within accepted chains, answers cut by both limits; then a part without."""
    drafter, short = add_drafter(place), "data.max_length=48"
    place.ask(12)
    place.run(short, f"data.conversations={place.folder / 'plain.jsonl'}")
    printed = place.run(short, f"data.generator.drafter={drafter}", "data.max_prompts=9")
    assert float(printed.partition("drafted: ")[2].split()[0]) > 1.05  # tau: it did draft
    assert "9 of 12 conversations are done, going on" in place.run(short)
    found = place.by_id()
    drafted_by = [found[f"q{i}"]["generator"].pop("drafted_by", None) for i in range(12)]
    assert drafted_by == [{"drafter": str(drafter), "draft_tokens": 3}] * 9 + [None] * 3
    assert found == place.by_id(place.folder / "plain.jsonl")
    reasons = Counter(turn["finish_reason"] for record in found.values() for turn in record["turns"])
    assert min(reasons["stop"], reasons["length"]) > 0


LAYERS = "drafter.capture_layers=[0,1,2]"
EAGLE = "drafter={kind: eagle}"


def states_of(place: Place, *more: str, dtype: str = "float32", name: str = "states") -> list[str]:
    """Arguments of a run that stores states in several shards."""
    return [f"data.states={place.folder / name}", f"data.capture.dtype={dtype}", *SMALL_SHARDS, *(more or (LAYERS,))]


def assert_as_captured(place: Place, *arguments: str, **how: str) -> None:
    """The stored states are those that a run of the target gives."""
    capture(place.recipe, *states_of(place, *arguments, **how, name="captured"))
    assert_same_store(place.folder / "states", place.folder / "captured")


@pytest.mark.parametrize(
    "drafter, dtype, drafts",
    a_few([(LAYERS, "float32", True), (EAGLE, "bfloat16", True), (EAGLE, "fp8", False)], (LAYERS, "float32", True)),
)
def test_the_store_is_there_when_the_answers_are(
    place: Place, monkeypatch: pytest.MonkeyPatch, drafter: str, dtype: str, drafts: bool
) -> None:
    """Conversations of one to three turns, rows that replace others, answers cut by both limits and of one token."""
    place.ask(12)
    drafted = [f"data.generator.drafter={add_drafter(place, steps=30)}"] if drafts else []
    plain = ["data.max_length=36", f"data.conversations={place.folder / 'plain.jsonl'}"]
    place.run(*plain)
    printed = place.run("data.max_length=36", *states_of(place, drafter, dtype=dtype), *drafted)
    assert f"{place.folder / 'states'}: " in printed and "shards" in printed
    turns = [turn for record in place.records() for turn in record["turns"]]
    assert {len(turn["output_token_ids"]) == 1 for turn in turns} == {True, False}
    plain_turns = {key: record["turns"] for key, record in place.by_id(place.folder / "plain.jsonl").items()}
    assert plain_turns == {key: record["turns"] for key, record in place.by_id().items()}
    assert_as_captured(place, drafter, "data.max_length=36", dtype=dtype)
    monkeypatch.setattr(TargetFiles, "load", lambda *_: pytest.fail("the target was loaded"))
    capture(place.recipe, "data.max_length=36", *states_of(place, drafter, dtype=dtype))


@pytest.mark.slow
def test_templates_that_rewrite_history_give_a_row_for_each_turn(place: Place) -> None:
    tokenizer = make_tokenizer()
    shown = "{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}" + shown + "{% endfor %}"
    tokenizer.save_pretrained(place.target)
    place.ask(9)
    place.run(*states_of(place))
    assert len(rows_of(load_recipe(place.recipe, states_of(place)))) > len(place.records())
    assert_as_captured(place)


def test_capture_adds_what_was_answered_without_states(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ask(12)
    place.run("data.max_prompts=5")
    printed = place.run(*states_of(place))
    ids = [row.id for row in rows_of(load_recipe(place.recipe))]
    before = [name for name in ids if int(name[1:]) < 5]
    stored = f"{len(ids) - len(before)} of {len(ids)} rows"
    assert f"the states of {stored} are stored; `draftsmith capture` adds the rest" in printed
    assert StoreManifest.read(place.folder / "states") is None
    ran: list[str] = []
    states_of_rows = capturing.states_of

    def watched(rows: Any, *others: Any) -> Any:
        ran.extend(row.id for row in rows)
        return states_of_rows(rows, *others)

    monkeypatch.setattr(capturing, "states_of", watched)
    capture(place.recipe, *states_of(place), "--plan")
    assert f"written        {stored} with their answers" in place.printed()
    capture(place.recipe, *states_of(place))
    assert sorted(ran) == sorted(before)
    assert_as_captured(place)


@pytest.mark.parametrize("killed", [False, True])
def test_states_of_further_answers_join_the_store(place: Place, monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    """Without running the target over what is stored, also where a kill left the store half taken apart."""
    place.ask(12)
    tiny = "data.capture.shard_megabytes=0.01"
    asked = states_of(place, LAYERS, tiny)
    place.run(*asked, "data.max_prompts=6")
    assert len(list((place.folder / "states").glob("shard-*.safetensors"))) > 2
    monkeypatch.setattr(capturing, "states_of", lambda *_: pytest.fail("the target ran over an answer"))
    if killed:
        save, saved = WrittenRows._save, list[Path]()

        def save_four(self: WrittenRows, path: Path, parts: Any) -> None:
            if len(saved) == 4:
                raise KeyboardInterrupt
            save(self, path, parts)
            saved.append(path)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(WrittenRows, "_save", save_four)
            place.run(*asked)
    assert "opened for the states of further answers" in place.run(*asked)
    monkeypatch.undo()
    assert_as_captured(place, LAYERS, tiny)


def test_a_store_of_other_conversations_stays_and_one_with_nothing_to_add(place: Place) -> None:
    place.ask(6, {"id": "long", "messages": [{"role": "user", "content": "the cat " * 300}]})
    place.run(*states_of(place))
    shards = {path: path.stat().st_ino for path in (place.folder / "states").rglob("*") if path.is_file()}
    assert "1 rejected" in place.run(*states_of(place))  # it is asked each time
    place.ask(9)
    printed = place.run(*states_of(place), f"data.conversations={place.folder / 'others.jsonl'}")
    assert "has states of other conversations (" in printed and "not added" in printed
    assert shards == {path: path.stat().st_ino for path in (place.folder / "states").rglob("*") if path.is_file()}


def zeros(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)  # as a power cut may leave it


@pytest.mark.parametrize("harm", a_few([cut, zeros, Path.unlink], zeros))
def test_damaged_rows_are_captured_anew(place: Place, harm: Callable[[Path], None]) -> None:
    place.ask(6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing.Capture, "run", lambda *_: None)  # killed before it
        place.run(*states_of(place))
    harm(next((place.folder / "states/written").glob("*.safetensors")))
    place.run(*states_of(place))  # all is answered: makes the store if all rows are there
    capture(place.recipe, *states_of(place))
    assert_as_captured(place)


def test_states_of_two_kinds_do_not_mix(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ask(6)
    place.run("data.max_prompts=3")
    place.run(*states_of(place), "data.max_prompts=5")  # three rows lack states
    with pytest.raises(UserError, match=r"capture_layers: \[0, 1, 2\] there, \[0, 1\] now"):
        capture(place.recipe, *states_of(place, "drafter.capture_layers=[0,1]"))
    monkeypatch.setattr(generators, "LoadedModels", None)
    with pytest.raises(UserError, match=r"dtype: 'float32' there, 'fp8' now"):
        place.run(*states_of(place, dtype="fp8"))


def test_the_plan_says_how_large_the_states_are(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ask(6)
    with monkeypatch.context() as patch:
        patch.setattr(generators, "LoadedModels", None)
        printed = place.run("--plan", *states_of(place))
        assert "states         [0, 1, 2] and the last, in float32: at most " in printed
        assert "are free" in printed and not (place.folder / "states").exists()
        usage = shutil.disk_usage(place.folder)._replace(free=15_000)  # enough for one of them
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        for plan in ([], ["--plan"]):
            with pytest.raises(UserError, match=r"data\.states: at least 0\.0 MB are to be written to .* with the an"):
                place.run(*states_of(place), *plan)
