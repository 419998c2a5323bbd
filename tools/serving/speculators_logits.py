"""Logits of a drafter as the speculators package reads it, in an environment of its own (`make readers`).

    python speculators_logits.py FOLDER asked.safetensors answered.safetensors [--convert TARGET]

asked: captured [1, T, F], ids [1, T] (the token behind each position). answered: step.0, step.1, ... [1, T, D].
--convert: FOLDER is in the EAGLE format and is first converted by speculators' own converter, beside FOLDER.
"""

import sys

import torch
from safetensors.torch import load_file, save_file

# pyright: reportMissingImports=false

STEPS = 3


def converted(folder: str, target: str, states: list[int]) -> str:
    from speculators.convert.eagle.eagle3_converter import Eagle3Converter

    out = f"{folder}-converted"
    Eagle3Converter().convert(folder, out, target, validate=False, eagle_aux_hidden_state_layer_ids=states)
    return out


def main(folder: str, asked_file: str, answered_file: str, target: str | None) -> None:
    from speculators import SpeculatorModel, SpeculatorModelConfig

    asked = load_file(asked_file)
    if target is not None:
        folder = converted(folder, target, asked["states"].tolist())
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"  # the default runs on GPUs alone
    model = SpeculatorModel.from_pretrained(folder, config=config, torch_dtype=torch.float32).float().eval()
    if target is not None:  # speculators 0.9 leaves the table of a converted drafter uninitialised
        model._load_verifier_weights(overwrite_embed_tokens=True)
    steps: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: steps.append(output.detach().clone()))
    with torch.no_grad():
        model(asked["captured"], asked["ids"], torch.zeros_like(asked["ids"]), ttt_steps=STEPS)
    save_file({f"step.{k}": logits for k, logits in enumerate(steps)}, answered_file)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    last = arguments.index("--convert") if "--convert" in arguments else len(arguments)
    main(*arguments[:last], target=arguments[last + 1] if last + 1 < len(arguments) else None)
