"""Write a commented recipe for a target, with numbers that fit its size.

    draftsmith init Qwen/Qwen3-0.6B                        # writes qwen3-0.6b.yaml, which runs in runs/qwen3-0.6b
    draftsmith init ./my-model --out my.yaml --prompts my_prompts.jsonl     # my.yaml, which runs in runs/my
    draftsmith init model.gguf --prompts self              # a GGUF file, which writes the prompts, too
    draftsmith run my.yaml --plan                          # then: what the recipe would take

Reads the target's config and tokenizer, but no weights. The numbers are a starting point: docs/recipes.md explains them
and names other published values.
"""

import argparse
import math
import re
import shlex
import sys
from pathlib import Path

import yaml

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe, output_problem
from draftsmith.recipes.prompts.prompt_reader import check_source
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.target import TargetSection

PROMPTS = "hf:HuggingFaceH4/ultrachat_200k:train_sft"
DRAFT_VOCAB = 32_000  # EAGLE-3's
# (hidden size, learning rate): found by search (docs/study/tables.md), and qwen3-8b.yaml's, not measured.
SMALL, LARGE = (256, 2e-3), (4096, 1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=sys.argv[0], description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("target", metavar="TARGET", help="a Hub id (org/name), a folder with a model, or a GGUF file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: the target's name with .yaml")
    parser.add_argument("--prompts", metavar="SOURCE", default=PROMPTS, help=f"data.prompts; default: {PROMPTS}")
    options = parser.parse_args()
    name = Path(options.target)
    path = options.out or Path(f"{_plain(name.stem if name.suffix == '.gguf' else name.name)}.yaml")
    if path.exists():
        raise UserError(f"--out: {path} exists; name another file, or delete it")
    if problem := output_problem(path, folder=False):
        raise UserError(f"--out: {problem}")
    if options.prompts != "self" and (problem := check_source(options.prompts)):
        raise UserError(f"--prompts: {problem}")
    text = starter_recipe(options.target, options.prompts, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    try:
        load_recipe(path)
    except UserError as error:
        path.unlink()
        raise UserError([f"no recipe fits this target: {problem}" for problem in error.problems]) from None
    print(f"written: {path}\nnext: draftsmith run {shlex.quote(str(path))} --plan")


def starter_recipe(model: str, prompts: str, path: Path) -> str:
    """The text of a recipe at `path` that trains an EAGLE-3.1 drafter for `model`; the output folder has its name.

    Raises:
        UserError: no such model, or an unsupported one.
    """
    # Imported here: they take seconds, and mistakes on the command line come first.
    from draftsmith.models.chat import THINKING_SWITCHES
    from draftsmith.models.families import changing_rotation
    from draftsmith.models.formats.exporting import able_engines, source_to_train
    from draftsmith.models.target import default_capture_layers, shallow_capture_layers
    from draftsmith.models.target_files import TargetFiles

    section = TargetSection(model=model)
    files = TargetFiles.read(section)
    text, positions = files.text_config, files.positions
    vocabulary, hidden, depth = text.vocab_size, text.hidden_size, text.num_hidden_layers
    shallow = depth < 7
    layers = shallow_capture_layers(depth) if shallow else default_capture_layers(depth)

    def serving(normed: bool) -> list[str]:
        drafter = {"kind": "eagle3", "fc_norm": normed, "norm_output": normed, "capture_layers": list(layers)}
        drafter |= {"intermediate_size": 1}  # no engine asks, and some targets name none
        recipe = Recipe.model_validate({"output_dir": "runs", "target": section.model_dump(), "drafter": drafter})
        return [engine.title for engine in able_engines(source_to_train(recipe, files))]

    without, with_norms = serving(normed=False), serving(normed=True)
    others = ", ".join(title for title in without if title not in with_norms)
    cut = vocabulary > DRAFT_VOCAB
    length = min(2048, positions)
    changes = f"; at most {positions:,}: there longrope changes" if positions == changing_rotation(text) else ""
    answer = min(1024 if hidden >= 1024 else 512, length // 2)
    small = hidden < 1024
    template = str(files.tokenizer.chat_template)
    switch = next((switch for switch in THINKING_SWITCHES if re.search(rf"\b{switch}\b", template)), None)
    parameters = files.size.parameters
    count = f"{parameters / 1e9:.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"
    own = prompts != PROMPTS
    lines = f"""\
# EAGLE-3.1 for {model}: {count} parameters, {depth} layers of width {hidden:,},
# {vocabulary:,} tokens, {positions:,} positions. Written by `draftsmith init`. The numbers are a starting point, not a
# result: docs/recipes.md explains them, recipes/sections/ lists every key.
#
#   draftsmith run {shlex.quote(str(path))} --plan     # what it would take: files, tokens, memory, disk
#   draftsmith run {shlex.quote(str(path))}            # answers, draft vocabulary, drafter, acceptance; resumable
#   Try it small first, with output_dir=runs/try data.max_prompts=200 train.max_steps=50 train.warmup_steps=5

output_dir: runs/{_plain(path.stem)}

target:
  model: {_scalar(model)}
  dtype: auto | as its config says; in float32 answers equal plain decoding's token for token
{f"  thinking: false | the template's {switch}; thoughts are long, and unlike answers" if switch else ""}

data:
  prompts: {_scalar(prompts)}{"" if own else " | or your own: my_prompts.jsonl"}
{"" if own else f"  max_prompts: {5_000 if small else 50_000} | more raise acceptance: docs/training.md"}
  max_length: {length} | tokens of a training row{changes}
  contamination: remove | leaves out what eval.prompts ask
  generator: | a server is faster for large targets: docs/prompts-and-answers.md
    batch_size: {32 if small else 8} | answers side by side
    max_new_tokens: {answer}

drafter:
  kind: eagle3{"" if shallow else f" | reads states {', '.join(map(str, layers))} of {depth}, the default"}
{f"  capture_layers: {layers} | of {depth} states; the default needs 7 layers" if shallow else ""}
  vocab_size: {f"{DRAFT_VOCAB} | of {vocabulary:,}: the most frequent ones" if cut else f"null | all {vocabulary:,}"}
  fc_norm: true | EAGLE-3.1, with the next line{f"; leave both out for {others}" if others else ""}
  norm_output: true

train:
  epochs: 2
  batch_size: {8 if small else 2}
  gradient_accumulation_steps: {1 if small else 4}
  learning_rate: {_rate(hidden)} | between 2e-3 (width 256, searched) and 1e-4 (width 4,096)
  warmup_steps: 100
  ttt_steps: 7
  validation_conversations: 64
  eval_replay: 16 | of these, the acceptance that decoding would have, at every checkpoint

eval:
  prompts: [mt_bench, humaneval]
  max_prompts: 40 | of each
  max_new_tokens: {min(512, answer)}
  tree: {{policy: eagle2, nodes: 60, top_k: 10}}
  also:
    - {{name: "eagle3.1, chain of 4", tree: {{policy: chain, nodes: 5}}}}
    - {{name: "prompt lookup", proposer: prompt_lookup, tree: {{policy: chain, nodes: 11}}}}
"""
    # Aligns comments; keeps the empty lines between sections, drops those of omitted keys.
    aligned = [f"{key:<29} # {comment}" for key, _, comment in (line.partition(" | ") for line in lines.split("\n"))]
    aligned = [line.removesuffix(" # ").rstrip() for line in aligned]
    return re.sub(r"\n\n+(?=  )", "\n", "\n".join(aligned)).replace("\n\n\n", "\n\n")


def _plain(name: str) -> str:
    """A name in lower case with only letters, digits, `_`, `-` and inner dots."""
    return re.sub(r"[^\w.-]+", "-", name.lower()).strip("-.") or "target"


def _rate(hidden: int) -> str:
    """A power law through SMALL and LARGE, to one digit."""
    (width, rate), (other, its) = SMALL, LARGE
    slope = math.log(its / rate) / math.log(other / width)
    found = min(rate, max(its, rate * (hidden / width) ** slope))
    return f"{found:.0e}".replace("e-0", "e-")


def _scalar(value: str) -> str:
    """`value` as YAML, quoted where it must be."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
