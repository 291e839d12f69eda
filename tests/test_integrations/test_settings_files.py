# SPDX-License-Identifier: Apache-2.0
"""Settings in files: which file counts, what the environment overrules, and what a file may not
say.
"""

import os

import pytest

from bundler import Family, config, user_settings
from bundler.errors import BundlerError, ConfigError, LimitExceeded


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A project's folder, in which the process stands, and a home without settings."""
    for name in [name for name in os.environ if name.startswith(config.PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    folder = tmp_path / "project" / "src"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return tmp_path / "project"


@pytest.fixture
def users(tmp_path):
    """The user's own file."""
    (tmp_path / "home" / "triton-bundler").mkdir(parents=True)
    return tmp_path / "home" / "triton-bundler" / config.SETTINGS_FILE


def origins():
    """Return what sets each setting that something sets."""
    return {
        one.setting.name: (one.value, one.origin)
        for one in config.origins()
        if one.origin != "default"
    }


def test_nothing_set_is_nothing_read():
    """Without a file and a variable every setting is its default."""
    assert config.settings() == user_settings.Settings()
    assert (origins(), config.settings_files()) == ({}, [])


def test_the_nearer_file_wins_setting_by_setting(project, users, monkeypatch):
    """Environment, then the project's file, then the user's; what one leaves open the next says."""
    here, theirs = project / config.SETTINGS_FILE, users
    here.write_text(
        'store = ["file:///near", "redis://far"]\ntimeout-s = 2.5\nmode = "read"\nreplay = true\n'
    )
    theirs.write_text('mode = "write"\ntag = "mine"\ntrust = "code"\n')
    monkeypatch.setenv("TRITON_BUNDLER_TIMEOUT_S", "3")
    chosen = config.settings()
    assert (chosen.store, chosen.timeout_s, chosen.mode) == (
        ("file:///near", "redis://far"),
        3.0,
        "read",
    )
    assert (chosen.replay, chosen.tag, chosen.trust) == (True, "mine", "code")
    assert origins() == {
        "STORE": ("file:///near redis://far", str(here)),
        "TIMEOUT_S": ("3", "TRITON_BUNDLER_TIMEOUT_S"),
        "MODE": ("read", str(here)),
        "REPLAY": ("1", str(here)),
        "TAG": ("mine", str(theirs)),
        "TRUST": ("code", str(theirs)),
    }


def test_a_table_of_pyproject_counts_and_another_tools_does_not(project):
    """A pyproject.toml without our table is not the project's file: the search goes on above it."""
    (project / "src" / "pyproject.toml").write_text("[tool.other]\nmode = 1\n")
    (project / "pyproject.toml").write_text('[tool.triton-bundler]\nmode = "read"\n')
    assert origins() == {"MODE": ("read", str(project / "pyproject.toml"))}


def test_one_file_can_be_named_or_none(project, tmp_path, monkeypatch):
    """TRITON_BUNDLER_CONFIG names the only file that is read, or says that none is."""
    (project / config.SETTINGS_FILE).write_text('mode = "read"\n')
    named = tmp_path / "named.toml"
    named.write_text('trust = "code"\n')
    monkeypatch.setenv("TRITON_BUNDLER_CONFIG", str(named))
    assert origins() == {"TRUST": ("code", str(named))}
    monkeypatch.setenv("TRITON_BUNDLER_CONFIG", "none")
    assert origins() == {}
    monkeypatch.setenv("TRITON_BUNDLER_CONFIG", str(tmp_path / "nothing.toml"))
    with pytest.raises(ConfigError, match=r"nothing\.toml: it cannot be read: No such file"):
        config.settings()


def test_a_file_that_everybody_may_write_is_passed_over(project):
    """Settings that somebody else can plant above the working directory do not count, and it is
    said which file that is.
    """
    path = project / config.SETTINGS_FILE
    path.write_text('mode = "read"\n')
    path.chmod(0o666)
    assert config.settings().mode == "readwrite"
    assert [(place.path, place.passed_over) for place in config.settings_files()] == [
        (str(path), "everybody may write it; take that away by chmod o-w")
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_passed_over(project):
    """The same holds for a file that another user owns."""
    path = project / config.SETTINGS_FILE
    path.write_text('mode = "read"\n')
    os.chown(path, 4242, -1)
    assert config.settings().mode == "readwrite"
    assert (
        config.settings_files()[0].passed_over
        == "it belongs to user 4242; name it by TRITON_BUNDLER_CONFIG to have it read"
    )


@pytest.mark.parametrize("name", sorted(config.PERSONAL))
def test_a_project_does_not_decide_whom_to_trust(name, project, users):
    """What vouches for machine code stands in the user's file; the error says where to put it."""
    key = config.setting_key(name)
    (project / config.SETTINGS_FILE).write_text(f'{key} = "x"\n')
    with pytest.raises(ConfigError) as caught:
        config.origins()
    assert (
        f"{key} cannot be set by a project's file: put it into {users}, or set"
        f" TRITON_BUNDLER_{name}" in str(caught.value)
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mode = ", "it is no TOML: "),
        ('stroe = "x"', "stroe is no setting (did you mean store?)"),
        ('xq = "x"', "xq is no setting; known are code-signatures, disable, keep, "),
        (
            "store = [1]",
            (
                "store: expected a text, a number, true, false or a list of texts without blanks,"
                " got [1]"
            ),
        ),
        ('store = ["file:///a b"]', "or a list of texts without blanks, got ['file:///a b']"),
        ("[mode]\na = 1", "mode: expected a text, a number"),
        ("Mode = 'read'", "Mode is no setting (did you mean mode?)"),
        ("mode = 'both'", "mode = 'both': expected one of readwrite, read, write"),
        ("timeout-s = 0", "timeout-s = '0': expected seconds, more than 0"),
        ("store = " + "[" * 100_000, "it is no TOML: arrays or tables lie too deep"),
        ("store = " + "{a=" * 100_000, "it is no TOML: arrays or tables lie too deep"),
        ("# " + "x" * config.MOST_FILE_BYTES, "it has more than 1,000,000 bytes"),
    ],
)
def test_a_wrong_file_is_named(text, words, project):
    """What is wrong is said with the file and the name of the setting."""
    path = project / config.SETTINGS_FILE
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.settings()
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


@pytest.fixture
def another(monkeypatch):
    """Make files whose name begins with another user's appear as such a user's; only root could
    give them away.
    """
    judged = config._not_ours
    monkeypatch.setattr(
        config,
        "_not_ours",
        lambda status: "it belongs to user 4242" if status.st_mode & 0o001 else judged(status),
    )

    def plant(path, content, mode=0o701):
        path.write_text(content)
        path.chmod(mode)

    return plant


@pytest.mark.parametrize("name", [config.SETTINGS_FILE, config.PYPROJECT])
@pytest.mark.parametrize(
    "content",
    [
        "# " + "x" * config.MOST_FILE_BYTES,
        "[tool.triton-bundler]\n# " + "x" * config.MOST_FILE_BYTES,
        "[tool.triton-bundler]\nmode = " + "[" * 100_000,
        "[tool.triton-bundler]\n\0",
    ],
    ids=["large", "large with our table", "deep", "no TOML"],
)
def test_whatever_another_user_puts_above_us_is_passed_over(name, content, project, another):
    """In a directory such as /tmp anybody may leave a file: it fails no restore and no compile."""
    another(project / name, content)
    assert config.settings().mode == "readwrite"
    assert [file.passed_over for file in config.settings_files()] in (
        [],
        ["it belongs to user 4242"],
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_of_another_user_that_cannot_be_read_is_passed_over(project, another):
    """Nor does one that nobody else may look into."""
    another(project / config.SETTINGS_FILE, "", 0o001)
    assert config.settings().mode == "readwrite"


def test_a_large_pyproject_without_our_table_is_nobodys_concern(project):
    """A file of the user's that is none of settings is not complained of."""
    (project / "pyproject.toml").write_text("[tool.other]\n# " + "x" * config.MOST_FILE_BYTES)
    assert origins() == {}


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_named_file_that_is_none_is_an_error_at_once(kind, project, tmp_path, monkeypatch):
    """Nobody waits for somebody to write into a named pipe."""
    path = tmp_path / "named.toml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = "/dev/zero"
    monkeypatch.setenv("TRITON_BUNDLER_CONFIG", str(path))
    with pytest.raises(ConfigError, match="it cannot be read: "):
        config.settings()


def test_a_file_that_becomes_a_pipe_when_it_was_seen_is_not_waited_for(project, monkeypatch):
    """What is opened is looked at, not what was there before."""
    os.mkfifo(project / config.SETTINGS_FILE)
    monkeypatch.setattr(os.path, "isfile", os.path.exists)
    with pytest.raises(ConfigError, match="named pipe"):
        config.settings()


def test_a_file_of_families_that_is_deep_large_or_a_pipe(tmp_path):
    """The same holds for every file of TOML that somebody names."""
    path = tmp_path / "families.toml"
    path.write_text("families = " + "[" * 100_000)
    with pytest.raises(ConfigError, match="too deep"):
        Family.load(path)
    path.write_text("#" + "x" * 1_000_000)
    with pytest.raises(LimitExceeded):
        Family.load(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BundlerError, match="named pipe"):
        Family.load(path)
