"""The model card (README.md) and speculation_profile.json of an export."""

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from draftsmith.models.drafters import kind_text, trainable_parameters
from draftsmith.models.formats.engines import ServingEngine
from draftsmith.models.formats.exporting import Source
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.files.reading import file_digest

TAG = "draftsmith"  # tells exports from other repositories of the Hub
PICTURE = "acceptance.png"
KEY = "acceptance_by_position"
MERGED = "MERGED_TARGET"  # how serve commands name a target that has to be merged with its adapter first
# Licences that bind models made with a model's outputs, by what tells the family in its name (CodeGemma is Gemma, too).
BINDING = {
    r"\b(code)?llama-?\d": (
        "the Llama community licence asks that models trained with a Llama's outputs be called Llama and carry it"
    ),
    "gemma": "Gemma's terms of use bind models trained with Gemma's outputs",
}


def read_measurement(path: Path, source: Source) -> dict[str, Any] | None:
    """acceptance.json, if it was measured with this drafter's weights; None: there is none, or it is of others."""
    try:
        content = parse_json(path.read_bytes())
        weights = file_digest(source.directory / "model.safetensors")
        return content if content["made"]["data"]["drafter"]["sha256"] == weights else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def own_contenders(measured: dict[str, Any]) -> list[str]:
    """Names of the rows that draft with the exported drafter."""
    return [
        name
        for name, row in measured["contenders"].items()
        if row["proposer"] == "drafter" and row["drafter"] == measured["drafter"]
    ]


def measurement_files(source: Source, measured: dict[str, Any] | None) -> dict[str, str | bytes]:
    """What a measurement adds to an export, by file name.

    speculation_profile.json: for each way to draft and each benchmark, how often each position was accepted.
    """
    if measured is None:
        return {}
    keys = ("prompts", "rounds", "new_tokens", "tau", "tau_interval", KEY, f"{KEY}_interval", "accepted_per_round")
    profile = {
        "target": source.target_name,
        "drafter": kind_text(source.shape),
        "sampling": {key: measured[key] for key in ("temperature", "top_p", "top_k", "max_new_tokens")},
        "lossless": measured["lossless"],
        "date": measured["made"]["date"],
        KEY: "conditional: of the rounds that accepted all earlier positions",
        "drafts": {
            name: {
                "tree": measured["contenders"][name]["tree"],
                "benchmarks": {
                    benchmark: {key: rows[name][key] for key in keys}
                    for benchmark, rows in measured["benchmarks"].items()
                },
            }
            for name in own_contenders(measured)
        },
    }
    return {"speculation_profile.json": json.dumps(profile, indent=2) + "\n", PICTURE: picture(measured)}


def served_target(source: Source, name: str) -> str:
    """How serve commands call the target: `name`, unless it has to be merged with its adapter first."""
    return MERGED if source.target.get("adapter") else name


def before_serving(source: Source, name: str) -> str:
    """What an engine must be told about a target with an adapter or guidance; else empty."""
    cautions = []
    if source.target.get("adapter"):
        cautions.append(
            f"The drafter was trained on the states of {name} with a LoRA adapter merged into it. Merge "
            f"the adapter into the target first and serve the result, {MERGED} below, without the engine's own LoRA: "
            f"PeftModel.from_pretrained(target, adapter).merge_and_unload().save_pretrained('{MERGED}') by peft, and "
            "the target's tokenizer beside it."
        )
    if guidance := source.target.get("guidance"):
        cautions.append(
            f"The drafter was trained for answers of {name} under classifier-free guidance ({guidance}). This folder "
            "cannot ask for it: an engine that does not guide alike accepts fewer drafted tokens."
        )
    return " ".join(cautions)


def card(
    source: Source,
    engines: Sequence[ServingEngine],
    measured: dict[str, Any] | None,
    folder_name: str,
    pushed: bool,
    license: str | None,
    recipe_path: str | None,
) -> str:
    """README.md of an export.

    Args:
        engines: those that serve the folder, the one it was made for first.
        folder_name: how serve commands call the folder: a path, or a Hub id.
        pushed: the card goes to the Hub, where a path of a local target says nothing and is left out.
        license: of the drafter, an identifier of the Hub; recipe_path: the recipe's, for the command to measure again.
    """
    shape, target = source.shape, source.target
    is_hub = not Path(target["model"]).exists()
    name = source.target_name if pushed else target["model"]
    made = parse_json((source.directory / "provenance.json").read_bytes())
    weights = next(tensor.dtype for tensor in source.tensors.values() if tensor.is_floating_point())
    adapter, quantization, revision = (target.get(key) for key in ("adapter", "quantization", "revision"))
    facts = {
        "target": f"`{name}`" + (f", revision `{revision}`" if revision else ""),
        "adapter": adapter and f"LoRA, sha256 of settings and weights `{adapter}`",
        "quantisation": quantization and f"trained on the states of the target in {quantization}",
        "kind": f"{kind_text(shape)}, {shape.num_layers} layer" + "s" * (shape.num_layers > 1),
        "parameters": f"{trainable_parameters(shape):,}, trained in {str(weights).removeprefix('torch.')}",
        "draft vocabulary": f"{shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens",
        "target states": shape.fuses and f"{str(shape.capture_layers)[1:-1]} of `hidden_states` (0 is the embedding)",
    }
    versions = ", ".join(f"{key} {value}" for key, value in made["versions"].items())
    data = {f"{key} (`{entry['file']}`)": f"sha256 `{entry['sha256']}`" for key, entry in made["data"].items()}
    served = served_target(source, name)
    rendered = ModelCard.from_template(
        ModelCardData(
            base_model=name if is_hub else None,  # the Hub refuses a card whose base model is a path
            license=license,
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=["speculative-decoding", shape.kind, TAG],
        ),
        template_path=str(Path(__file__).with_name("card.md.jinja")),
        kind=kind_text(shape),
        target_name=name,
        target_link=f"[{name}](https://huggingface.co/{name})" if is_hub else f"`{name}`",
        licence_warning=next((words for family, words in BINDING.items() if re.search(family, name.lower())), None),
        before_serving=before_serving(source, name),
        facts={fact: value for fact, value in facts.items() if value},
        measured=measured,
        rows=[] if measured is None else _rows(measured),
        picture=PICTURE,
        again=f"draftsmith evaluate {recipe_path or f'your-recipe.yaml eval.drafter={folder_name}'}",
        commands=[(engine.title, engine.command(shape, served, folder_name)) for engine in engines],
        made={"with": versions, "command": f"`{' '.join(made['command'])}`", **data},
    )
    return str(rendered)


def _rows(measured: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name in own_contenders(measured):
        for benchmark, contenders in measured["benchmarks"].items():
            row = contenders[name]
            speed = "" if row.get("speedup") is None else f"{row['speedup']:.2f}"
            tau, intervals = f"{row['tau']:.2f}", [_interval(row.get(f"{key}_interval")) for key in ("tau", "speedup")]
            rows.append([name, benchmark, str(row["prompts"]), tau, intervals[0], speed, intervals[1]])
    return rows


def _interval(ends: list[float] | None) -> str:
    """Empty where a single prompt gives none."""
    return "" if ends is None else f"[{ends[0]:.2f}, {ends[1]:.2f}]"


def picture(measured: dict[str, Any]) -> bytes:
    """PNG: how often the target accepts the drafted token of each position, one line a way to draft, with intervals."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    for name in own_contenders(measured):
        row = measured["contenders"][name]
        accepted = row[KEY]
        places = range(1, len(accepted) + 1)
        [line] = axes.plot(places, accepted, marker="o", label=f"{name}, tau {row['tau']:.2f}")
        ends = [each or [value, value] for each, value in zip(row[f"{KEY}_interval"], accepted, strict=True)]
        low, high = ([each[i] for each in ends] for i in (0, 1))
        axes.fill_between(places, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="drafted position", ylabel="accepted, given the one before", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
