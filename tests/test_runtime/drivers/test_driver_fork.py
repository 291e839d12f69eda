# SPDX-License-Identifier: Apache-2.0
"""A child process made by fork gets a clear error from a driver that its parent opened, and never
reaches the GPU.
"""

import os

import pytest

from bundler.errors import DriverUnavailable


def in_child(function):
    """Run a function in a forked child; returns what it returned, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = function()
        except Exception as error:  # noqa: BLE001  # the parent compares it
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return answer


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_a_forked_child_is_told(ready, fake, plan, backend):
    """Launchers, loads and questions of the parent's driver fail in the child, and go on in the
    parent.
    """
    one = plan("i32", backend=backend)
    driver, module, launch = ready(one)
    launch(1, 1, 1, 0, 4)

    def child():
        said = []
        for ask in (
            lambda: launch(1, 1, 1, 0, 4),
            lambda: driver.load(one, b"image", 0),
            lambda: driver.launcher(module)(1, 1, 1, 0, 4),
            driver.device,
            driver.device_count,
            lambda: driver.stream(0),
            lambda: driver.properties(0),
            lambda: driver.pointer_device(0xD00000),
        ):
            try:
                ask()
            except DriverUnavailable as error:
                said.append("spawn" in error.message)
        return f"{said} {fake.number('fake_launches').value}"

    assert in_child(child) == f"{[True] * 8} 1"
    launch(1, 1, 1, 0, 4)
    assert fake.number("fake_launches").value == 2


def test_a_child_may_open_its_own(open_driver, fake, plan):
    """A driver that is opened only in the child works there."""

    def child():
        driver = open_driver()
        fake.expect(plan("i32"))
        driver.launcher(driver.load(plan("i32"), b"image", 0))(1, 1, 1, 0, 4)
        return str(fake.number("fake_launches").value)

    assert in_child(child) == "1"
