"""The cache touches nothing in a folder but what it created: other people's files are compared before and after."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import pytest

from penstock.cache.tiers.catalog import Catalog, Keeper
from penstock.cli.main import main
from penstock.core.errors import ConfigError
from penstock.stores import folder as folders
from penstock.stores.disk import DiskStore
from penstock.stores.folder import INCOMING, MARKER, PAGES, SUBFOLDER, claim
from penstock.stores.record import HEADER_BYTES
from tests.system.test_tiers import figures, reference, slab_bytes, start, talk
from tests.unit.stores.pages import get, name, page, path_of, put, version

KEY = "ab" * 32


def bystanders(root: Path) -> None:
    """Files that a user may have, at every depth at which the cache has any, older than everything; some look like pages."""
    names = ["model.safetensors", "models/llama/model.safetensors", "uploads/incoming/video.mp4", "incoming/upload.part",
             f"{'0' * 32}/ab/{KEY}-0", f"{'0' * 32}/ab/README", f"{'0' * 32}/version.json.bak", "a/b/c/d/e", f"ab/{KEY}-0",
             "incoming/1-2-3", "photos/2024/ferry.jpg", f"{SUBFOLDER}.old/{PAGES}/x"]
    for text in names:
        path = root / text
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() * 300)
        os.utime(path, (1000, 1000))


def intruders(own: Path, elsewhere: Path) -> None:
    """Files of others within the cache's own subfolder, and links out of it to files that are named as pages are."""
    home = own / PAGES / version().id.hex()
    for path in (own / "notes.txt", own / PAGES / "notes.txt", own / INCOMING / "upload.part",
                 own / PAGES / "llama" / "ab" / "x", home / "ab" / "README", home / "cd" / f"{KEY}-0", home / "ab" / f"{KEY}",
                 home / "ab" / f"{KEY}-0.bak"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not a page")
        os.utime(path, (1000, 1000))
    elsewhere.mkdir()
    (elsewhere / f"{KEY}-0").write_text("behind a link")
    (elsewhere / "1-2-3").write_text("behind a link")
    os.utime(elsewhere / "1-2-3", (1000, 1000))
    other = own / PAGES / ("1" * 32)
    other.mkdir()
    (other / "ab").symlink_to(elsewhere)
    (own / PAGES / ("2" * 32)).symlink_to(elsewhere.parent)
    (home / "ab" / f"ab{KEY[2:-2]}00-0").symlink_to(elsewhere / f"{KEY}-0")
    (own / INCOMING / "4-5-6").symlink_to(elsewhere / "1-2-3")


def snapshot(*roots: Path) -> dict[str, tuple[object, ...]]:
    """Every file and link with contents, times, mode and inode, without the cache's own pages."""
    found: dict[str, tuple[object, ...]] = {}
    for root in roots:
        for path in sorted(root.rglob("*")):
            facts = path.lstat()
            if path.is_symlink():
                found[str(path)] = "link", os.readlink(path), facts.st_ino
            elif path.is_file():
                found[str(path)] = path.read_bytes(), facts.st_mtime_ns, facts.st_mode, facts.st_ino
    return found


def kept(before: dict[str, tuple[object, ...]], *roots: Path) -> bool:
    after = snapshot(*roots)
    changed = [path for path, facts in before.items() if after.get(path) != facts]
    assert not changed, changed
    return True


def test_bystanders_survive_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Filling, eviction, sweeping, forgetting everything, `rm --all` and `verify --remove`, among files of others."""
    root, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    root.mkdir()
    bystanders(root)
    own = claim(str(root), adopt=True).path
    intruders(own, elsewhere)
    before = snapshot(root, elsewhere)
    size, bound = 3000, 8 * (3000 + HEADER_BYTES)
    for found in (version(computation="other"), version()):
        catalog = Catalog(DiskStore(claim(str(root)), found), [size, size], bound)
        keeper = Keeper(catalog, 0.01)
        for i in range(24):
            if catalog.reserve(name(i), float(i)):
                put(catalog.store, found, i)  # type: ignore[arg-type]
                catalog.finish_write(name(i), True, float(i))
            time.sleep(0.005)
            keeper.wake()
        keeper.close()
        assert catalog.evicted and catalog.pages, "it had to give up pages"
        assert sum(path.stat().st_size for path in own.rglob("*-0") if path.is_file() and path.parent.name == "00") <= bound
        assert kept(before, root, elsewhere)
        catalog.doom_all()
        catalog.bury()
    put(catalog.store, version(), 90)  # type: ignore[arg-type]
    path_of(catalog.store, name(90)).write_bytes(b"broken")  # type: ignore[arg-type]
    assert main(["cache", "verify", str(root), "--remove"]) == 1
    put(catalog.store, version(), 91)  # type: ignore[arg-type]
    for words in (["ls"], ["ls", "--pages"], ["stat"], ["rm", "--keep-bytes", "1"], ["rm", "--unused", "0s"], ["rm", "--all"]):
        assert main(["cache", words[0], str(root), *words[1:]]) == 0
    assert "0 bytes are left" in capsys.readouterr().out
    assert not path_of(catalog.store, name(91)).exists()  # type: ignore[arg-type]
    assert kept(before, root, elsewhere)


def test_an_engine_over_its_bound_touches_nobody_elses_files(tmp_path: Path) -> None:
    """The case that lost data: a small bound in a folder with models and uploads in it."""
    bystanders(tmp_path)
    before = snapshot(tmp_path)
    engine = start("stories260k", host_slabs=12, cache_disk=str(tmp_path), cache_disk_adopt=True, cache_load="always",
                   cache_disk_bytes=slab_bytes("stories260k")[0] * 30)
    assert talk(engine) == reference("stories260k")
    deadline = time.monotonic() + 5
    while not figures(engine)["disk"].evicted_pages and time.monotonic() < deadline:
        engine.turn()
        time.sleep(0.01)
    assert figures(engine)["disk"].evicted_pages
    engine.close()
    assert kept(before, tmp_path)


def test_a_folder_with_other_files_is_refused_unless_adopted(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(ConfigError, match=r"other files in it \(thesis.tex\).*cache_disk_adopt"):
        claim(str(tmp_path))
    assert os.listdir(tmp_path) == ["thesis.tex"], "a refused folder stays as it was"
    own = claim(str(tmp_path), adopt=True).path
    assert own.parent == tmp_path.resolve() and claim(str(tmp_path)).path == own, "once adopted it is known by its marker"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a folder"):
        claim(str(tmp_path / "file"))
    fresh = tmp_path / "fresh"
    (fresh / "lost+found").mkdir(parents=True)
    assert claim(str(fresh)).path == fresh.resolve() / SUBFOLDER, "a new file system is nobody's"


def test_a_subfolder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "one" / SUBFOLDER
    own.mkdir(parents=True)
    (own / "mine").write_text("")
    with pytest.raises(ConfigError, match="not created by Penstock"):
        claim(str(own.parent), adopt=True)
    target = claim(str(tmp_path / "two")).path
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / SUBFOLDER).symlink_to(target)
    with pytest.raises(ConfigError, match="symbolic link"):
        claim(str(tmp_path / "three"))
    (tmp_path / "four").symlink_to(tmp_path / "two")
    assert claim(str(tmp_path / "four")).path == target, "a link that the user names is his to name"
    (target / MARKER).write_text("something else")
    with pytest.raises(ConfigError, match="not the marker"):
        claim(str(tmp_path / "two"))
    mine = claim(str(tmp_path / "five"))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {os.getuid()}"):
        claim(str(tmp_path / "five"))
    with pytest.raises(ConfigError, match="belongs to user"):
        folders.find(tmp_path / "five")
    assert mine.path.exists()


def test_nobody_else_may_look(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        store = DiskStore(claim(str(tmp_path)), version())
        put(store, version(), 1)
    finally:
        os.umask(old_mask)
    for path in [store.folder.path, *store.folder.path.rglob("*")]:
        assert not stat.S_IMODE(path.lstat().st_mode) & 0o077, path
    store.folder.path.chmod(0o755)
    claim(str(tmp_path))
    assert stat.S_IMODE(store.folder.path.stat().st_mode) == 0o700


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A page, or the folder of its pages, that is a link to a page elsewhere is neither read, written nor deleted."""
    store, other = (DiskStore(claim(str(tmp_path / text)), version()) for text in ("one", "two"))
    put(other, version(), 1)
    target = path_of(other, name(1))
    bucket = path_of(store, name(1)).parent
    bucket.mkdir()
    path_of(store, name(1)).symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        get(store, version(), 1)
    store.delete(name(1))
    assert get(other, version(), 1) == page(1) and not path_of(store, name(1)).is_symlink()
    bucket.rmdir()
    bucket.symlink_to(target.parent)
    for operation in (lambda: get(store, version(), 1), lambda: put(store, version(), 2), lambda: store.delete(name(1)),
                      lambda: store.touch(name(1))):
        with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
            operation()
    assert store.changes()[0] == []
    assert get(other, version(), 1) == page(1) and len(list(target.parent.iterdir())) == 1


def test_many_engines_that_start_at_once_agree(tmp_path: Path) -> None:
    found: list[object] = []

    def run() -> None:
        try:
            found.append(claim(str(tmp_path / "new")).path)
        except (OSError, ConfigError) as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {tmp_path.resolve() / "new" / SUBFOLDER}
    assert sorted(os.listdir(tmp_path / "new" / SUBFOLDER)) == [INCOMING, MARKER, PAGES]


def test_a_killed_start_is_taken_up(tmp_path: Path) -> None:
    """Between making the subfolder and marking it."""
    own = tmp_path / SUBFOLDER
    own.mkdir()
    (own / f"{MARKER}.1-2").write_bytes(b"half")
    assert claim(str(tmp_path)).path == own.resolve()
