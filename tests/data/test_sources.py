"""Sources: every format gives its documents in a fixed order, and mistakes are named in one sentence."""

import gzip
import json
import random

import pytest

from latte.data.sources import open_source
from latte.errors import UserError
from latte.recipe import DataRecipe


def documents(path, **settings):
    return list(open_source(str(path), DataRecipe(**settings)).documents())


def write_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def test_every_format_gives_the_same_documents(tmp_path):
    texts = ["one two\n", "drei vier ä\n", "five"]
    lines = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.txt").write_text("@@".join(texts))
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress("@@".join(texts).encode()))
    write_parquet(tmp_path / "e.parquet", [{"text": text} for text in texts])
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for index, text in enumerate(texts):
        (folder / ["a.txt", "b.md", "sub/c.py"][index]).write_text(text)
    (folder / "ignored.bin").write_bytes(b"\0\1")
    for name in ("a.jsonl", "b.jsonl.gz", "c.txt", "d.txt.gz", "e.parquet", "folder"):
        assert documents(tmp_path / name, separator="@@") == texts, name


def test_hugging_face_dataset_from_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"body": "x"}\n{"body": "y"}\n')
    assert documents(f"hf:{folder}", text_field="body") == ["x", "y"]
    with pytest.raises(UserError, match="no field 'text', only 'body'"):
        documents(f"hf:{folder}")


def test_stdlib_is_source_code_without_tests_in_a_fixed_order():
    source = open_source("python-stdlib", DataRecipe())
    names = [path.relative_to(source.root).as_posix() for path in source.files]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert not any("/test/" in name or "site-packages" in name for name in names)
    assert sum(len(text) for text in source.documents()) > 5_000_000


def test_limit_cuts_by_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("äöü" * 10)
    (tmp_path / "b.txt").write_text("x" * 100)
    assert "".join(documents(tmp_path, limit_bytes=70)) == "äöü" * 10 + "x" * 10


def test_digest_follows_contents_not_place(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("same")
    digests = [open_source(str(tmp_path / name), DataRecipe()).digest() for name in ("one", "two")]
    assert digests[0] == digests[1]
    (tmp_path / "two" / "a.txt").write_text("sama")
    assert open_source(str(tmp_path / "two"), DataRecipe()).digest() != digests[0]


@pytest.mark.parametrize(
    ("name", "contents", "settings", "message"),
    [
        ("missing.txt", None, {}, "there is no file or folder"),
        ("a.xyz", b"text", {}, "format of .*a.xyz is unknown"),
        ("a.jsonl", b'{"body": "x"}\n', {}, "line 1 has no field 'text', only 'body': set data.text_field"),
        ("a.jsonl", b'{"text": "x"}\nnot json\n', {}, "line 2 is not JSON"),
        ("a.jsonl", b"[1]\n", {}, "line 1 holds a list"),
        ("a.jsonl", b'{"text": ["a"]}\n', {}, "line 1: the field 'text' holds a list, expected text"),
        ("a.jsonl", '{"text": "ä"}\n'.encode("latin-1"), {}, "not utf-8 after line 0.*set data.encoding"),
        ("noise.txt", random.Random(0).randbytes(5000), {}, "noise.txt is not text in utf-8: .* can't be decoded"),
        ("noise.txt", random.Random(0).randbytes(5000), {"encoding": "latin-1"}, "is not text in latin-1"),
        ("wide.txt", "wide text".encode("utf-16"), {}, "the mark of utf-16, set data.encoding"),
        ("other.txt", "Не UTF-8. ".encode("cp1251") * 9, {}, "if it is text in another encoding, set data.encoding"),
        ("a.parquet", b"PAR1 broken", {}, "not a readable parquet file"),
        ("a.txt.gz", gzip.compress(b"x" * 9999, mtime=0)[:-10], {}, "can't be read"),
    ],
)
def test_bad_files(tmp_path, name, contents, settings, message):
    if contents is not None:
        (tmp_path / name).write_bytes(contents)
    with pytest.raises(UserError, match=message):
        documents(tmp_path / name, **settings)


def test_parquet_without_the_field(tmp_path):
    write_parquet(tmp_path / "a.parquet", [{"body": "x"}])
    with pytest.raises(UserError, match="no field 'text', only 'body'"):
        documents(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"valid_fraction": 1.5}, "valid_fraction is 1.5"),
        ({"sequence_length": 1}, "sequence_length is 1"),
        ({"vocab_size": 10}, "vocab_size is 10, expected at least 257"),
        ({"separator": ""}, "separator is empty"),
        ({"encoding": "utf-9"}, "data.encoding is 'utf-9', expected the name of a text encoding"),
        ({"encoding": "hex"}, "data.encoding is 'hex'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(UserError, match=message):
        DataRecipe(**settings)


def test_undecodable_bytes_are_counted_and_said(tmp_path):
    text = "Grüße aus Köln, wo man Latte trinkt.\n" * 10
    (tmp_path / "a.txt").write_bytes(text.encode("latin-1"))
    (tmp_path / "b.txt").write_text(text)
    source = open_source(str(tmp_path), DataRecipe())
    assert list(source.documents()) == [text.replace("ü", "\ufffd").replace("ß", "\ufffd").replace("ö", "\ufffd"), text]
    (said,) = source.notes()
    assert said.startswith(f"30 bytes are not utf-8 in {tmp_path / 'a.txt'}, and read as U+FFFD: set data.encoding")
    (tmp_path / "b.txt").unlink()
    source = open_source(str(tmp_path), DataRecipe(encoding="latin-1"))
    assert list(source.documents()) == [text]
    assert source.notes() == []
    assert source.digest() != open_source(str(tmp_path), DataRecipe()).digest()
    (tmp_path / "a.txt").write_bytes(text.encode("utf-16"))
    assert documents(tmp_path, encoding="utf-16") == [text]


def test_json_lines_in_another_encoding_and_with_a_mark(tmp_path):
    line = json.dumps({"text": "Grüße"}, ensure_ascii=False) + "\n"
    for encoding, stored in (("latin-1", "latin-1"), ("utf-16", "utf-16"), ("utf-8", "utf-8-sig")):
        (tmp_path / "a.jsonl").write_bytes((line + line).encode(stored))
        assert documents(tmp_path / "a.jsonl", encoding=encoding) == ["Grüße", "Grüße"]
    (tmp_path / "a.jsonl").write_text('{"text": null}\n' + line)
    assert documents(tmp_path / "a.jsonl") == ["Grüße"]


def test_a_separator_is_understood_as_typed(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\nlines\n\nthree")
    typed = "\\n\\n"  # what a shell gives for '\n\n'
    assert documents(tmp_path / "a.txt", separator=typed) == ["one", "two\nlines", "three"]
    assert documents(tmp_path / "a.txt", separator="\n\n") == ["one", "two\nlines", "three"]
    (tmp_path / "a.txt").write_text("a\\section b\tc")
    assert documents(tmp_path / "a.txt", separator="\\section") == ["a", " b\tc"]
    assert documents(tmp_path / "a.txt", separator="\\t") == ["a\\section b", "c"]
