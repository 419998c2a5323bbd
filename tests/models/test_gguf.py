"""drafter.gguf: what llama.cpp computes from it, read back, and refused where llama.cpp would serve another drafter."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
import gguf

from draftsmith.models.drafters import build_drafter
from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.formats import gguf_file, llama_cpp
from draftsmith.models.formats.engines import ENGINES, problems
from draftsmith.models.formats.exporting import Source, export, prove, readers
from draftsmith.models.formats.folder import Folder
from draftsmith.models.formats.foreign import Foreign, probe_log_probs
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError

ENGINE = ENGINES["llama.cpp"]
V, H, LAYERS = 64, 32, 8
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0},
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    },
}


def make_source(directory: Path = Path("runs/drafter"), **changed: Any) -> Source:
    """A random drafter: heads of 12 dimensions, so that their sum is not the hidden size; every norm is random."""
    shape = Eagle3Config(
        **{
            "hidden_size": H,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "vocab_size": V,
            "draft_vocab_size": 40,
            "capture_layers": (2, 4, 5),
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 256,
            **changed,
        }
    )
    torch.manual_seed(5)
    ids = torch.randperm(V)[: shape.draft_vocab_size].sort().values
    vocab = DraftVocab(ids, V)
    drafter = build_drafter(shape, vocab, None)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3, mean=float(parameter.ndim == 1))
    target = {"model": "some/target", "num_layers": LAYERS, "hidden_size": H, "vocab_size": V}
    return Source(directory, shape, target, vocab, drafter.state_dict())


def exported(source: Source, out: Path, dtype: torch.dtype | None = None, target_gguf: Path | None = None) -> Path:
    assert readers(source, ENGINE) == [ENGINE]
    export(source, ENGINE, out, dtype, {}, target_gguf)
    return out / gguf_file.NAME


def drafted(source: Source) -> torch.Tensor:
    return probe_log_probs(Foreign(source.shape, source.vocab, source.tensors, None).drafter(None))


def as_llama_cpp_drafts(path: Path, steps: int = 3, columns: int = 12) -> torch.Tensor:
    """[steps, Vd] log-probabilities of `probe_log_probs`'s chain, as src/models/eagle3.cpp computes them from the file.

    In float64, one token after the other.
    """
    reader = gguf.GGUFReader(path)
    kv = {key: field.contents() for key, field in reader.fields.items()}
    w = {each.name: torch.from_numpy(each.data.copy()) for each in reader.tensors}
    w = {name: tensor if name == "d2t" else tensor.double() for name, tensor in w.items()}
    heads, groups = kv["eagle3.attention.head_count"], kv["eagle3.attention.head_count_kv"]
    dim, hidden = kv["eagle3.attention.key_length"], kv["eagle3.embedding_length"]
    vocab = kv["eagle3.vocab_size"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean() + kv["eagle3.attention.layer_norm_rms_epsilon"]).rsqrt() * w[name]

    def rope(x: torch.Tensor, position: int) -> torch.Tensor:  # LLAMA_ROPE_TYPE_NORM: neighbours
        turned = x.clone()
        for i in range(dim // 2):
            theta = position * kv["eagle3.rope.freq_base"] ** (-2 * i / dim)
            angle = w.get("rope_freqs.weight", torch.ones(dim).double())[i].reciprocal() * theta
            a, b = x[:, 2 * i], x[:, 2 * i + 1]
            turned[:, 2 * i] = a * angle.cos() - b * angle.sin()
            turned[:, 2 * i + 1] = a * angle.sin() + b * angle.cos()
        return turned

    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def decode(embedding: torch.Tensor, g: torch.Tensor, position: int) -> torch.Tensor:
        """The output before the final norm."""
        x = torch.cat((norm(embedding, "blk.0.attn_norm.weight"), norm(g, "blk.0.attn_norm_2.weight")))
        q = rope((w["blk.0.attn_q.weight"] @ x).view(heads, dim), position)
        keys.append(rope((w["blk.0.attn_k.weight"] @ x).view(groups, dim), position))
        values.append((w["blk.0.attn_v.weight"] @ x).view(groups, dim))
        out = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = torch.stack([q[head] @ key[group] for key in keys]) / dim**0.5
            out.append(scores.softmax(0) @ torch.stack([value[group] for value in values]))
        inner = g + w["blk.0.attn_output.weight"] @ torch.cat(out)
        y = norm(inner, "blk.0.ffn_norm.weight")
        gate = torch.nn.functional.silu(w["blk.0.ffn_gate.weight"] @ y)
        return inner + w["blk.0.ffn_down.weight"] @ (gate * (w["blk.0.ffn_up.weight"] @ y))

    def logits(prenorm: torch.Tensor) -> torch.Tensor:
        drafts = w["output.weight"] @ norm(prenorm, "output_norm.weight")
        if "d2t" not in w:
            return drafts
        return torch.full((vocab,), -torch.inf).double().index_put_((w["d2t"],), drafts)

    generator = torch.Generator().manual_seed(0)  # what probe_log_probs draws
    table = torch.randn(vocab, hidden, generator=generator).double()
    features = torch.randn(1, columns, 3 * hidden, generator=generator)[0].double()
    tokens = torch.randint(vocab, (1, columns + 1), generator=generator)[0]
    for c in range(columns):
        prenorm = decode(table[tokens[c + 1]], w["fc.weight"] @ features[c], c)
    found = [logits(prenorm)]
    for step in range(1, steps):
        prenorm = decode(table[found[-1].argmax()], prenorm, columns - 1 + step)
        found.append(logits(prenorm))
    return torch.stack(found).log_softmax(-1)


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_parameters": ROPES["plain"], "draft_vocab_size": V},
        {"rope_parameters": ROPES["linear"]},
        {"rope_parameters": ROPES["llama3"], "draft_vocab_size": V},
        {"embedding_scale": 9.0, "rms_norm_eps": 0.3},  # llama.cpp embeds by the target's unscaled table
    ],
    ids=str,
)
def test_llama_cpp_would_draft_what_the_drafter_does(changed: dict[str, Any], tmp_path: Path) -> None:
    source = make_source(**changed)
    found = as_llama_cpp_drafts(exported(source, tmp_path / "out"))
    # float32 against float64, and frequencies through a divisor in float32
    torch.testing.assert_close(found[:, source.vocab.target_ids].float(), drafted(source), rtol=0, atol=5e-5)
    assert found.exp().sum(-1).allclose(torch.ones(3).double())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_file_reads_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype | None) -> None:
    source = make_source(rope_parameters=ROPES["llama3"])
    found = gguf_file.read_gguf(exported(source, tmp_path / "out", dtype))
    back = gguf_file.read_back(found, source.shape)
    assert back.tensors.keys() == source.tensors.keys()
    for name, tensor in source.tensors.items():
        rounded = tensor.to(dtype or tensor.dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor
        assert torch.equal(back.tensors[name].to(tensor.dtype), rounded), name
    assert found.config["eagle3.target_layers"] == [2, 4, 5]
    # A drafter needs no tokenizer; llama.cpp takes the number of tokens from this key where the model is "none".
    assert (found.config["tokenizer.ggml.model"], found.config["eagle3.vocab_size"]) == ("none", V)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"capture_layers": (2, 5)}, "exactly 3 of the target's states"),
        ({"capture_layers": (2, 4, LAYERS)}, "before the target's final norm"),
        ({"num_layers": 2}, "one layer"),
        ({"norm_output": True}, "neither fc_norm nor norm_output"),
        ({"attention_bias": True}, "no bias in q, k, v"),
        ({"hidden_act": "gelu"}, "silu alone"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "the drafter has yarn"),
    ],
)
def test_other_drafters_are_refused_with_the_reason(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    source = make_source()
    source = replace(source, shape=replace(source.shape, **changed))
    with pytest.raises(UserError, match=reason):
        export(source, ENGINE, tmp_path / "out", None, {})
    assert not (tmp_path / "out").exists()


def test_the_loader_s_rules_find_a_wrong_file(tmp_path: Path) -> None:
    source = make_source()
    found: Folder = gguf_file.read_gguf(exported(source, tmp_path / "out"))
    assert problems(ENGINE, found, source.shape) == []
    config, tensors = dict(found.config), dict(found.tensors)

    def told(keys: dict[str, Any], weights: dict[str, torch.Tensor | None]) -> str:
        found.config.update(config | {f"eagle3.{key}": value for key, value in keys.items()})
        found.tensors.clear()
        found.tensors.update({name: each for name, each in (tensors | weights).items() if each is not None})
        return "\n".join(problems(ENGINE, found, source.shape))

    for key, value in (
        *(("target_layers", [1, 3, 4]), ("attention.layer_norm_rms_epsilon", 1e-6), ("rope.freq_base", 1e6)),
        *(("norm_before_residual", True), ("attention.value_length", 8), ("vocab_size", V - 1), ("block_count", 2)),
    ):
        assert key in told({key: value}, {}), key
    for name, weight, why in (
        ("blk.0.attn_norm_2.weight", None, "is missing"),
        ("d2t", tensors["d2t"].int(), "is of type torch.int32"),
        ("blk.0.attn_q.bias", torch.zeros(48), "is unknown"),
        ("output_norm.weight", torch.ones(H).half(), "is of type torch.float"),
        ("fc.weight", tensors["fc.weight"].T, "wants [32, 96]"),
    ):
        said = told({}, {name: weight})
        assert name in said and why in said, said


def shuffled(source: Source) -> dict[str, torch.Tensor]:
    name = "midlayer.self_attn.k_proj.weight"
    return source.tensors | {name: gguf_file.interleave(source.tensors[name], 2)}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (lambda source: {"tensors": shuffled(source)}, "logits up to"),
        (lambda source: {"vocab": DraftVocab(torch.arange(40), V)}, "another draft vocabulary"),
        (lambda source: {"shape": replace(source.shape, rope_parameters=ROPES["llama3"])}, "other frequencies"),
    ],
)
def test_a_file_of_another_drafter_gets_no_name(
    tmp_path: Path, changed: Callable[[Source], dict[str, Any]], told: str
) -> None:
    source = make_source()
    own = {"shape": source.shape, "vocab": source.vocab, "tensors": source.tensors}
    gguf_file.write_gguf(tmp_path / gguf_file.NAME, **(own | changed(source)), target_gguf=None)
    with pytest.raises(UserError, match=told):
        prove(source, ENGINE, tmp_path, None)


# The target's GGUF.


def target_file(
    path: Path, architecture: str = "llama", layers: int = LAYERS, width: int | None = H, tokens: int = V
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    if width is not None:
        writer.add_embedding_length(width)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([f"t{i}" for i in range(tokens)])
    writer.add_token_types([1] * tokens)
    writer.add_token_merges(["a b", "b c"])
    writer.add_bos_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_token_scores([0.5] * tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_tokenizer_is_copied_from_the_target_s_file(tmp_path: Path) -> None:
    target = target_file(tmp_path / "target.gguf")
    source = make_source()
    llama_cpp.check_target_gguf(source, None, target)
    path = exported(source, tmp_path / "out", target_gguf=target)
    theirs, ours = gguf.GGUFReader(target).fields, gguf.GGUFReader(path).fields
    keys = [key for key in theirs if key.startswith("tokenizer.")]
    assert len(keys) == 8
    for key in keys:
        assert ours[key].types == theirs[key].types, key
        assert ours[key].contents() == theirs[key].contents(), key


def test_the_file_of_another_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.gguf"
    wrong: dict[str, dict[str, Any]] = {
        "num_layers is 9": {"layers": 9},
        "vocab_size is 63": {"tokens": 63},
        "hidden_size is None": {"width": None},
    }
    for told, changed in wrong.items():
        with pytest.raises(UserError, match=f"{told}, the drafter's target has"):
            llama_cpp.check_target_gguf(make_source(), None, target_file(path, **changed))
    for architecture, told in (("qwen2", "no states of qwen2 models"), ("qwen3", "")):
        llama_cpp.check_target_gguf(make_source(), None, target_file(path, architecture))
        assert told in (said := capsys.readouterr().err) and bool(said) == bool(told)
    for content in (b"", b"GGUF", b"not a file of this kind at all, but long enough to look at"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"t.gguf: not a whole GGUF file"):
            llama_cpp.check_target_gguf(make_source(), None, path)
