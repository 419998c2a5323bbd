"""A tiny untrained target of Emu3's classes, with words, a null token and 16 codes."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Emu3Config, Emu3ForConditionalGeneration, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<image>", "<null>"]
WORDS = ["a", "red", "blue", "one", "two"]
CODES = [f"<|visual token {i:06d}|>" for i in range(16)]
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, *WORDS, *CODES])}
TEMPLATE = (
    "<bos> {{ messages[0]['content'] }} <image>{% if messages|length > 1 %} {{ messages[1]['content'] }}{% endif %}"
)


def make_image_target(directory: Path, seed: int = 0) -> Path:
    """Writes it, tokenizer included."""
    torch.manual_seed(seed)
    config = Emu3Config(
        vq_config={
            "codebook_size": len(CODES), "embed_dim": 4, "latent_channels": 4, "double_latent": False, "in_channels": 3,
            "out_channels": 3, "temporal_downsample_factor": 1, "base_channels": 32, "channel_multiplier": [1, 1],
            "num_res_blocks": 1, "attn_resolutions": [], "hidden_size": 32, "num_attention_heads": 1,
        },
        text_config={
            "vocab_size": len(VOCABULARY), "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
            "num_key_value_heads": 1, "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3, "attention_dropout": 0.0,
        },
        vocabulary_map={name: VOCABULARY[name] for name in CODES} | {"<image>": VOCABULARY["<image>"]},
    )  # fmt: skip
    model = Emu3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight[: VOCABULARY[CODES[0]]] = 0  # it writes codes, not words
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Codes contain blanks, so they are added tokens.
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        extra_special_tokens=["<image>", "<null>"], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.add_tokens(CODES)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return directory
