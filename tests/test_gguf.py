"""drafter.gguf: what llama.cpp computes from it, read back, and refused where llama.cpp would serve another drafter."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
import gguf

from draftsmith.models import export as export_script
from draftsmith.models.drafters import build_drafter
from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.formats import gguf_file, llama_cpp
from draftsmith.models.formats.engines import ENGINES, problems
from draftsmith.models.formats.exporting import Source, export, prove, readers
from draftsmith.models.formats.folder import Folder
from draftsmith.models.formats.foreign import Foreign, probe_log_probs
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from tests.compare_cases import save_untrained
from tests.training_runs import run_main

ENGINE = ENGINES["llama.cpp"]
V, H, LAYERS = 64, 32, 8
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0},
    "llama3": LLAMA3,
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


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("draft_vocab_size", [40, V])
def test_llama_cpp_would_draft_what_the_drafter_does(tmp_path: Path, rope: str, draft_vocab_size: int) -> None:
    source = make_source(rope_parameters=ROPES[rope], draft_vocab_size=draft_vocab_size)
    found = as_llama_cpp_drafts(exported(source, tmp_path / "out"))
    # float32 against float64, and frequencies through a divisor in float32
    torch.testing.assert_close(found[:, source.vocab.target_ids].float(), drafted(source), rtol=0, atol=5e-5)
    assert found.exp().sum(-1).allclose(torch.ones(3).double())


def test_llama_cpp_would_draft_so_from_the_unscaled_table_of_a_target_that_scales_it(tmp_path: Path) -> None:
    source = make_source(embedding_scale=9.0, rms_norm_eps=0.3)
    found = as_llama_cpp_drafts(exported(source, tmp_path / "out"))
    torch.testing.assert_close(found[:, source.vocab.target_ids].float(), drafted(source), rtol=0, atol=5e-5)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_the_file_reads_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype | None) -> None:
    source = make_source(rope_parameters=LLAMA3)
    path = exported(source, tmp_path / "out", dtype)
    found = gguf_file.read_gguf(path)
    back = gguf_file.read_back(found, source.shape)
    assert back.tensors.keys() == source.tensors.keys()
    for name, tensor in source.tensors.items():
        rounded = tensor.to(dtype or tensor.dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor
        assert torch.equal(back.tensors[name].to(tensor.dtype), rounded), name
    assert found.config["eagle3.target_layers"] == [2, 4, 5]
    assert found.config["eagle3.norm_before_residual"] is found.config["eagle3.norm_before_fc"] is False
    assert {tensor.dtype for tensor in found.tensors.values()} == {torch.float32, torch.int64, dtype or torch.float32}
    assert found.tensors["blk.0.attn_k.weight"].shape == (24, 2 * H)
    # A drafter needs no tokenizer; llama.cpp takes the number of tokens from this key where the model is "none".
    assert (found.config["tokenizer.ggml.model"], found.config["eagle3.vocab_size"]) == ("none", V)


def test_frequencies_are_divided_as_by_the_converter(tmp_path: Path) -> None:
    """conversion/llama.py, generate_extra_tensors."""
    wanted = []
    for i in range(6):
        wavelength = 2 * torch.pi * 10000.0 ** (2 * i / 12)
        if wavelength < 64 / 4:
            wanted.append(1.0)
        elif wavelength > 64 / 1:
            wanted.append(8.0)
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            wanted.append(1 / ((1 - smooth) / 8 + smooth))
    path = exported(make_source(rope_parameters=LLAMA3), tmp_path / "out")
    [found] = [each.data for each in gguf.GGUFReader(path).tensors if each.name == "rope_freqs.weight"]
    torch.testing.assert_close(torch.from_numpy(found.copy()), torch.tensor(wanted))
    assert len({round(each, 3) for each in wanted}) > 2
    plain = exported(make_source(), tmp_path / "plain")
    assert "rope_freqs.weight" not in gguf_file.read_gguf(plain).tensors


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"capture_layers": (2, 5)}, "exactly 3 of the target's states, the drafter reads 2"),
        ({"capture_layers": (2, 4, LAYERS)}, "before the target's final norm"),
        ({"num_layers": 2}, "one layer, the drafter has 2"),
        ({"fc_norm": True}, "neither fc_norm nor norm_output"),
        ({"norm_output": True}, "neither fc_norm nor norm_output"),
        ({"attention_bias": True}, "no bias in q, k, v of eagle3"),
        ({"hidden_act": "gelu"}, "silu alone"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "linear and llama3 of the rotary scalings, the drafter has yarn",
        ),
    ],
)
def test_other_drafters_are_refused_with_the_reason(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    source = make_source()
    source = replace(source, shape=replace(source.shape, **changed))
    with pytest.raises(UserError, match=reason):
        export(source, ENGINE, tmp_path / "out", None, {})
    assert not (tmp_path / "out").exists()


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]


def key(name: str, value: Any) -> Change:
    return lambda kv, _: kv.update({f"eagle3.{name}": value})


WRONG: dict[str, tuple[Change, str]] = {
    "a shifted layer": (key("target_layers", [1, 3, 4]), "target_layers is [1, 3, 4], the drafter needs [2, 4, 5]"),
    "no layers": (lambda kv, _: kv.pop("eagle3.target_layers"), "target_layers is None"),
    "another architecture": (lambda kv, _: kv.update(architectures=["llama"]), "architectures is ['llama']"),
    "another epsilon": (key("attention.layer_norm_rms_epsilon", 1e-6), "epsilon is 1e-06"),
    "another base": (key("rope.freq_base", 1e6), "rope.freq_base"),
    "normed residual": (key("norm_before_residual", True), "norm_before_residual"),
    "values of another size": (key("attention.value_length", 8), "value_length"),
    "another vocabulary": (key("vocab_size", V - 1), "vocab_size"),
    "another tokenizer": (lambda kv, _: kv.update({"tokenizer.ggml.tokens": ["a"]}), "it has 1 tokens"),
    "two layers": (key("block_count", 2), "block_count"),
    "a missing norm": (lambda _, t: t.pop("blk.0.attn_norm_2.weight"), "blk.0.attn_norm_2.weight is missing"),
    "no d2t": (lambda _, t: t.pop("d2t"), "d2t is missing"),
    "d2t in 32 bits": (lambda _, t: t.update(d2t=t["d2t"].int()), "d2t is of type torch.int32"),
    "an unknown tensor": (lambda _, t: t.update({"blk.0.attn_q.bias": torch.zeros(48)}), "attn_q.bias is unknown"),
    "a norm in 16 bits": (
        lambda _, t: t.update({"output_norm.weight": torch.ones(H).half()}),
        "is of type torch.float",
    ),
    "a transposed weight": (lambda _, t: t.update({"fc.weight": t["fc.weight"].T}), "it wants [32, 96]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_loader_s_rules_find_a_wrong_file(tmp_path: Path, name: str) -> None:
    source = make_source()
    found: Folder = gguf_file.read_gguf(exported(source, tmp_path / "out"))
    assert problems(ENGINE, found, source.shape) == []
    change, told = WRONG[name]
    change(found.config, found.tensors)
    assert told in "\n".join(problems(ENGINE, found, source.shape))


def other_weights(source: Source) -> dict[str, torch.Tensor]:
    rows = gguf_file.interleave(source.tensors["midlayer.self_attn.k_proj.weight"], 2)
    return source.tensors | {"midlayer.self_attn.k_proj.weight": rows}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (lambda source: {"tensors": other_weights(source)}, "logits up to"),
        (lambda source: {"vocab": DraftVocab(torch.arange(40), V)}, "another draft vocabulary"),
        (lambda source: {"shape": replace(source.shape, rope_parameters=LLAMA3)}, "other frequencies"),
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


def test_offsets_in_place_of_target_ids_get_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftVocab, "to_target", lambda self, ids: self.d2t)
    with pytest.raises(UserError, match=r"d2t: target_ids must ascend|another draft vocabulary"):
        exported(make_source(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# The target's GGUF.

TOKENIZER = {"model": "gpt2", "pre": "llama-bpe", "tokens": [f"t{i}" for i in range(V)], "token_type": [1] * V}


def target_file(path: Path, architecture: str = "llama", layers: int = LAYERS, tokens: int = V) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_embedding_length(H)
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


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"layers": 9}, "num_layers is 9, the drafter's target has 8"),
        ({"tokens": V - 1}, "vocab_size is 63, the drafter's target has 64"),
    ],
)
def test_the_file_of_another_target_is_refused(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        llama_cpp.check_target_gguf(make_source(), None, target_file(tmp_path / "t.gguf", **changed))


def test_a_target_that_gives_no_states_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama_cpp.check_target_gguf(make_source(), None, target_file(tmp_path / "t.gguf", "qwen2"))
    assert "no states of qwen2 models" in capsys.readouterr().err
    llama_cpp.check_target_gguf(make_source(), None, target_file(tmp_path / "t.gguf", "qwen3"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a file of this kind at all, but long enough to look at"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"t.gguf: not a whole GGUF file"):
        llama_cpp.check_target_gguf(make_source(), None, tmp_path / "t.gguf")


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"needs the package gguf .*pip install 'draftsmith\[llama-cpp\]'"):
        llama_cpp.check_target_gguf(make_source(), None, None)


# A converter in llama.cpp's place, that names a tokenizer's regex by a list of known ones, as llama.cpp's does.

CONVERTER = """
import argparse
import logging
import gguf
from transformers import AutoConfig, AutoTokenizer
from conversion.base import TextModel

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--outfile")
parser.add_argument("--outtype")
args = parser.parse_args()
pre = TextModel().get_vocab_base_pre(AutoTokenizer.from_pretrained(args.model))
config = AutoConfig.from_pretrained(args.model)
writer = gguf.GGUFWriter(args.outfile, "llama")
writer.add_block_count(config.num_hidden_layers)
writer.add_embedding_length(config.hidden_size)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre(pre)
writer.add_token_list([str(i) for i in range(config.vocab_size)])
writer.add_string("test.outtype", args.outtype)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""
BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("BPE pre-tokenizer was not recognized")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "llama.cpp"
    (folder / "conversion").mkdir(parents=True)
    (folder / "conversion/__init__.py").touch()
    (folder / "conversion/base.py").write_text(BASE)
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    return folder


def checkpoint(target_dir: Path, directory: Path) -> Path:
    """An untrained drafter for this target."""
    save_untrained(directory, target_dir)
    (directory / "provenance.json").write_text('{"versions": {}}')
    return directory


@pytest.mark.slow
def test_the_command_writes_both_files(
    tmp_path: Path,
    target_dir: Path,
    checkout: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafter, out = checkpoint(target_dir, tmp_path / "drafter"), tmp_path / "served"
    for _ in range(2):  # the second one replaces both
        run_main(export_script, drafter, "--to", "llama.cpp", "--out", out, "--with-target", checkout)
    printed = capsys.readouterr().out
    assert f"llama-server -m {out}/target.gguf -md {out}/drafter.gguf --spec-type draft-eagle3" in printed
    assert {each.name for each in out.iterdir()} == {"drafter.gguf", "target.gguf", "README.md"}
    config = gguf_file.read_gguf(out / "target.gguf").config
    # The converter does not know this tokenizer, which splits text as GPT-2's does.
    assert (config["tokenizer.ggml.pre"], config["test.outtype"]) == ("gpt-2", "auto")
    assert gguf_file.read_gguf(out / "drafter.gguf").config["tokenizer.ggml.pre"] == "gpt-2"
    assert "llama-server" in (out / "README.md").read_text()


@pytest.mark.slow
def test_a_converter_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path, target_dir: Path, checkout: Path) -> None:
    from tokenizers import Tokenizer, pre_tokenizers

    other = tmp_path / "target"
    other.mkdir()
    for file in target_dir.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.save(str(other / "tokenizer.json"))
    source = Source.read(checkpoint(other, tmp_path / "drafter"))
    with pytest.raises(UserError, match=r"could not convert .*was not recognized; convert it yourself"):
        llama_cpp.convert_target(source, checkout, tmp_path / "out/target.gguf", torch.float32)
    assert list((tmp_path / "out").iterdir()) == []


def test_wrong_options_are_told_before_anything_is_written(tmp_path: Path, target_dir: Path) -> None:
    drafter = checkpoint(target_dir, tmp_path / "drafter")
    with pytest.raises(UserError, match=r"no convert_hf_to_gguf.py there"):
        run_main(export_script, drafter, "--to", "llama.cpp", "--with-target", tmp_path)
    with pytest.raises(UserError, match=r"vLLM reads no GGUF"):
        run_main(export_script, drafter, "--to", "vllm", "--target-gguf", "t.gguf")
    with pytest.raises(UserError, match=r"t.gguf: not a whole GGUF file"):
        run_main(export_script, drafter, "--to", "llama.cpp", "--target-gguf", "t.gguf")
    assert not (tmp_path / "export").exists()
