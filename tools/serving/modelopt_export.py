"""Makes an EAGLE-3 drafter with nvidia-modelopt's own exporter, and its logits (`make readers`).

    python modelopt_export.py OUT

OUT/target: a tiny random Llama. OUT/drafter: the export, rotary embedding as trained. OUT/drafter-yarn: the default
export, which names a YaRN scaling. OUT/answered.safetensors: captured [1, T, F], tokens [T + 1], and the module's
logits step.k [T - k, D] as in speculators_logits.py.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# pyright: reportMissingImports=false

STEPS, COLUMNS, VOCAB, DRAFT_VOCAB = 3, 14, 1024, 768


def main(out: Path) -> None:
    import modelopt.torch.speculative as mtsp
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "max_position_embeddings": 128,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, dtype="float32", **sizes, **heads))
    model.save_pretrained(out / "target")
    layer = {"use_aux_hidden_state": True, "use_last_layernorm": True, "intermediate_size": 40, **heads}
    mtsp.convert(model, [("eagle", {"eagle_architecture_config": layer | {"draft_vocab_size": DRAFT_VOCAB}})])
    model.eval()
    module = model.eagle_module
    # Norms as they are made, ones, would hide a norm in the wrong place. input_layernorm stays as it is: this module
    # applies it to the captured state, too, before hidden_norm, and engines do not.
    for name, parameter in module.named_parameters():
        if "norm" in name and "input_layernorm" not in name:
            parameter.data.uniform_(0.5, 1.5)
    kept = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    module.d2t.copy_(kept - torch.arange(DRAFT_VOCAB))
    model.get_exporter().export(out / "drafter-yarn")
    model.eagle_export_rope_scaling = None
    model.get_exporter().export(out / "drafter")

    width = model.config.hidden_size
    captured, tokens = torch.randn(1, COLUMNS, 3 * width), torch.randint(VOCAB, (COLUMNS + 1,))
    answered = {"captured": captured, "tokens": tokens}
    module._maybe_init_rope()
    with torch.no_grad():
        steps: list[list[torch.Tensor]] = [[] for _ in range(STEPS)]
        for t in range(COLUMNS):
            hidden = module.fc(captured[:, : t + 1])
            for k in range(min(STEPS, COLUMNS - t)):
                n = t + 1 + k
                mask = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]
                embeddings = model.get_input_embeddings()(tokens[None, 1 : n + 1])
                normed, raw, _ = module(hidden, embeddings, mask)
                steps[k].append(module.lm_head(normed[0, -1]))
                hidden = torch.cat([hidden, raw[:, -1:]], dim=1)
    save_file(
        answered | {f"step.{k}": torch.stack(logits) for k, logits in enumerate(steps)}, out / "answered.safetensors"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
