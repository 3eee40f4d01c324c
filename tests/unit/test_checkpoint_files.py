# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""The folder of a checkpoint: complete under its final name or not there; leftovers; what belongs to others."""

from __future__ import annotations

import json
import os
import time
import zlib

import pytest

from accelerate_lshdp.checkpoint import folder as checkpoint_files
from accelerate_lshdp.checkpoint.folder import (
    MANIFEST,
    Manifest,
    check_replaceable,
    commit,
    newest_generation,
    partial_folder,
    recover,
    remove_leftovers,
    search,
    token_path,
    verify,
    write_file,
)
from accelerate_lshdp.checkpoint.lock import lock_path


def fill(folder, number, generation=None, content=b"content"):
    files = {"data": write_file(folder / "data", content)}
    manifest = Manifest(f"{number:032x}", generation or number, number, 8 * number, 0, 1, "digest", files)
    write_file(folder / MANIFEST, manifest.to_json().encode())
    return manifest


def put(final, number, **options):
    with partial_folder(final, f"{number:032x}") as folder:
        manifest = fill(folder, number, **options)
        commit(folder, final, manifest.save_id)
    return manifest


def leave(final, number, kind="partial", complete=True):
    """What a killed writer leaves."""
    folder = final.parent / f".{final.name}.{number:032x}.{kind}"
    folder.mkdir()
    if kind == "partial":
        lock_path(folder).touch()
    if complete:
        fill(folder, number)
    else:
        (folder / "data").write_bytes(b"half")
    return folder


def names(folder):
    return sorted(os.listdir(folder))


def test_a_manifest_comes_back(tmp_path):
    manifest = put(tmp_path / "a", 3)
    assert Manifest.read(tmp_path / "a") == manifest
    assert verify(tmp_path / "a", manifest) is None
    assert manifest.files["data"].crc32 == zlib.crc32(b"content")


@pytest.mark.parametrize("name", ["data", MANIFEST])
def test_one_flipped_bit_is_noticed(tmp_path, name):
    manifest = put(tmp_path / "a", 3)
    path = tmp_path / "a" / name
    data = bytearray(path.read_bytes())
    data[data.index(b"content"[0:1]) if name == "data" else data.index(b"step") + 7] ^= 1
    path.write_bytes(data)
    if name == "data":
        assert "checksum" in verify(tmp_path / "a", manifest)
    else:
        with pytest.raises(ValueError, match="damaged"):
            Manifest.read(tmp_path / "a")


def test_a_short_or_missing_file_is_noticed(tmp_path):
    manifest = put(tmp_path / "a", 3)
    (tmp_path / "a" / "data").write_bytes(b"conten")
    assert "has 6 bytes, its manifest says 7" in verify(tmp_path / "a", manifest)
    (tmp_path / "a" / "data").unlink()
    assert "cannot be read" in verify(tmp_path / "a", manifest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has version 2, this release reads version 1"),
        ({"format": "another"}, "format 'another'"),
        ({"step": 9}, "checksum does not match"),
    ],
)
def test_manifests_of_another_kind(tmp_path, change, message):
    put(tmp_path / "a", 3)
    path = tmp_path / "a" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        Manifest.read(tmp_path / "a")


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    written = write_file(tmp_path / "outside", b"")
    manifest = Manifest("0" * 32, 1, 1, 1, 0, 1, "digest", {"../outside": written})
    (folder / MANIFEST).write_text(manifest.to_json())
    with pytest.raises(ValueError, match="outside its folder"):
        Manifest.read(folder)


def test_replacing_keeps_what_others_put_there(tmp_path):
    put(tmp_path / "a", 1)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    put(tmp_path / "a", 2)
    assert names(tmp_path) == ["a"] and names(tmp_path / "a") == ["data", MANIFEST, "notes.txt"]
    assert Manifest.read(tmp_path / "a").step == 2


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path, kind):
    final = tmp_path / "a"
    if kind == "folder":
        final.mkdir()
        check_replaceable(final)  # empty: nothing to lose
        (final / "precious").write_text("")
    else:
        final.write_text("precious")
    with pytest.raises(FileExistsError, match="is not a checkpoint|is not a folder"):
        check_replaceable(final)


def test_a_failed_writer_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="disk"):
        with partial_folder(tmp_path / "a", "0" * 32) as folder:
            fill(folder, 1)
            raise OSError("disk")
    assert names(tmp_path) == []


def test_killed_between_the_two_renames(tmp_path):
    """Both folders are complete and hidden: the newer one gets the final name."""
    leave(tmp_path / "a", 1, "replaced")
    leave(tmp_path / "a", 2)
    assert {found.manifest.step for found in search(tmp_path / "a")} == {1, 2}
    assert [found.relative for found in search(tmp_path)] == ["a", "a"]
    recover(tmp_path / "a")
    assert Manifest.read(tmp_path / "a").step == 2


def test_complete_but_not_renamed(tmp_path):
    put(tmp_path / "a", 1)
    leave(tmp_path / "a", 2)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["a"] and Manifest.read(tmp_path / "a").step == 2


def test_leftovers_are_removed_and_the_living_left_alone(tmp_path):
    put(tmp_path / "a", 3)
    leave(tmp_path / "a", 2)  # older than what is there
    leave(tmp_path / "b", 4, complete=False)
    (tmp_path / ".other.partial").mkdir()
    old, young = token_path(tmp_path / "a", "0" * 32, 0), token_path(tmp_path / "a", "1" * 32, 0)
    for token in (old, young):
        token.touch()
    before = time.time() - 2 * checkpoint_files.LONGEST_ELECTION_SECONDS
    os.utime(old, (before, before))
    with partial_folder(tmp_path / "c", f"{5:032x}") as living:
        fill(living, 5)
        remove_leftovers(tmp_path)
        assert names(tmp_path) == sorted([living.name, lock_path(living).name, ".other.partial", young.name, "a"])
        assert [found.manifest.step for found in search(tmp_path)] == [3]
    assert Manifest.read(tmp_path / "a").step == 3


def test_a_damaged_leftover_is_not_promoted(tmp_path):
    put(tmp_path / "a", 1)
    (leave(tmp_path / "a", 2) / "data").write_bytes(b"CONTENT")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["a"] and Manifest.read(tmp_path / "a").step == 1


def test_generations_order_saves_whatever_their_step(tmp_path):
    assert newest_generation(tmp_path / "nowhere") == 0
    put(tmp_path / "step_200", 200, generation=2)
    put(tmp_path / "step_150", 150, generation=3)
    leave(tmp_path / "step_9", 9)
    assert newest_generation(tmp_path) == 9
    newest = max(search(tmp_path), key=lambda found: found.manifest.age)
    assert newest.relative == "step_9"
