# SPDX-License-Identifier: Apache-2.0
"""The command `top`: stores and endpoints of metrics, as lines, as JSON and as a live view; nothing
is changed, and little is asked.
"""

import contextlib
import fcntl
import http.server
import io
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading

import pytest
from rich.console import Console

import bundler
from bundler.cli.stores import top_command
from bundler.cli.stores.top_command import SourceStatus
from bundler.cli.terminal import Screen

TEXT = """# HELP triton_bundler_lookups_total Kernels.
triton_bundler_lookups_total{result="hit",tier="tag"} 30.0
triton_bundler_lookups_total{result="hit",tier="triton"} 10.0
triton_bundler_lookups_total{result="miss",tier="none"} 10.0
triton_bundler_breaker_state{tier="redis://far:6379/\\"0\\""} 2.0
triton_bundler_breaker_state{tier="near"} 0.0
triton_bundler_compile_seconds_total 61.0
what is no sample
triton_bundler_restore_seconds_sum NaN
"""
KEY = "A" * 52


@pytest.fixture
def endpoint():
    """The address of a server that shows these metrics at /metrics, until the test ends."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = TEXT.encode() if self.path == "/metrics" else b"x"
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):
                self.wfile.write(
                    body if self.path != "/large/metrics" else bytes(top_command.MOST_BYTES + 1)
                )

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def leased(tmp_path):
    """The path of a store in which somebody compiles a kernel."""
    with bundler.open_store(f"file://{tmp_path}/store") as store:
        lease = store.kernel_records().lease(KEY, 60)
        yield tmp_path / "store"
        lease.release()


def test_once_says_a_line_for_each_source_and_lease(cli, endpoint, leased):
    """Hits, misses, who compiles what, sizes, and breakers that are not closed; the store stays as
    it was.
    """
    before = sorted(path for path in leased.rglob("*"))
    result = cli("top", "--once", endpoint, leased)
    assert result.exit_code == 0
    process, breaker, store, lease = result.stdout.splitlines()
    assert process.startswith(f"{endpoint}: hits 40, misses 10, compiles 0, compile_seconds 61,")
    assert breaker == '  breaker of redis://far:6379/"0" is not closed'
    assert store == f"file://{leased}: bytes 0, units 0, records 0, tags 0, failures 0"
    assert lease.startswith(f"  {KEY} is compiled by ")
    assert f":{os.getpid()}, " in lease
    assert sorted(path for path in leased.rglob("*")) == before


def test_json_has_all_and_an_error_is_status_1(cli_json, leased, tmp_path):
    """What does not answer is told with its reason beside what does, without a password."""
    status, found = cli_json(
        "top", leased, tmp_path / "none", "http://me:secret@127.0.0.1:1/metrics"
    )
    assert (status, found["ok"]) == (1, False)
    store, none, refused = found["sources"]
    ((key, holder, left_s),) = [lease.values() for lease in store["leases"]]
    assert (key, holder.rpartition(":")[2], 0 < left_s <= 60) == (
        f"v1/c/{KEY}",
        str(os.getpid()),
        True,
    )
    assert none["error"] == f"no directory {tmp_path / 'none'} yet; push makes it"
    assert "refused" in refused["error"]
    assert "secret" not in str(found)


def test_an_address_that_sends_too_much_is_none_of_ours(endpoint):
    """No more than some MB are read."""
    with pytest.raises(bundler.StoreUnavailable, match=f"more than {top_command.MOST_BYTES} bytes"):
        top_command.read_metrics(f"{endpoint}/large/metrics")


def test_samples_are_read_as_they_are_written():
    """Labels may hold quotes; what is no sample, and no number, is left out."""
    found = top_command.parsed(TEXT)
    assert found["triton_bundler_breaker_state", (("tier", 'redis://far:6379/"0"'),)] == 2
    assert (
        len(found),
        top_command.total(found, "triton_bundler_lookups_total", result="hit"),
    ) == (6, 40)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://h:1", True),
        ("http://h:1/", True),
        ("https://h/x/metrics", True),
        ("https://h/kernels", False),
        ("tb+http://h:1", False),
        ("/metrics", False),
    ],
)
def test_a_url_is_an_endpoint_or_a_store(url, endpoint):
    """Of what begins with http the path decides."""
    assert top_command.is_endpoint(url) is endpoint


def test_what_takes_long_is_asked_seldom(monkeypatch):
    """A listing that took a second is made again after twenty."""
    clock, asked = [100.0], []
    monkeypatch.setattr(top_command.time, "monotonic", lambda: clock[0])

    def ask():
        asked.append(clock[0])
        clock[0] += 1

    cached = top_command._CachedAnswer(ask, 5.0)
    for _ in range(50):
        cached()
        clock[0] += 1
    assert asked == [100.0, 121.0, 142.0]


def test_a_terminal_gets_a_view_until_it_is_asked_to_end(monkeypatch):
    """It shows rates between two looks, hit ratio, leases and errors, and ends when it is
    told to.
    """
    numbers = dict.fromkeys(
        ("hits", "misses", "compiles", "compile_seconds", "seconds_saved", "bytes_fetched"), 0.0
    )
    sizes = {"bytes": 2e6, "units": 3.0, "records": 1.0, "tags": 1.0, "failures": 0.0}
    lease = top_command.HeldLease(f"v1/c/{KEY}", "host:7", 12.0)
    left = [
        [
            SourceStatus(
                "http://h:1",
                "metrics",
                numbers=numbers | {"hits": hits, "misses": 10.0},
                breakers=("far",),
            ),
            SourceStatus("file:///s", "store", numbers=sizes, leases=(lease,)),
            SourceStatus("http://h:2", "metrics", "refused"),
        ]
        for hits in (10.0, 30.0)
    ]
    clock = iter([100.0, 102.0])
    monkeypatch.setattr(top_command.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(
        top_command,
        "asked_to_end",
        lambda: contextlib.nullcontext(type("E", (), {"wait": lambda *_: not left})),
    )
    console = Console(force_terminal=True, width=160, record=True, file=io.StringIO())
    top_command._watch(Screen(out=console), lambda: left.pop(0), 0.5)
    shown = console.export_text()
    last = shown[shown.rindex("processes") :]
    for text in (
        "http://h:1",
        "30",
        "10.0",
        "75.0",
        "far",
        KEY,
        "host:7",
        "12.0 s",
        "2.0 MB",
        "http://h:2: refused",
    ):
        assert text in last


def _drain(descriptor):
    with contextlib.suppress(OSError):  # the other end is closed
        while os.read(descriptor, 65536):
            pass


@pytest.mark.slow
def test_ctrl_c_ends_the_view_well(endpoint, leased):
    """On a real terminal tables are drawn again and again, and Ctrl-C ends the command with status
    0.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 300, 0, 0))
    words = [sys.executable, "-m", "bundler", "top", "--interval", "0.5", endpoint, str(leased)]
    # The width is that of the terminal, whatever the variables of who runs the tests say.
    env = {
        name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}
    } | {"TERM": "xterm"}
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = b""
        try:
            while shown.count(KEY.encode()) < 3:  # in three views
                shown += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            drained = threading.Thread(
                target=_drain, args=(ours,)
            )  # else it would wait for who reads
            drained.start()
            assert process.wait(20) == 0
            drained.join()
        finally:
            process.kill()
            os.close(ours)
    assert b"Traceback" not in shown
