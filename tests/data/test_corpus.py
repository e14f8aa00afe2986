"""Tokens: lossless, split by document, packed so that nothing crosses, cached by content, ordered by seed and step."""

import json
import random

import numpy as np
import pytest

from latte.data import DataRecipe, Order, PackedRows, StepBatches, prepare
from latte.data.corpus import part_of
from latte.data.tokenizer import byte_tokenizer, check_fits, encode_documents, is_bytes, pieces, train_bpe
from latte.errors import UserError

TEXTS = [f"Document {n}: " + "words and   spaces\n\n" * (n % 7) + "äöü €𝄞 end" for n in range(60)]


@pytest.fixture
def corpus_file(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def recipe(path, tmp_path, **settings):
    settings = {"valid_fraction": 0.2, "vocab_size": 300, "sequence_length": 32, **settings}
    return DataRecipe(source=str(path), cache=str(tmp_path / "cache"), **settings)


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_round_trip_and_split_by_document(corpus_file, tmp_path, tokenizer):
    corpus = prepare(recipe(corpus_file, tmp_path, tokenizer=tokenizer))
    read = {}
    for part in ("train", "valid"):
        tokens = getattr(corpus, part)
        for index in range(tokens.num_documents):
            ids = tokens.document(index)
            assert ids[0] == ids[-1] == corpus.tokenizer.eos_token_id
            text = corpus.tokenizer.decode(ids[1:-1])
            assert text not in read
            assert tokens.text_bytes[index] == len(text.encode())
            read[text] = part
    assert sorted(read) == sorted(TEXTS)
    assert 0 < corpus.valid.num_documents < 30
    assert all(part_of(text, 0.2, 0) == part for text, part in read.items())


def test_byte_ids_are_bytes_and_the_library_agrees():
    tokenizer = byte_tokenizer()
    assert is_bytes(tokenizer)
    everything = bytes(range(256)).decode("latin-1") + "€𝄞"
    assert tokenizer(everything)["input_ids"] == list(everything.encode())
    assert encode_documents(tokenizer, [everything])[0][1:-1].tolist() == list(everything.encode())


def test_bpe_training_is_deterministic_and_pieces_change_no_token():
    text = " ".join(
        random.Random(0).choices(["alpha", "beta", "gamma\n", "", "", "", "delta", "", "epsilon,", "\n\nzeta"], k=20000)
    )
    tokenizer, again = (train_bpe([text], 400) for _ in range(2))
    assert tokenizer.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()
    cut = list(pieces(text, 500))
    assert len(cut) > 100
    assert "".join(cut) == text
    whole = tokenizer(text)["input_ids"]
    assert [token for piece in cut for token in tokenizer(piece)["input_ids"]] == whole


def test_cache_is_by_content_and_repairs_itself(corpus_file, tmp_path):
    told = []
    first = prepare(recipe(corpus_file, tmp_path), told.append)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    corpus_file.rename(moved / corpus_file.name)
    again = prepare(recipe(moved / corpus_file.name, tmp_path), told.append)
    assert again.digest == first.digest
    assert len(told) == 1
    (folder,) = (tmp_path / "cache" / "tokens").iterdir()
    ids = np.array(first.train.ids)
    (folder / "train.ids").write_bytes((folder / "train.ids").read_bytes()[:-5])
    assert np.array_equal(prepare(recipe(moved / corpus_file.name, tmp_path), told.append).train.ids, ids)
    assert len(told) == 2
    (moved / corpus_file.name).write_text(json.dumps({"text": "other"}) + "\n" + (moved / corpus_file.name).read_text())
    assert prepare(recipe(moved / corpus_file.name, tmp_path), told.append).digest != first.digest
    assert len(told) == 3


def test_rows_mark_every_document_and_no_label_crosses(corpus_file, tmp_path):
    corpus = prepare(recipe(corpus_file, tmp_path))
    rows = PackedRows(corpus.train, 32)
    batch = rows.batch(range(len(rows)))
    flat, reset = batch["input_ids"].flatten(), batch["reset"].flatten()
    assert np.array_equal(flat.numpy(), corpus.train.ids[: len(flat)])
    expected = {int(start) for start in corpus.train.starts[:-1] if start < len(flat)} | set(range(0, len(flat), 32))
    assert set(reset.nonzero()[:, 0].tolist()) == expected
    assert ((batch["labels"] == -100) == batch["reset"]).all()
    assert (batch["labels"][~batch["reset"]] == batch["input_ids"][~batch["reset"]]).all()


def test_order_is_a_permutation_each_epoch_and_pure():
    order = Order(50, seed=3)
    epochs = [[order[epoch * 50 + place] for place in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [Order(50, seed=3)[place] for place in (140, 7, 63)] == [epochs[2][40], epochs[0][7], epochs[1][13]]
    assert [Order(50, seed=4)[place] for place in range(50)] != epochs[0]


@pytest.mark.parametrize(("world", "micro"), [(1, 4), (1, 1), (2, 1), (2, 2), (4, 1)])
def test_any_number_of_processes_reads_the_same_rows(corpus_file, tmp_path, world, micro):
    rows = PackedRows(prepare(recipe(corpus_file, tmp_path)).train, 32)
    whole = StepBatches(rows, seed=1, steps=3, batch_size=4, micro_batch_size=4)
    for step in range(3):
        read = []
        for rank in range(world):
            mine = StepBatches(rows, seed=1, steps=3, batch_size=4, micro_batch_size=micro, rank=rank, world_size=world)
            for number in range(mine.accumulation):
                read += mine[step * mine.accumulation + number]["input_ids"].tolist()
        assert sorted(read) == sorted(whole[step]["input_ids"].tolist())


def test_tail_split_keeps_order_and_every_character(tmp_path):
    (tmp_path / "one.txt").write_text("".join(chr(97 + n % 26) for n in range(1000)))
    corpus = prepare(recipe(tmp_path / "one.txt", tmp_path, tokenizer="bytes", split="tail", valid_fraction=0.1))
    train, valid = (corpus.tokenizer.decode(part.document(0)[1:-1]) for part in (corpus.train, corpus.valid))
    assert train + valid == (tmp_path / "one.txt").read_text()
    assert len(valid) == 100


@pytest.mark.parametrize("num_files", [1, 3])
def test_few_documents_are_split_by_their_tail_and_it_is_said(tmp_path, num_files):
    (tmp_path / "text").mkdir()
    for number in range(num_files):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text {number} " * 100)
    settings = recipe(tmp_path / "text", tmp_path, tokenizer="bytes", valid_fraction=0.05)
    for _ in range(2):  # the second time from the cache
        said = []
        corpus = prepare(settings, said.append)
        parts = [
            "".join(corpus.tokenizer.decode(i[1:-1]) for i, _ in p.documents()) for p in (corpus.train, corpus.valid)
        ]
        assert "".join(parts) == "".join(f"text {number} " * 100 for number in range(num_files))
        assert len(parts[1]) == 35 * num_files
        few = "is one document" if num_files == 1 else "has 3 documents, too few to divide them"
        assert said[-1] == f"{tmp_path / 'text'} {few}: the last 0.05 of the text is for validation"


def test_a_separator_that_never_occurs_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("one text " * 100)
    said = []
    prepare(recipe(tmp_path / "a.txt", tmp_path, tokenizer="bytes", separator="@@"), said.append)
    assert "is one document (data.separator '@@' does not occur in it)" in said[-1]


def test_bytes_that_are_not_text_are_said_from_the_cache_too(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"plain text\xff\n" * 50)
    for _ in range(2):
        said = []
        prepare(recipe(tmp_path / "a.txt", tmp_path, tokenizer="bytes"), said.append)
        assert any(line.startswith("50 bytes are not utf-8 in ") for line in said)


def test_mistakes(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "one.txt").write_text("one document")
    with pytest.raises(UserError, match="the corpus is empty"):
        prepare(recipe(tmp_path / "empty.txt", tmp_path))
    (tmp_path / "letter.txt").write_text("a")
    with pytest.raises(UserError, match=r"too little text in .* to divide it"):
        prepare(recipe(tmp_path / "letter.txt", tmp_path))
    with pytest.raises(UserError, match=r"there is no text in .*empty"):
        prepare(recipe(tmp_path / "one.txt", tmp_path, valid_source=str(tmp_path / "empty.txt")))
    with pytest.raises(UserError, match="there is no tokenizer"):
        prepare(recipe(tmp_path / "one.txt", tmp_path, tokenizer=str(tmp_path / "nowhere")))
    corpus = prepare(recipe(tmp_path / "one.txt", tmp_path, valid_source=str(tmp_path / "one.txt"), tokenizer="bytes"))
    with pytest.raises(UserError, match=r"the training part has 14 tokens, fewer than one row of 32.*of at most 14$"):
        PackedRows(corpus.train, 32, "training part")
    with pytest.raises(UserError, match=r"give more text, a larger data.valid_fraction, or a data.sequence_length of"):
        PackedRows(corpus.valid, 32, "validation part")
    with pytest.raises(UserError, match="has 257 tokens but the model knows 100"):
        check_fits(corpus.tokenizer, 100, "the model")
    assert not list((tmp_path / "cache").rglob(".part-*"))
