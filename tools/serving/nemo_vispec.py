"""Outputs of nemo-automodel's ViSpec drafter with given weights (`make readers`).

    python nemo_vispec.py CONFIG ASKED ANSWERED

CONFIG: the module's config as JSON. ASKED (safetensors): weight.NAME, embeddings [1, T, H] of the token behind each
column, features [1, T, H], in_picture [1, T]. ANSWERED: outputs [1, T, H].

The module has two norms that neither the published ViSpec nor any EAGLE-1 checkpoint has: before the first layer's
attention and behind the last layer. They are taken out.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# pyright: reportMissingImports=false


def main(config: Path, asked: Path, answered: Path) -> None:
    from nemo_automodel.components.speculative.eagle.vispec_draft import VispecDraftModel
    from transformers import PretrainedConfig

    model = VispecDraftModel(PretrainedConfig(**json.loads(config.read_text()))).float().eval()
    model.norm = torch.nn.Identity()
    for layer in model.layers:
        layer.input_layernorm = torch.nn.Identity()
    tensors = load_file(asked)
    weights = {name.removeprefix("weight."): tensor for name, tensor in tensors.items() if name.startswith("weight.")}
    report = model.load_state_dict(weights, strict=False)
    if report.unexpected_keys or report.missing_keys != ["embed_tokens.weight"]:  # which is given embeddings instead
        sys.exit(str(report))
    with torch.no_grad():
        outputs = model(
            tensors["embeddings"],
            tensors["features"],
            torch.ones(tensors["in_picture"].shape),
            tensors["in_picture"].bool(),
        )
    save_file({"outputs": outputs}, answered)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
