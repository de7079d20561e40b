"""Tenants: namespaces that nobody can enter by naming them, and that stay the same with a secret file."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.config.schema import ServerOptions
from penstock.core.errors import ConfigError
from penstock.server.tenants import Tenants, read_secret


def tenants(*keys: str, disk: str | None = None, **options: str) -> Tenants:
    return Tenants(ServerOptions(api_key=list(keys), **options), disk)  # type: ignore[arg-type]


def test_keys_and_salts_divide() -> None:
    found = tenants("a", "b")
    asked = [(b"a", None), (b"b", None), (b"a", "x"), (b"b", "x"), (b"a", "y"), (b"ax", None)]
    names = [found.of(*one) for one in asked]
    assert len({salt for _, salt in names}) == len(asked)
    assert names[0][0] == names[2][0] == names[4][0] != names[1][0] == names[3][0], "a salt does not change whose account it is"
    assert found.of(b"a", None) == names[0]


def test_nobody_enters_by_naming() -> None:
    found = tenants("a", "b")
    tenant, salt = found.of(b"a", None)
    for name in (salt, tenant, "a", ""):
        assert found.of(b"b", name)[1] != salt


def test_when_there_is_isolation() -> None:
    assert not tenants().isolated and tenants("a").isolated
    assert not tenants("a", "b", cache_isolation="none").isolated
    assert tenants("a", "b", cache_isolation="none").of(b"a", "x") == ("", "x")
    behind_a_gateway = tenants(cache_isolation="key")
    assert behind_a_gateway.of(b"a", None) != behind_a_gateway.of(b"b", None)


def test_the_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    first = tenants("a", cache_secret_file=str(path)).of(b"a", "x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert tenants("a", cache_secret_file=str(path)).of(b"a", "x") == first, "the same after a restart"
    assert tenants("a").of(b"a", "x") != tenants("a").of(b"a", "x"), "without a file, new at each start"
    assert tenants("a", cache_secret_file=str(tmp_path / "other")).of(b"a", "x") != first
    path.write_text("short")
    with pytest.raises(ConfigError, match="5 characters"):
        tenants("a", cache_secret_file=str(path))
    with pytest.raises(ConfigError, match="cannot use"):
        tenants("a", cache_secret_file=str(path / "under" / "a file"))


def test_salts_live_as_long_as_the_pages_on_disk(tmp_path: Path) -> None:
    folder = str(tmp_path / "pages")
    first = tenants("a", disk=folder).of(b"a", None)
    assert tenants("a", disk=folder).of(b"a", None) == first
    assert [str(path.relative_to(folder)) for path in Path(folder).rglob("tenants.secret")] == ["penstock-cache/tenants.secret"]
    assert tenants(disk=str(tmp_path / "unused")).isolated is False and not (tmp_path / "unused").exists()


def test_two_servers_that_start_at_once_agree(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(read_secret, [path] * 32))
    assert len(found) == 1 and list(tmp_path.iterdir()) == [path]
