"""Prompts in packed files, folders and files named by a pattern."""

import gzip
import random
from pathlib import Path

import pytest

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.rejects import Rejects
from tests.test_prompts import kept, read, write_lines


def test_packed_files_are_read_as_what_is_in_them(tmp_path: Path):
    texts = {
        "a.jsonl": '{"prompt": "x"}\n{"prompt": "y"}\n',
        "b.json": '[{"prompt": "x"},\n{"prompt": "y"},]',
        "c.JSONL": '\ufeff[{"prompt": "x"}, {"prompt": "y"}]',
        "d.csv": "\ufeffprompt;id\nx;\ny;\n",
    }
    for name, text in texts.items():
        path = tmp_path / f"{name}.GZ"
        path.write_bytes(gzip.compress(text.encode()))
        found = read(str(path))
        assert [c.messages[0]["content"] for c in found] == ["x", "y"], name
        assert found[0].meta == {"benchmark": name[0]} and found[0].id.startswith(f"{name}.GZ:")
    chance = random.Random(0)
    whole = gzip.compress("".join(f'{{"prompt": "{chance.randbytes(4000).hex()}"}}\n' for _ in range(100)).encode(), 1)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    rejects = Rejects(tmp_path / "rejects")
    found = read(str(tmp_path / "cut.jsonl.gz"), rejects)
    (entry,) = kept(tmp_path / "rejects")
    assert 10 < len(found) < 100 and entry["line"] == len(found) + 1
    assert entry["reason"].startswith("damaged file: Compressed file ended") and entry["reason"].endswith("is lost")
    for name, content, said in (
        ("no.jsonl.gz", b'{"prompt": "x"}\n', "no.jsonl.gz: cannot be read: Not a gzipped file"),
        ("no.parquet.gz", whole, "no.parquet.gz: prompts are read from .*packed as .gz"),
        ("no.jsonl.zst", whole, "no.jsonl.zst: prompts are read from .*packed as .gz"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=said):
            read(str(tmp_path / name))


def test_patterns_and_folders_stand_for_their_files(tmp_path: Path):
    folder = tmp_path / "parts [1]"
    (folder / "deeper").mkdir(parents=True)
    for number in (2, 10, 1):
        write_lines(folder / f"{number}.jsonl", *({"id": i, "prompt": f"{number} {i}"} for i in range(2)))
    (folder / "README.md").write_text("prompts")
    (folder / "empty.jsonl").write_text("")
    (folder / ".hidden.jsonl").write_text("{}")
    write_lines(folder / "deeper/3.jsonl", {"prompt": "3 0"})
    other = write_lines(tmp_path / "other.json", {"prompt": "not read"})
    wanted = ["1 0", "1 1", "10 0", "10 1", "2 0", "2 1"]
    for source in (str(folder), f"{folder}/", f"{tmp_path}/parts*/*", f"{tmp_path}/parts*/*.jsonl"):
        found = read([source, other], limit=6)
        assert [c.messages[0]["content"] for c in found] == wanted
        assert [c.id for c in found] == ["0", "1", "10/0", "10/1", "2/0", "2/1"]
        assert (found[2].source, found[2].line) == (f"{folder}/10.jsonl", 1)
        assert {c.meta["benchmark"] for c in found} == {"parts*" if "*" in source else "parts [1]"}
    assert len(read(f"{tmp_path}/**/*.jsonl")) == 7
    assert [c.id for c in read(f"mt_bench:{tmp_path}/parts*/2.jsonl")] == ["mt_bench/0", "mt_bench/1"]
    write_lines(folder / "0.jsonl", {"prompt": ""})  # one file without a usable record is no mistake
    assert len(read(str(folder))) == 6
    (tmp_path / "none").mkdir()
    for source, said in (
        (
            f"{tmp_path}/none/*.jsonl",
            "none/\\*.jsonl: no .jsonl, .*parquet file that is not empty matches this pattern",
        ),
        (
            f"{tmp_path}/none",
            "none: no .jsonl, .* in this folder; for those in its folders write .*none/\\*\\*/\\*.jsonl",
        ),
        (f"{tmp_path}/parts*/0*", "parts./0.: no usable conversation: 1 record rejected"),
    ):
        with pytest.raises(UserError, match=said) as raised:
            read(source)
        assert len(raised.value.problems) == 1
