"""drafter.gguf: what llama.cpp computes from it, and the target's own file, refused where it is another's."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
import gguf

from draftsmith.models.formats import llama_cpp
from draftsmith.models.formats.engines import ENGINES
from draftsmith.models.formats.exporting import Source, export, prove, readers
from draftsmith.recipes.errors import UserError
from tests.conftest import VOCAB_SIZE
from tests.export_cases import CHAIN, PROMPT, SCALED, drafted, drafter_named, target_of

ENGINE = ENGINES["llama.cpp"]
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def make_source(name: str = "eagle3", **overrides: Any) -> Source:
    """A random drafter: heads of 12 dimensions, so that their sum is not the hidden size."""
    drafter = drafter_named(name, head_dim=12, **overrides)
    target = {"model": "some/target", "num_layers": 7, "hidden_size": 32, "vocab_size": VOCAB_SIZE}
    return Source(Path("runs/drafter"), drafter.config, target, drafter.vocab, drafter.state_dict())


def as_llama_cpp_drafts(path: Path) -> torch.Tensor:
    """[5, V] log-probabilities of the chain of `drafted`, as src/models/eagle3.cpp computes them from the file.

    In float64, one token after the other.
    """
    reader = gguf.GGUFReader(path)
    kv = {key: field.contents() for key, field in reader.fields.items()}
    w = {each.name: torch.from_numpy(each.data.copy()) for each in reader.tensors}
    w = {name: tensor if name == "d2t" else tensor.double() for name, tensor in w.items()}
    heads, groups = kv["eagle3.attention.head_count"], kv["eagle3.attention.head_count_kv"]
    dim = kv["eagle3.attention.key_length"]

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

    def decode(token: int, g: torch.Tensor, position: int) -> torch.Tensor:
        """The output before the final norm. llama.cpp embeds by the target's unscaled table."""
        embedding = target_of().embedding_table[token].double()
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
        return torch.full((kv["eagle3.vocab_size"],), -torch.inf).double().index_put_((w["d2t"],), drafts)

    features = target_of().states(torch.tensor([PROMPT]), kv["eagle3.target_layers"]).captured[0].double()
    tokens, columns, found, prenorm = [*PROMPT, *CHAIN], len(PROMPT), [], torch.zeros(())
    for c in range(len(tokens) - 1):
        prenorm = decode(tokens[c + 1], w["fc.weight"] @ features[c] if c < columns else prenorm, c)
        if c >= columns - 1:
            found.append(logits(prenorm))
    return torch.stack(found).log_softmax(-1)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("eagle3, whole vocabulary", {}),
        ("eagle3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}}),
        ("eagle3", {"rope_parameters": LLAMA3}),
        ("eagle3", SCALED),
    ],
    ids=str,
)
@torch.no_grad()
def test_llama_cpp_would_draft_what_the_drafter_does(name: str, target: dict[str, Any], tmp_path: Path) -> None:
    source = make_source(name, **target)
    export(source, ENGINE, tmp_path / "out", None, {})
    found = as_llama_cpp_drafts(tmp_path / "out/drafter.gguf")
    # float32 against float64, and frequencies through a divisor in float32
    wanted = drafted(source.shape, source.tensors)
    torch.testing.assert_close(found[:, source.vocab.target_ids].float(), wanted, rtol=0, atol=5e-5)
    assert found.exp().sum(-1).allclose(torch.ones(5).double())


def test_what_the_file_says_besides_and_an_altered_one(tmp_path: Path) -> None:
    source = make_source()
    assert readers(source, ENGINE) == [ENGINE]
    export(source, ENGINE, tmp_path / "out", torch.bfloat16, {})
    reader = gguf.GGUFReader(tmp_path / "out/drafter.gguf")
    said = {"general.architecture": "eagle3", "general.file_type": 32, "eagle3.target_layers": [1, 3, 6]}
    said |= {"eagle3.block_count": 1, "eagle3.attention.value_length": 12, "eagle3.norm_before_residual": False}
    # A drafter needs no tokenizer; llama.cpp takes the number of tokens from this key where the model is "none".
    said |= {"tokenizer.ggml.model": "none", "eagle3.vocab_size": VOCAB_SIZE}
    assert {key: reader.fields[key].contents() for key in said} == said
    assert {each.tensor_type.name for each in reader.tensors if each.name != "d2t"} == {"BF16", "F32"}
    k = "midlayer.self_attn.k_proj.weight"
    altered = source.tensors | {k: source.tensors[k].flip(0)}
    llama_cpp.write_gguf(tmp_path / "drafter.gguf", source.shape, source.vocab, altered, None)
    with pytest.raises(UserError, match=f"reads back as another drafter .another {k}"):
        prove(source, ENGINE, tmp_path, None)


# The target's GGUF.


def target_file(path: Path, layers: int = 7, width: int | None = 32, tokens: int = VOCAB_SIZE) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    if width is not None:
        writer.add_embedding_length(width)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(tokens)])
    writer.add_token_types([1] * tokens)
    writer.add_bos_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_token_scores([0.5] * tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_tokenizer_is_copied_from_the_target_s_file(tmp_path: Path) -> None:
    target, source = target_file(tmp_path / "target.gguf"), make_source()
    llama_cpp.check_fit(source.target, target)
    export(source, ENGINE, tmp_path / "out", None, {}, target)
    theirs, ours = (gguf.GGUFReader(path).fields for path in (target, tmp_path / "out/drafter.gguf"))
    keys = [key for key in theirs if key.startswith("tokenizer.")]
    assert len(keys) == 6
    for key in keys:
        assert (ours[key].types, ours[key].contents()) == (theirs[key].types, theirs[key].contents()), key


def test_the_file_of_another_target_is_refused(tmp_path: Path) -> None:
    path, target = tmp_path / "t.gguf", make_source().target
    with pytest.raises(UserError, match="num_layers is 9, the drafter's target has") as told:
        llama_cpp.check_fit(target, target_file(path, layers=9, width=None, tokens=63))
    assert [each.split(": ")[1].split(",")[0] for each in told.value.problems[:-1]] == [
        *("num_layers is 9", "hidden_size is None", "vocab_size is 63"),
    ]
    for content in (b"GGUF", b"not a file of this kind at all, but long enough to look at"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"t.gguf: not a whole GGUF file"):
            llama_cpp.check_fit(target, path)
