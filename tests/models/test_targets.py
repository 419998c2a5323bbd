"""Targets of many families: their states, their trees far beyond sliding windows, what they say; and who is refused.

Tiny random weights in float32. One forward over many tokens and forwards over fewer round differently: by 1e-5 of the
largest logit at most in these families, so that 1e-4 leaves room for other machines. One key too many or too few in a
window changes far more."""

import copy
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache
from transformers.integrations import sdpa_attention

from draftsmith.data_gen.answers.generators import GenerationSettings
from draftsmith.eval.decoding.policies import Chain, Eagle2, PolicyProposer
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.models.alignment import columns_of
from draftsmith.models.causal_lm import CausalLMDrafting
from draftsmith.models.draft_tree import Committed, DraftTree
from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.families import usable_positions
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.formats.eagle_format import eagle_config, read_config
from draftsmith.models.sampling import GREEDY
from draftsmith.models.sizes import attention_shapes, cache_bytes_per_token, target_forward_bytes, target_size
from draftsmith.models.target import Target
from draftsmith.models.target_attention import attend_grouped
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.target_session import TargetSession, behind
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.train.loss.unroll import TrainingTimeTest, teacher_of
from tests.conftest import make_config, make_target, make_tokenizer
from tests.decoding import decode, decode_batch, write_answers
from tests.pairs import greedy, untaught
from tests.thinning import a_few

DEMO = Path(__file__).parents[2] / "recipes/demo_target"
STOP = 4
WINDOW = 12
MIXED = ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]
SLIDING = {"sliding_window": WINDOW, "layer_types": MIXED}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# Its full layers have wider heads, and fewer of them hold keys and values.
GEMMA4 = {
    **{"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"]},
    **{"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0},
    **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 320},
}
DEEPSEEK = {
    **{"head_dim": 4, "num_key_value_heads": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
LATER = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3}
PLAIN = ("llama", "qwen2", "qwen3", "gemma", "glm4", "smollm3", "starcoder2", "gpt_neox", "gpt2")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in PLAIN},
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mistral, all layers slide": ("mistral", {"sliding_window": WINDOW}),
    "ministral, all layers slide": ("ministral", {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 7}),
    "mixtral": ("mixtral", {"sliding_window": None} | EXPERTS),
    "qwen2, some layers slide": ("qwen2", {"use_sliding_window": True} | SLIDING),
    "qwen2, later layers slide": ("qwen2", LATER),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "gemma2": ("gemma2", {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0} | SLIDING),
    "gemma3": ("gemma3_text", SLIDING),
    "gemma4": ("gemma4_text", GEMMA4),
    "gpt_oss": ("gpt_oss", EXPERTS | SLIDING),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "olmo3": ("olmo3", SLIDING),
    "granite": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 8.0, "residual_multiplier": 0.5}),
    "hyperclovax": ("hyperclovax", {"logits_scaling": 0.25}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {"logit_scale": 0.25} | SLIDING),
    "exaone4": ("exaone4", SLIDING),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
}
SCALES = {"gemma": 32**0.5, "gemma2": 32**0.5, "gemma3": 32**0.5, "gemma4": 32**0.5, "granite": 3.0}
# Those that `make test` reads: one of each kind of cache, mask and scale.
FEW = ("llama", "mistral, all layers slide", "gemma2", "gemma4", "gpt_oss", "hyperclovax", "cohere", "gpt2")
everywhere = pytest.mark.parametrize("name", a_few(FAMILIES, *FEW))


@cache
def target_of(name: str) -> Target:
    family, overrides = FAMILIES[name]
    return Target(make_target(family, **overrides))


def some_tokens(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(5, 320) for _ in range(count)]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@everywhere
@torch.no_grad()
def test_states_and_embeddings_are_those_of_output_hidden_states(name: str, tmp_path: Path) -> None:
    target = target_of(name)
    ids = torch.tensor([some_tokens(40, 1), some_tokens(25, 2) + [0] * 15])
    theirs = target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    assert len(theirs) == target.num_layers + 1
    # State L, behind the final norm, is captured like any other: in the pass of training, and where a pass ends early.
    for reads in (target.capture_layers, (0, 2, target.num_layers), (target.num_layers,)):
        states, expected = target.states(ids, reads), torch.cat([theirs[layer] for layer in reads], dim=-1)
        assert torch.equal(states.captured, expected) and torch.equal(states.last, theirs[-1])
        assert torch.equal(target.captured_states(ids, reads), expected)
        alone = target.states(ids[1:, :25], reads).captured  # padding changes nothing but rounding
        assert_close(expected[1, :25], alone[0])
    assert_close(target.logits(theirs[-1]), target.model(ids, use_cache=False).logits)
    # Drafters read embeddings as the target's first layer does. To GPT-2's, learned positions are added.
    if name != "gpt2":
        torch.testing.assert_close(target.embed(ids), theirs[0], rtol=1e-5, atol=1e-6)
    target.model.config.save_pretrained(tmp_path)
    for scale in (target.embedding_scale, TargetFiles(TargetSection(model=str(tmp_path))).planned_embedding_scale):
        assert scale == pytest.approx(SCALES.get(name, 1.0), rel=1e-5)


@everywhere
@torch.no_grad()
def test_trees_equal_their_paths_read_alone_also_beyond_the_window(name: str) -> None:
    """From a prompt within the window to far beyond it, by trees and single tokens in turn."""
    target = target_of(name)
    committed = some_tokens(7, 3)
    reads = (*target.capture_layers, target.num_layers)  # those of EAGLE-3, and that of EAGLE-1

    def read_alone(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits behind the last token, captured states of all) by transformers alone, without any cache."""
        out = target.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        return out.logits[0, -1], torch.cat([out.hidden_states[layer][0] for layer in reads], dim=-1)

    session = target.session(reads)
    logits, captured = session.prefill([committed])
    for seed in range(4):
        logits_alone, captured_alone = read_alone(committed)
        assert_close(logits[0], logits_alone)
        assert captured is not None
        assert_close(captured[0], captured_alone[-captured.shape[1] :])

        chance = random.Random(seed)
        parents = [-1, *sorted(chance.randrange(i) for i in range(1, 14))]
        if seed == 2:  # a path longer than the window, each of its nodes with a sibling before it
            parents = [-1, *(2 * (i // 2) for i in range(32))]
        tokens = some_tokens(len(parents), 10 + seed)
        tree = DraftTree(torch.tensor([tokens]), torch.tensor([parents]), depth=len(parents))
        logits_BNV, captured_BNF = session.verify(tree)
        assert captured_BNF is not None
        deepest = int(tree.depths.argmax())
        for node in {1, 9, deepest - 1, deepest}:
            path = tree.ancestors[0, node].nonzero().flatten()
            logits_alone, captured_alone = read_alone(committed + tree.tokens[0, path].tolist())
            assert_close(logits_BNV[0, node], logits_alone)
            assert_close(captured_BNF[0, node], captured_alone[-1])
        path = tree.ancestors[0, deepest].nonzero().flatten()
        session.commit([len(path)], path[None])
        committed += tree.tokens[0, path].tolist()
        single = DraftTree.chains([some_tokens(1, 20 + seed)], target.device)
        logits_BNV, captured = session.verify(single)
        session.commit([1])
        committed += single.tokens[0].tolist()
        logits = logits_BNV[:, 0]
    assert len(committed) > 2 * WINDOW
    fresh, _ = target.session().prefill([committed])
    assert_close(logits, fresh)


# Families that differ in their caches, masks and positions. That trees equal their paths is tested everywhere.


@pytest.mark.parametrize("name", a_few(FAMILIES, "gemma2", "gpt_oss", "gpt2"))
def test_greedy_decoding_and_regeneration_equal_generate(name: str) -> None:
    target = target_of(name)
    window = FAMILIES[name][1].get("sliding_window")
    assert window is None or (target.kinds.window, target.config.sliding_window) == (WINDOW, WINDOW)
    drafting = PolicyProposer(FeatureDrafting(untaught("eagle3", target)), Eagle2(nodes=12, draft_calls=3, top_k=4))
    prompts = [some_tokens(5, 4), (some_tokens(9, 5) * 4)[:33]]  # within the window at first, and beyond it
    expected = [greedy(target, prompt, 16, STOP) for prompt in prompts]
    for prompt, answer, lookup in zip(prompts, expected, (None, PromptLookup(6, target.device)), strict=True):
        assert decode(target, drafting, prompt, {STOP}, 16).token_ids == answer
        assert decode(target, lookup, prompt, {STOP}, 16).token_ids == answer
    settings = GenerationSettings(16, 100, (STOP,), GREEDY)
    written = write_answers(target.model, iter(enumerate(prompts)), settings)
    assert {key: tokens for key, tokens, *_ in written} == dict(enumerate(expected))


IGNORED = [
    ("llama", {"use_sliding_window": False}),
    ("llama", {"layer_types": MIXED}),
    ("qwen2", {"use_sliding_window": False}),
    *((family, {}) for family in ("gemma", "granite", "glm4", "olmo2", "gpt2", "minimax_m2")),
]


@pytest.mark.parametrize(("family", "stray"), a_few(IGNORED, IGNORED[1], IGNORED[2], IGNORED[3]))
def test_a_window_that_the_decoder_ignores_is_ignored(family: str, stray: dict[str, Any]) -> None:
    """Drafted, the answers of the same weights without the key."""
    experts = EXPERTS if family == "minimax_m2" else {}
    target = Target(make_target(family, sliding_window=WINDOW, **stray, **experts))
    assert (target.kinds.window, target.kinds.mixed) == (None, False)
    assert getattr(target.config, "sliding_window", None) in (WINDOW, None)  # what is tried leaves no trace
    prompt = some_tokens(9, 0) * 3
    answer = greedy(Target(make_target(family, **experts)), prompt, 16, STOP)
    assert decode(target, PromptLookup(6, target.device), prompt, {STOP}, 16).token_ids == answer


def test_a_decoder_that_masks_or_changes_logits_in_its_own_way_is_refused() -> None:
    model = make_target("mistral", sliding_window=WINDOW)
    decode_as_usual, head = model.model.forward, model.forward

    def two_tokens_at_most(input_ids: torch.Tensor, attention_mask: Any = None, **others: Any) -> Any:
        if attention_mask is None:
            seen = torch.ones(input_ids.shape[1], input_ids.shape[1]).tril().triu(-1).bool()
            attention_mask = torch.zeros(seen.shape).masked_fill(~seen, -1e30)[None, None]
        return decode_as_usual(input_ids, attention_mask=attention_mask, **others)

    def changed(*args: Any, **kwargs: Any) -> Any:
        out = head(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    model.forward = changed
    with pytest.raises(UserError, match="changes its logits after the head"):
        Target(model)
    model.forward, model.model.forward = head, two_tokens_at_most
    with pytest.raises(UserError, match=r"masks its layers neither by the window of 12 tokens .* nor without one"):
        Target(model)


def test_layers_of_several_shapes_are_counted_each() -> None:
    target = target_of("gemma4")
    shapes = [(4, 2, 8), (4, 1, 16)] * 3 + [(4, 1, 16)]
    assert attention_shapes(target.config) == shapes
    shape = Eagle3Config.for_target(target.config, target.vocab_size, target.capture_layers, 200)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (4, 1, 16)
    size = target_size(target.model.config, TargetSection(model=""))
    cache = DynamicCache(config=target.config)
    target.model(torch.tensor([some_tokens(5, 1)]), **behind(target.model, cache))
    layers: list[Any] = cache.layers
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert cache_bytes_per_token(target.config, size) * 5 == held
    assert target_forward_bytes(target.config, size, 2, 30, 3) > 0


# Who is refused, and when.

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {}, "linear_attention layers"),
    ("falcon_h1", {}, "hybrid layers"),
    ("rwkv", {}, "recurrent layers"),
    ("llama4_text", {}, "chunked_attention layers"),
    ("mistral", {"per_layer_config": {0: {"sliding_window": 8}}}, r"windows of several lengths, \[8, "),
    ("t5", {}, "encoder-decoder"),
]


@pytest.mark.parametrize(("family", "overrides", "reason"), REFUSED, ids=[family for family, *_ in REFUSED])
def test_what_cannot_be_rolled_back_is_refused_by_name_before_weights_are_read(
    tmp_path: Path, family: str, overrides: dict[str, Any], reason: str
) -> None:
    AutoConfig.for_model(family, **overrides).save_pretrained(tmp_path)  # and no weights at all
    make_tokenizer().save_pretrained(tmp_path)
    files = TargetFiles(TargetSection(model=str(tmp_path)))
    for read in (lambda: files.config, lambda: files.tokenizer, lambda: files.size, files.load_model):
        with pytest.raises(UserError, match=rf"^target\.model: {family} .*{reason}"):
            read()


# Positions as distances between places in the cache: siblings would stand behind each other.
UNABLE: dict[str, tuple[dict[str, Any], str]] = {
    "mpt": ({"d_model": 32, "n_layers": 7, "n_heads": 4}, "does not follow the mask or the positions"),
    "bloom": ({"n_layer": 7, "n_head": 4}, "cannot verify draft trees: ValueError"),
    "bert": ({"is_decoder": True}, "no list of its 7 decoder layers"),
}


@pytest.mark.parametrize("family", UNABLE)
def test_decoders_that_cannot_verify_trees_are_refused(family: str) -> None:
    overrides, reason = UNABLE[family]
    with pytest.raises(UserError, match=reason):
        Target(make_target(family, **overrides))


@pytest.mark.parametrize("dtype", a_few(["auto", "float16"], "auto"))
def test_the_shipped_target_is_accepted_in_every_precision(dtype: Any) -> None:
    """A trained one: to it some tokens mean nearly the same, and what they change is no measure of rounding."""
    target = Target(TargetFiles(TargetSection(model=str(DEMO), dtype=dtype, device="cpu")).load_model())
    assert target.dtype == (torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))


def test_weights_that_are_not_finite_are_told_from_numbers_beyond_a_precision() -> None:
    model = make_target("gemma2", **FAMILIES["gemma2"][1])
    weight = model.model.layers[3].mlp.up_proj.weight
    weight.data *= 2e4
    with pytest.raises(UserError, match=r"not finite in float16; set target\.dtype: bfloat16"):
        Target(copy.deepcopy(model).half())
    weight.data[5, 7] = float("nan")
    with pytest.raises(UserError, match=r"weights are not finite \(model\.layers\.3\.mlp\.up_proj\.weight\)"):
        Target(model)


# Forms of a checkpoint.


def test_forms_of_a_checkpoint_that_are_refused(tmp_path: Path) -> None:
    model = make_target(num_layers=1)
    model.model.save_pretrained(tmp_path / "headless")  # the decoder alone: its head would be random
    for name in ("headless", "pickled"):
        model.config.save_pretrained(tmp_path / name)
    AutoConfig.for_model("clip").save_pretrained(tmp_path / "tower")
    model.save_pretrained(tmp_path / "torn")
    torn = (tmp_path / "torn/model.safetensors").read_bytes()[:-1000]
    for name, content in (
        ("torn/model.safetensors", torn),
        ("pickled/pytorch_model.bin", b"PK"),
        ("adapter/adapter_config.json", b'{"peft_type": "LORA"}'),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for name, reason in {
        "pickled": r"pickled weights only \(pytorch_model.bin\)",
        "": "has no config.json",
        "adapter": "target.adapter",
        "headless": r"lacks 1 of its tensors \(lm_head.weight\)",
        "torn": "cannot load",
        "tower": "no causal LM of family clip",
    }.items():
        with pytest.raises(UserError, match=reason):
            TargetFiles(TargetSection(model=str(tmp_path / name))).load_model()


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 32,
}
SAME_FACTORS = LONGROPE | {"short_factor": LONGROPE["long_factor"]}


@pytest.mark.parametrize(
    ("family", "settings", "usable"),
    [
        ("llama", {"rope_parameters": LONGROPE}, 32),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, 64),  # as Phi-3 is published
        ("llama", {"rope_parameters": SAME_FACTORS}, 512),
        ("phimoe", {"rope_parameters": SAME_FACTORS | {"short_mscale": 1.0, "long_mscale": 1.2}}, 32),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}, 512),
        ("gemma3_text", {}, 512),
    ],
)
def test_usable_positions_end_where_the_rotation_changes(family: str, settings: dict[str, Any], usable: int) -> None:
    assert usable_positions(make_config(family, max_position_embeddings=512, **settings)) == usable


BASE = {"rope_theta": 5000.0}
YARN = BASE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ROTATIONS: dict[str, dict[str, Any]] = {
    **{name: BASE | {"rope_type": name, "factor": 4.0} for name in ("linear", "dynamic")},
    "default": BASE | {"rope_type": "default"},
    "yarn": YARN,
    "yarn, as gpt-oss and DeepSeek": YARN | {"truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5},
    "longrope": BASE | LONGROPE,
    "llama3": BASE
    | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 64},
}
HALF = {"partial_rotary_factor": 0.5}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama, {name}": ("llama", {"rope_parameters": rope}) for name, rope in ROTATIONS.items()},
    **{
        f"glm4_moe, half {name}": (
            "glm4_moe",
            FAMILIES["deepseek_v3"][1] | {"head_dim": 8, "rope_parameters": rope | HALF} | {"first_k_dense_replace": 1},
        )
        for name, rope in ROTATIONS.items()
        if name in ("dynamic", "yarn")
    },
    "phi3, part longrope": (  # Phi-4-mini
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "rope_parameters": LONGROPE | {"short_factor": [1.0] * 3, "long_factor": [1.0, 2.0, 4.0]},
        },
    ),
    "gpt_neox, a quarter": ("gpt_neox", {"rope_parameters": ROTATIONS["default"] | {"partial_rotary_factor": 0.25}}),
    "gemma4": FAMILIES["gemma4"],  # proportional
    "gpt2": FAMILIES["gpt2"],
}


@pytest.mark.parametrize(
    "name",
    a_few(TARGETS, "llama, default", "llama, yarn", "glm4_moe, half dynamic", "phi3, part longrope", "gemma4"),
)
def test_a_drafter_is_trained_drafts_and_is_exported_whatever_rotation_its_target_has(name: str) -> None:
    family, settings = TARGETS[name]
    target = Target(make_target(family, **settings))
    drafter = untaught("eagle3", target)
    ids = torch.tensor([some_tokens(12, 1)])
    states, columns = target.states(ids, drafter.config.capture_layers), columns_of(torch.ones_like(ids), 3)
    teacher = teacher_of(target, states.last, ids, columns, drafter.vocab)
    TrainingTimeTest(drafter, 3, 1.0)(states.captured, target.inputs(ids), columns, teacher).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters())
    drafting = PolicyProposer(FeatureDrafting(drafter), Eagle2(nodes=8, draft_calls=3, top_k=3))
    prompt = some_tokens(5, 2)
    assert decode(target, drafting, prompt, {-1}, 8).token_ids == greedy(target, prompt, 8)

    rope, scalings = drafter.config.rope_parameters, ("linear", "yarn", "llama3", "DeepSeek")
    assert (rope["rope_type"] != "default") == (name.split(" ")[-1] in scalings)
    config = eagle_config(drafter.config, "", torch.float32)
    for spelling in ("rope_parameters", "rope_scaling"):  # of transformers 5, and of 4
        told = {key: value for key, value in config.items() if key != spelling}
        tensors: dict[str, Any] = dict.fromkeys(("d2t", "lm_head.weight", "norm.weight"))
        assert read_config(told, target.config, tensors).rope_parameters == rope


@torch.no_grad()
def test_up_to_where_longrope_changes_nothing_depends_on_neighbours_or_drafts() -> None:
    """The longest of 32 tokens, trees that would reach beyond, and other rows beside them: each as by itself."""
    target = Target(make_target(rope_parameters=LONGROPE))
    rows = [some_tokens(count, count) for count in (32, 26, 20)]
    together = target.states(torch.tensor([row + [0] * (32 - len(row)) for row in rows])).last
    for row, states in zip(rows, together, strict=True):
        torch.testing.assert_close(states[: len(row)], target.states(torch.tensor([row])).last[0], rtol=1e-4, atol=1e-4)
    changed = target.states(torch.tensor([rows[0] + [7]])).last[0, :32]  # a token more, and none is as it was
    assert (changed - together[0]).norm() > 0.1 * together[0].norm()

    prompts, budgets = [row[:n] for row, n in zip(rows, (28, 24, 18), strict=True)], [4, 8, 14]
    expected = [greedy(target, prompt, budget) for prompt, budget in zip(prompts, budgets, strict=True)]
    tree = Eagle2(nodes=12, draft_calls=5, top_k=4)
    drafter = PolicyProposer(FeatureDrafting(untaught("eagle3", target)), tree)
    small = PolicyProposer(CausalLMDrafting(Target(make_target(rope_parameters=LONGROPE, seed=1))), tree)
    for proposer in (None, PromptLookup(6, target.device), drafter, small):
        answers = decode_batch(target, proposer, prompts, {-1}, budgets)
        assert [answer.token_ids for answer in answers] == expected
    with pytest.raises(ValueError, match="28 prompt tokens and 5 new ones exceed the target's 32 positions"):
        decode_batch(target, None, prompts[:1], {-1}, 5)


CANNOT_BE: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": None}}, "embeddings None"),
    ("llama", {"rope_parameters": BASE | {"rope_type": "banana"}}, "cannot build a llama .*'banana'"),
    ("gpt2", {"n_head": -4}, r"the config.json of .* has .*n_head"),  # which divides, too
]


@pytest.mark.parametrize(("family", "keys", "reason"), CANNOT_BE)
def test_a_size_or_rotation_that_cannot_be_is_refused(
    family: str, keys: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_config(family).to_dict() | keys))
    files = TargetFiles(TargetSection(model=str(tmp_path)))
    with pytest.raises(UserError, match=reason):
        Eagle3Config.for_target(files.config, 320, (1, 2, 3), 320)
        _ = files.size


def test_a_drafter_takes_the_rotation_of_full_attention() -> None:
    bases = {"full_attention": 7000.0, "sliding_attention": 90.0}
    rope = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    config = make_config("gemma3_text", rope_parameters=rope)
    assert Eagle3Config.for_target(config, 320, (1, 2, 3), 320).rope_parameters["rope_theta"] == 7000.0


def test_drafted_tokens_that_were_accepted_are_not_read_again() -> None:
    lm, fed = Target(make_target(num_layers=2), (0,)), list[int]()
    lm.decoder.register_forward_pre_hook(
        lambda _module, _args, inputs: fed.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    drafting, text = CausalLMDrafting(lm), [7, 8, 9]
    drafting.set_rows([], 1)
    for accepted in (2, 0, 3):
        drafting.observe(Committed(lm, [text], None, []))
        for depth, token in enumerate((20, 21, 22), start=1):
            drafting.expand(torch.tensor([[depth - 1]]), torch.tensor([[token]]), depth)
        text = [*text, *(20, 21, 22)[:accepted], 30]
    assert fed == [3, 1, 1, 1, *[1] * 4, *[1] * 4]  # the prompt; afterwards each round's root alone


def test_learned_positions_end_and_drafting_does_not_fall_over_their_edge() -> None:
    """The target's answer fills its 32 positions; the small LM has as many, and drafts beyond them."""
    target, small = (Target(make_target(family, max_position_embeddings=32)) for family in ("llama", "gpt2"))
    prompts = [[7, 8, 9], [10, 11, 12, 13, 14]]
    for proposer in (PolicyProposer(CausalLMDrafting(small), Chain(6)), None):
        answers = decode_batch(target, proposer, prompts, {-1}, 27)
        assert [len(prompt + out.token_ids) for prompt, out in zip(prompts, answers, strict=True)] == [30, 32]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mistral"])
def test_trees_are_attended_without_copies_of_keys(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by transformers' own attention, also in sliding windows and beside shorter rows."""
    settings = {"sliding_window": 6} if family in ("gemma3_text", "mistral") else {}
    target = Target(make_target(family, num_layers=3, **settings), capture_layers=(0,))
    tokens, depths = torch.tensor([[11, 12, 13], [14, 15, 16]]), torch.tensor([[0, 1, 1], [0, 1, 2]])
    seen = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]).bool()
    found = []
    for grouped in (False, True):
        if grouped:
            attend_grouped(target.decoder)
            monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda *_: pytest.fail("keys were copied"))
        session = TargetSession(target, (1,))
        first, _ = session.prefill([list(range(5, 21)), [30, 31, 32]])
        found.append((first, *session.append(tokens, depths, seen)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
