"""Other projects' packages read our exports, and we read theirs: logits compared in float32.

    make readers      # installs the packages, then runs this for the demo, after `make demo-full`

    python -m tools.serving.readers recipes/demo-full.yaml --work runs/readers --speculators PYTHON --vllm PYTHON \
      --modelopt PYTHON --nemo PYTHON

Each PYTHON is that of an environment with the package; a reader without one is left out, and named. The exit code is 1
if any logit, or what a config class found, differs from ours.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftsmith.models.alignment import Columns
from draftsmith.models.checkpoint import read_drafter
from draftsmith.models.draft_tree import Committed
from draftsmith.models.drafter_base import Drafter
from draftsmith.models.drafters import build_drafter, drafting_of
from draftsmith.models.prompt import DecoderInputs, PlacedRows
from draftsmith.models.vispec import VispecConfig
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.loader import load_recipe
from draftsmith.train.loss.unroll import unroll
from tools.bench.cut import Embeddings

HERE = Path(__file__).parent
STEPS, COLUMNS = 3, 14
TOLERANCE = 1e-4  # of log-probabilities: float32, in another order of operations


def our_log_probs(
    drafter: Drafter, table: torch.Tensor, captured: torch.Tensor, tokens: torch.Tensor
) -> list[torch.Tensor]:
    """[T - k, D] for every step k: behind each position, and k given tokens further along the unroll.

    Args:
        table: the target's embeddings [V, H].
        captured: the target's captured states [1, T, F].
        tokens: [T + 1].
    """
    steps: list[list[torch.Tensor]] = [[] for _ in range(STEPS)]
    columns = captured.shape[1]
    for t in range(columns):
        drafting = drafting_of(drafter)
        drafting.set_rows([], 1)
        known = [tokens[: t + 2].tolist()]
        drafting.observe(Committed(Embeddings(table), known, captured[:, : t + 1], [t + 1]))
        steps[0].append(drafting.root_log_probs()[0])
        for k in range(1, min(STEPS, columns - t)):
            token = tokens[t + 1 + k].view(1, 1)
            steps[k].append(drafting.expand(torch.tensor([[k - 1]]), token, k)[0, 0])
    return [torch.stack(step) for step in steps]


def far_apart(name: str, ours: list[torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Prints the largest difference of every step; a shape or a missing step raises."""
    differences = [
        (step - theirs[f"step.{k}"].float().log_softmax(-1)[: len(step)]).abs().max().item()
        for k, step in enumerate(ours)
    ]
    print(f"{name}: log-probabilities of unroll steps 1 to {STEPS} differ by at most", end=" ")
    print(", ".join(f"{difference:.1e}" for difference in differences))
    return not max(differences) <= TOLERANCE


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{command[1]} ended with {done.returncode}")
    return done.stdout


def embeddings(target: Path) -> torch.Tensor:
    return load_file(target / "model.safetensors")["model.embed_tokens.weight"].float()


def speculators_differs(python: str, work: Path, exports: dict[str, Path], drafter: Drafter, target: Path) -> bool:
    config = drafter.config
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (COLUMNS + 1,), generator=generator)
    captured = torch.randn(1, COLUMNS, config.hidden_size * len(config.capture_layers), generator=generator)
    states = torch.tensor(config.capture_layers)
    save_file(
        {"captured": captured, "ids": tokens[None, 1:].contiguous(), "states": states}, work / "asked.safetensors"
    )
    ours = our_log_probs(drafter, embeddings(target), captured, tokens)
    differs = False
    asked: list[tuple[str, list]] = [("speculators", [])]
    if getattr(config, "fc_norm", False):
        print("speculators, our EAGLE format converted: left out, its converter (0.9.0) drops fc_norm's weights")
    else:
        asked.append(("vllm", ["--convert", target]))
    for engine, options in asked:
        answered = work / f"{engine}.safetensors"
        run(python, HERE / "speculators_logits.py", exports[engine], work / "asked.safetensors", answered, *options)
        name = "speculators, our EAGLE format converted" if options else "speculators, our export"
        differs = far_apart(name, ours, {key: step[0] for key, step in load_file(answered).items()}) or differs
    return differs


def vllm_differs(python: str, exports: dict[str, Path], drafter: Drafter) -> bool:
    found = json.loads(run(python, HERE / "vllm_configs.py", exports["vllm"], exports["speculators"]).splitlines()[-1])
    common = {
        "draft_vocab_size": drafter.config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(drafter.config.capture_layers),
        "norm_before_residual": False,
    }
    expected = {
        "EAGLEConfig": {"architectures": ["LlamaForCausalLMEagle3"]} | common,
        "SpeculatorsConfig": {"architectures": ["Eagle3LlamaForCausalLM"]} | common,
        "method": "eagle3",
    }
    print("vLLM's config classes:", "as exported" if found == expected else f"{found} instead of {expected}")
    return found != expected


def modelopt_differs(python: str, work: Path, tokenizer: Path) -> bool:
    """`tokenizer`: the folder of one, because a target without a tokenizer is refused."""
    run(python, HERE / "modelopt_export.py", work)
    for file in (*tokenizer.glob("tokenizer*"), *tokenizer.glob("chat_template*")):
        shutil.copy(file, work / "target")
    theirs = load_file(work / "answered.safetensors")
    script = HERE.parents[1] / "models/import_drafter.py"
    run(sys.executable, script, work / "drafter", "--target", work / "target", "--out", work / "imported")
    ours = our_log_probs(
        read_drafter(work / "imported"), embeddings(work / "target"), theirs["captured"], theirs["tokens"]
    )
    return far_apart("modelopt's export, imported", ours, theirs)


def nemo_differs(python: str, work: Path) -> bool:
    """The forward pass of a random ViSpec drafter over one picture, with and without more than one compressed token."""
    work.mkdir(parents=True)
    columns, picture, size, heads = 30, (7, 12), 32, 4  # first token and tokens of the picture
    differs = False
    for compressed_tokens in (1, 4):
        torch.manual_seed(compressed_tokens)
        shape = VispecConfig(
            size, 48, heads, heads, size // heads, 64, 64, (2,), 1e-5, 128, attention_bias=True,
            compressed_tokens=compressed_tokens,
        )  # fmt: skip
        drafter = build_drafter(shape, DraftVocab.full(shape.vocab_size), None).requires_grad_(False)
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # img_fc and norms are else nearly nothing
        config = {
            **shape.to_dict(), "num_hidden_layers": 1, "qkv_bias": True, "attention_bias": False,
            "vispec_num_query_tokens": compressed_tokens + 1, "rope_theta": shape.rope_parameters["rope_theta"],
        }  # fmt: skip
        (work / "config.json").write_text(json.dumps(config))
        embeddings, features = torch.randn(2, 1, columns, size)
        first, length = picture
        in_picture = torch.zeros(1, columns, dtype=torch.long)
        in_picture[:, first - 1 : first - 1 + length] = 1
        placed = PlacedRows(0, first, embeddings[0, first : first + length])
        following = DecoderInputs(embeddings, torch.arange(columns)[None], (placed,)).following()
        weights = {name: tensor for name, tensor in drafter.state_dict().items() if name not in ("d2t", "t2d")}
        asked = {"embeddings": following.embeddings, "features": features, "in_picture": in_picture}
        save_file(asked | {f"weight.{name}": tensor for name, tensor in weights.items()}, work / "asked.safetensors")
        run(
            python, HERE / "nemo_vispec.py", work / "config.json", work / "asked.safetensors",
            work / "answered.safetensors",
        )  # fmt: skip
        theirs = load_file(work / "answered.safetensors")["outputs"]
        text = (in_picture == 0).nonzero()[None, :, 1]
        inputs = DecoderInputs(embeddings, torch.arange(columns)[None], (placed,))
        [ours] = unroll(drafter, features, inputs, Columns(text, torch.ones_like(text)), steps=1)
        difference = float((ours[0] - theirs[0, text[0]]).abs().max())
        print(f"nemo-automodel's ViSpec, {compressed_tokens} compressed: outputs differ by at most {difference:.1e}")
        differs = differs or not difference <= TOLERANCE
    return differs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="of a trained EAGLE-3 drafter whose target is a folder")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--work", type=Path, required=True, help="folder of what is written; emptied first")
    for package in ("speculators", "vllm", "modelopt", "nemo"):
        parser.add_argument(f"--{package}", metavar="PYTHON")
    options = parser.parse_args()
    recipe = load_recipe(options.recipe, options.overrides)
    target, drafter = Path(recipe.target.model), read_drafter(Path(recipe.output_dir) / "drafter")
    shutil.rmtree(options.work, ignore_errors=True)
    exports = {engine: options.work / engine for engine in ("vllm", "speculators")}
    script = HERE.parents[1] / "models/export.py"
    for engine, folder in exports.items():
        asked = (options.recipe, *options.overrides, "export.dtype=float32", "--to", engine, "--out", folder)
        run(sys.executable, script, *asked)
    readers = {
        "speculators": lambda python: speculators_differs(python, options.work, exports, drafter, target),
        "vllm": lambda python: vllm_differs(python, exports, drafter),
        "modelopt": lambda python: modelopt_differs(python, options.work / "modelopt", target),
        "nemo": lambda python: nemo_differs(python, options.work / "nemo"),
    }
    failed = False
    for package, differs in readers.items():
        python = getattr(options, package)
        if python is None:
            print(f"{package}: left out, no --{package}")
        else:
            failed = differs(python) or failed
    sys.exit(failed)


if __name__ == "__main__":
    main()
