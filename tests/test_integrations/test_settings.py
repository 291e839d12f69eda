# SPDX-License-Identifier: Apache-2.0
"""docs/api.md has the table of settings that config.py has."""

from pathlib import Path

import pytest

from bundler import config, user_settings
from bundler.errors import ConfigError

API = Path(__file__).resolve().parents[2] / "docs" / "api.md"


def test_each_setting_is_documented():
    """Each variable stands in the table with its values, default and meaning, and is read."""
    rows = [
        f"| `{config.PREFIX}{setting.name}` | {setting.values} | {setting.default} |"
        f" {setting.meaning} |"
        for setting in config.SETTINGS
    ]
    assert [row for row in rows if row not in API.read_text(encoding="utf-8")] == []
    assert {setting.name.lower() for setting in config.SETTINGS} == set(
        user_settings.Settings.__struct_fields__
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("MODE", "both"), ("STRICT", "1"), ("TIMEOUT_S", "soon"), ("DISABLE", "yes")],
)
def test_a_wrong_value_is_named(name, value, monkeypatch):
    """A value that a variable cannot have is an error that names the variable, what it got, and
    what was expected.
    """
    monkeypatch.setenv(config.PREFIX + name, value)
    with pytest.raises(ConfigError, match=f"{config.PREFIX}{name}='{value}': expected"):
        config.settings()


def test_unknown_variables_are_named_with_the_nearest(monkeypatch):
    """A misspelled variable is named with the right one, one like no other alone; settings, and
    what we set ourselves, are known.
    """
    assert config.unknown_words() is None
    for name in [setting.name for setting in config.SETTINGS] + [
        "SPOOL",
        "SPOOL_INNER",
        "INNER",
        "REGISTERED",
    ]:
        monkeypatch.setenv(config.PREFIX + name, "x")
    assert config.unknown_variables() == {}
    for name in ("STORES", "store", "PASSWORDFILE", "TIMEOUT"):
        monkeypatch.setenv(config.PREFIX + name, "")
    assert config.unknown_variables() == {
        "TRITON_BUNDLER_PASSWORDFILE": "TRITON_BUNDLER_PASSWORD_FILE",
        "TRITON_BUNDLER_STORES": "TRITON_BUNDLER_STORE",
        "TRITON_BUNDLER_TIMEOUT": "TRITON_BUNDLER_TIMEOUT_S",
        "TRITON_BUNDLER_store": "TRITON_BUNDLER_STORE",
    }
    for name in ("STORES", "store", "PASSWORDFILE", "TIMEOUT"):
        monkeypatch.delenv(config.PREFIX + name)
    monkeypatch.setenv("TRITON_BUNDLER_XQ", "1")
    assert (
        config.unknown_words()
        == "TRITON_BUNDLER_XQ is no setting of triton-bundler and changes nothing"
    )
    monkeypatch.setenv("TRITON_BUNDLER_STROE", "1")
    assert (
        config.unknown_words()
        == "TRITON_BUNDLER_STROE (did you mean TRITON_BUNDLER_STORE?), TRITON_BUNDLER_XQ are no"
        " settings of triton-bundler and change nothing"
    )


def test_what_is_set_is_read(monkeypatch):
    """Stores are blank-separated; what is only for servers is kept apart."""
    monkeypatch.setenv("TRITON_BUNDLER_STORE", "file:///a  redis://b ")
    monkeypatch.setenv("TRITON_BUNDLER_TIMEOUT_S", "0.5")
    monkeypatch.setenv("TRITON_BUNDLER_NAMESPACE", "team")
    chosen = config.settings()
    assert chosen.store == ("file:///a", "redis://b")
    assert chosen.server == {"timeout_s": 0.5, "connect_timeout_s": 0.5, "namespace": "team"}


@pytest.mark.parametrize("value", ["errr", "1", "ERROR", "yes"])
def test_who_misspells_strictness_is_strict(value, monkeypatch):
    """A process that asked for it ends at its start, and does not go on without it."""
    monkeypatch.setenv(config.PREFIX + "STRICT", value)
    assert config.strict_setting() == "error"
    with pytest.raises(ConfigError, match=r"STRICT='.*': expected one of off, warn, error"):
        config.settings()


@pytest.mark.parametrize(("value", "mode"), [("", "off"), ("warn", "warn"), ("error", "error")])
def test_a_mode_of_strictness_is_itself(value, mode, monkeypatch):
    """What is one, and nothing at all."""
    monkeypatch.setenv(config.PREFIX + "STRICT", value)
    assert config.strict_setting() == mode
