"""Runs llama.cpp's convert_hf_to_gguf.py, which then also takes home-made tokenizers that split text as GPT-2 does.

    python run_converter.py <llama.cpp> <arguments of convert_hf_to_gguf.py>

The converter knows the regular expression of a byte-level BPE tokenizer by a hash over published tokenizers, and
refuses all others. tokenizers' ByteLevel pre-tokenizer with its own regex is GPT-2's, whatever the vocabulary is.
"""

import json
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    checkout = sys.argv[1]
    # As if it was called itself: its own packages are found first.
    sys.argv = [str(Path(checkout) / "convert_hf_to_gguf.py"), *sys.argv[2:]]
    sys.path[0] = checkout
    text_model = import_module("conversion.base").TextModel
    known = text_model.get_vocab_base_pre
    text_model.get_vocab_base_pre = lambda model, tokenizer: _pre_tokenizer(known, model, tokenizer)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _pre_tokenizer(known: Any, model: Any, tokenizer: Any) -> str:
    """llama.cpp's name of the regex."""
    try:
        return known(model, tokenizer)
    except NotImplementedError:
        parts = json.loads(tokenizer.backend_tokenizer.to_str())
        split = parts["pre_tokenizer"] or {}
        plain = split.get("type") == "ByteLevel" and split.get("use_regex") and not split.get("add_prefix_space")
        if parts["normalizer"] is None and plain:
            return "gpt-2"
        raise


if __name__ == "__main__":
    main()
