"""speculators' training step for tools/bench/train_step.py, in an environment of its own (speculators 0.9.0)."""

import argparse
from typing import Any

import torch
from torch import nn
from train_step import layout, measured, optimiser_of

# pyright: reportMissingImports=false


def peer(wanted: argparse.Namespace) -> dict[str, Any]:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    on_cuda = wanted.device == "cuda"
    layer = LlamaConfig(
        hidden_size=wanted.hidden,
        intermediate_size=wanted.intermediate,
        num_attention_heads=wanted.heads,
        num_key_value_heads=wanted.kv_heads,
        head_dim=wanted.hidden // wanted.heads,
        num_hidden_layers=1,
        vocab_size=wanted.vocab,
        max_position_embeddings=wanted.seq,
        pad_token_id=None,
    )
    layer._attn_implementation = "simple_flex_attention" if on_cuda else "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=wanted.draft_vocab,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=[2, 4, 6],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=wanted.ttt)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    device, dtype = wanted.device, getattr(torch, wanted.dtype)
    model = Eagle3DraftModel(config)
    for module in (model.lm_head, model.verifier_lm_head, model.embed_tokens):  # made of NaN, to be loaded
        nn.init.normal_(module.weight, std=0.02)
    if model.use_draft_vocab:
        model.t2d[: wanted.draft_vocab] = True  # type: ignore[index]
    model.to(device)
    model.lm_head.weight.requires_grad_(not wanted.freeze_head)

    lengths, spans = layout(wanted)
    captured = torch.randn(1, wanted.seq, 3 * wanted.hidden, device=device, dtype=dtype)
    last = torch.randn(1, wanted.seq, wanted.hidden, device=device, dtype=dtype)
    ids = torch.randint(0, wanted.draft_vocab, (1, wanted.seq), device=device)
    mask = torch.zeros(1, wanted.seq, dtype=torch.bool, device=device)
    for first, end in spans:
        mask[0, first:end] = True
    document = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])[None].to(device)
    position = torch.cat([torch.arange(length) for length in lengths])[None].to(device) + 1
    losses = resolve_loss_config("kl_div", "fused" if on_cuda else "eager")  # its defaults
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = optimiser_of(parameters)

    def step() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            _, loss, _ = model(
                captured,
                ids,
                document,
                mask,
                position,
                last,
                ttt_steps=wanted.ttt,
                ttt_step_loss_decay=0.8,
                loss_config=losses,
            )
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    return measured(wanted, step)
