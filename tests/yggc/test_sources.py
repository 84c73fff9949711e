"""Where checkpoints were read from is kept by fingerprint, whole, and never in the way of a build."""

from __future__ import annotations

import pytest

from yggc.sources import find_source, remember_source
from yggc.stage_cache import SOURCES_FILE, clear


def test_a_source_is_found_by_its_fingerprint_alone(tmp_path):
    remember_source(tmp_path, "aa", "owner/small")
    remember_source(tmp_path, "bb", "owner/large")
    assert find_source(tmp_path, "aa") == "owner/small"
    assert find_source(tmp_path, "bb") == "owner/large"
    assert find_source(tmp_path, "cc") is None
    assert [path.name for path in tmp_path.iterdir()] == [SOURCES_FILE]


def test_the_last_place_of_a_fingerprint_counts(tmp_path):
    for place in ("owner/old", "owner/new"):
        remember_source(tmp_path, "aa", place)
    assert find_source(tmp_path, "aa") == "owner/new"


@pytest.mark.parametrize("typed", ["model", "./model", "~/model"])
def test_a_local_path_is_kept_whole(tmp_path, monkeypatch, typed):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    remember_source(tmp_path, "aa", typed)
    assert find_source(tmp_path, "aa") == str(tmp_path / "model")


@pytest.mark.parametrize("content", [b"", b"not json", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"aa": 7}'])
def test_a_damaged_file_is_no_file(tmp_path, content):
    (tmp_path / SOURCES_FILE).write_bytes(content)
    assert find_source(tmp_path, "aa") is None
    remember_source(tmp_path, "aa", "owner/model")
    assert find_source(tmp_path, "aa") == "owner/model"


def test_where_there_is_no_cache_folder_nothing_is_known(tmp_path):
    assert find_source(tmp_path / "nowhere", "aa") is None


def test_clearing_the_cache_removes_the_file(tmp_path):
    remember_source(tmp_path, "aa", "owner/model")
    clear(tmp_path)
    assert not tmp_path.exists()
