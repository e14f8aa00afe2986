"""Folders are written whole or not at all, and any change to them is noticed."""

import random

import pytest

from latte.files import Damaged, remove_scratch, verify_folder, whole_folder, write_text


def make(path, contents="hello", **about):
    with whole_folder(path, **about) as folder:
        (folder / "a.txt").write_text(contents)
        (folder / "sub").mkdir()
        (folder / "sub" / "b.bin").write_bytes(bytes(range(200)))


def test_round_trip_and_replacement(tmp_path):
    make(tmp_path / "x", step=3)
    assert verify_folder(tmp_path / "x")["step"] == 3
    make(tmp_path / "x", "again", step=4)
    assert verify_folder(tmp_path / "x")["step"] == 4
    assert (tmp_path / "x" / "a.txt").read_text() == "again"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_failing_writer_leaves_what_was_there(tmp_path):
    make(tmp_path / "x")

    def fail():
        with whole_folder(tmp_path / "x") as folder:
            (folder / "a.txt").write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    verify_folder(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_every_flip_and_truncation_is_noticed(tmp_path):
    make(tmp_path / "x", step=1)
    chance = random.Random(0)
    files = sorted(path for path in (tmp_path / "x").rglob("*") if path.is_file())
    for trial in range(200):
        path = files[trial % len(files)]
        whole = path.read_bytes()
        if chance.random() < 0.5:
            path.write_bytes(whole[: chance.randrange(len(whole))])
        else:
            place = chance.randrange(len(whole))
            path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << chance.randrange(8))]) + whole[place + 1 :])
        with pytest.raises(Damaged):
            verify_folder(tmp_path / "x")
        path.write_bytes(whole)
        verify_folder(tmp_path / "x")


def test_files_added_or_removed_are_noticed(tmp_path):
    make(tmp_path / "x")
    (tmp_path / "x" / "extra").write_text("")
    with pytest.raises(Damaged, match="extra is not in the manifest"):
        verify_folder(tmp_path / "x")
    (tmp_path / "x" / "extra").unlink()
    (tmp_path / "x" / "a.txt").unlink()
    with pytest.raises(Damaged, match=r"a\.txt is missing"):
        verify_folder(tmp_path / "x")


def test_scratch_is_removed_and_text_replaced(tmp_path):
    (tmp_path / ".part-1234-x").mkdir()
    write_text(tmp_path / "note", "one")
    write_text(tmp_path / "note", "two")
    remove_scratch(tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("note", "two")]
