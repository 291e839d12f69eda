# SPDX-License-Identifier: Apache-2.0
"""docs/schemas says what each command prints with --json; every other run with --json in these
tests is compared, too.
"""

import contextlib
import json
import re
import threading
from pathlib import Path

import json_schemas
import jsonschema
import pytest

from bundler import errors
from bundler.cli.stores import serve_command

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "data" / "v2.0" / "triton-3.7.1.tbundle"
# These compile or look at the whole machine: their own tests run them with --json.
ELSEWHERE = ("demo", "run", "build", "generate", "capture", "doctor")
NAMES = ["-".join(words) for words in json_schemas.named_commands()]
TABLE = {
    "tuning": [
        {
            "kernel": "add",
            "source": "ab",
            "config": {"kwargs": {"BLOCK": 64}},
            "found_by": "table",
            "time_ns": 1000,
        }
    ]
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with two bundles and a table of tunings, a store, and a home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_BUNDLER_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("TRITON_BUNDLER_LOCAL", str(tmp_path / "local"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "b.tbundle").write_bytes(GOLDEN.read_bytes())
    (tmp_path / "winners.json").write_text(json.dumps(TABLE))
    return tmp_path


def test_each_command_has_a_schema():
    """None is missing, none is left of a command that is gone, and each is a valid schema that
    allows no unknown key.
    """
    assert sorted(json_schemas.schemas()) == sorted([*NAMES, "common", "error"])
    for name, schema in json_schemas.schemas().items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["$id"] == f"{name}.json"
        forms = [
            schema["$defs"][one["$ref"].rpartition("/")[2]] for one in schema.get("anyOf", ())
        ] or [schema]
        assert name == "common" or all(form["additionalProperties"] is False for form in forms), (
            name
        )


def test_an_unknown_key_fails_the_test_that_prints_it():
    """What the fixtures call says which command it is, and what is wrong."""
    with pytest.raises(AssertionError, match=r"man: at .*never_declared"):
        json_schemas.check_printed(
            ["man", "--json"], '{"directory": "x", "files": [], "never_declared": 1}'
        )


def test_error_codes_are_those_of_the_errors():
    """A program may tell errors apart by their code."""
    codes, left = {"usage"}, [errors.BundlerError]
    while left:
        codes.add((kind := left.pop()).code)
        left += kind.__subclasses__()
    assert (
        set(json_schemas.schemas()["error"]["properties"]["error"]["properties"]["code"]["enum"])
        == codes
    )


@pytest.mark.parametrize(
    "words", [["stats"], ["pull", "t", "--stor"], ["inspect", "nothing.tbundle"], ["nothing"]]
)
def test_errors_are_objects_of_one_kind(cli_json, place, words):
    """Whoever reads the object needs to look at one key to know that it is an error."""
    status, printed = cli_json(*words)
    assert (status in {1, 2}, [*printed]) == (True, ["error"])


def quick_lines(place, monkeypatch):
    """Return a run of each command that is quick, in an order in which all are fine."""
    monkeypatch.setattr(serve_command, "asked_to_end", lambda: contextlib.nullcontext(_set()))
    store = ("--store", place / "store")
    return [
        ("inspect", "b.tbundle"),
        ("inspect", "b.tbundle", "--resources"),
        ("inspect", "b.tbundle", "--leaks"),
        ("extract", "b.tbundle", "--kernel", "*", "-o", "files"),
        ("verify", "b.tbundle"),
        ("diff", "b.tbundle", "b.tbundle"),
        ("report", "b.tbundle", "-o", "b.html"),
        ("merge", "b.tbundle", "b.tbundle", "-o", "m.tbundle"),
        ("push", "b.tbundle", "--tag", "t", *store),
        ("pull", "t", "-o", "p.tbundle", *store),
        ("tags", *store),
        ("stats", *store),
        ("top", place / "store"),
        ("prune", "--dry-run", *store),
        ("verify", *store),
        ("sync", place / "store", place / "other"),
        ("restore", "--tag", "t", "--only", "all", *store),
        ("restore", "b.tbundle", "--check", "--only", "all"),
        ("pack", place / "triton-cache", "-o", "packed.tbundle"),
        ("tags", "--delete", "t", *store),
        ("oci", "export", "b.tbundle", "images", "--tag", "t"),
        ("oci", "import", "images", "--tag", "t", "-o", "i.tbundle"),
        ("oci", "push", "b.tbundle", f"oci-dir:{place}/images:u"),
        ("oci", "pull", f"oci-dir:{place}/images:u", "-o", "u.tbundle"),
        ("oci", "tags", f"oci-dir:{place}/images:u"),
        ("top", f"file://{place}/store", "--once"),
        ("serve", "b.tbundle", "--listen", "127.0.0.1:0"),
        ("key", "new", "k.pem"),
        ("key", "trust", "k.pub", "--name", "k"),
        ("key", "list"),
        ("key", "revoke", "k"),
        ("sign", "b.tbundle", "--key", "k.pem"),
        ("explain", "--tree", "b.tbundle"),
        ("config", "show"),
        ("completion", "bash"),
        ("completion", "bash", "--print"),
        ("man",),
        ("tune", "import", "winners.json", "-o", "w.tbundle"),
        ("tune", "show", "w.tbundle"),
        ("tune", "export", "w.tbundle", "-o", "again.json"),
        ("tune", "diff", "w.tbundle", "w.tbundle"),
    ]


def test_every_quick_command_prints_what_its_schema_says(cli, place, monkeypatch):
    """What each prints is compared by the fixture.  A key that is not in the schema is refused."""
    run = set()
    for line in quick_lines(place, monkeypatch):
        done = cli(*line, "--json")
        assert done.exit_code == 0, (line, done.output)
        printed = json.loads(done.stdout)
        name = json_schemas.command_of(line)
        run.add(name)
        assert not json_schemas.validator(name).is_valid(printed | {"never_declared": 1}), name
    assert run == {*NAMES} - {*ELSEWHERE}


def test_every_quick_command_is_silent_where_that_is_wished(cli, place, monkeypatch):
    """With --quiet nothing is printed by a command that finds no problem."""
    for line in quick_lines(place, monkeypatch):
        done = cli(*line, "--quiet")
        assert (done.exit_code, done.output) == (0, ""), line


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_commands_print_their_object_in_tests_of_their_own(name):
    """The fixtures that compare with the schema are what those tests call."""
    call = rf'(cli_json\(\s*"{name}"|(command|cli)\(\s*"{name}"[\s\S]{{0,300}}?"--json")'
    found = [
        path.name
        for path in HERE.glob("test_*.py")
        if re.search(call, path.read_text(encoding="utf-8"))
    ]
    assert found, f"no test runs {name} --json"


def _set():
    event = threading.Event()
    event.set()
    return event
