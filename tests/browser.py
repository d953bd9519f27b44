"""A real TensorBoard and a real browser for tests: both start, answer and end within a `with` block."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException

from tests.ports import free_port

PROFILER = "data/plugin/pytorch_profiler"


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 90.0) -> Any:
    """Ask until the answer is true, and give it back. A page that is just being replaced has none."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(StaleElementReferenceException):
            if answer := condition():
                return answer
        time.sleep(0.1)
    return pytest.fail(f"waited {timeout_s:.0f} s in vain until {what}")


class TensorBoard:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get_json(self, path: str, **query: str) -> Any:
        """The JSON that `path`, relative to the server, answers."""
        with urllib.request.urlopen(f"{self.url}{path}?{urlencode(query)}", timeout=60) as answer:  # noqa: S310
            return json.load(answer)

    def profiler_runs(self, at_least: int = 1) -> list[str]:
        """The runs of the profiler tab, once it has read all it found and they are that many."""

        def loaded() -> list[str]:
            answer = self.get_json(f"{PROFILER}/runs")
            return [] if answer["loading"] or len(answer["runs"]) < at_least else answer["runs"]

        return wait_until(loaded, f"the profiler tab lists {at_least} run(s)")

    def workers(self, run: str, view: str = "Overview") -> list[str]:
        """The workers the profiler tab lists for a run's view."""
        return self.get_json(f"{PROFILER}/workers", run=run, view=view)

    def profile(self, view: str, run: str, worker: str, **query: str) -> Any:
        """What the profiler tab shows of one worker: `overview`, `operation/table`, `kernel/table`, ..."""
        return self.get_json(f"{PROFILER}/{view}", run=run, worker=worker, span="default", **query)

    def scalar_tags(self, expected: Collection[str]) -> dict[str, dict[str, Any]]:
        """Run -> tag -> description, once TensorBoard has read all that are expected of a run."""

        def read() -> dict[str, dict[str, Any]] | None:
            tags = self.get_json("data/plugin/scalars/tags")
            return tags if any(set(expected) <= set(of_run) for of_run in tags.values()) else None

        return wait_until(read, f"TensorBoard lists {', '.join(expected)}")

    def scalars(self, run: str, tag: str, at_least: int) -> list[tuple[int, float]]:
        """Steps and values, once TensorBoard has read so many."""

        def read() -> list[tuple[int, float]] | None:
            values = self.get_json("data/plugin/scalars/scalars", run=run, tag=tag)
            return [(step, value) for _, step, value in values] if len(values) >= at_least else None

        return wait_until(read, f"TensorBoard has {at_least} values of {tag}")


@contextmanager
def tensorboard_server(logdir: Path) -> Iterator[TensorBoard]:
    """Serve `logdir`. What the server and its plugins start or write goes away with it."""
    with tempfile.TemporaryDirectory(prefix="tensorboard-") as scratch:
        log = Path(scratch, "log")
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tensorboard.main", "--logdir", logdir),
                    *("--host", "127.0.0.1", "--port", "0", "--load_fast=false"),
                ],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": scratch},
                start_new_session=True,  # the plugin has child processes, to be ended with it
            )
        try:

            def address() -> re.Match[str] | None:
                if process.poll() is not None:
                    pytest.fail(f"TensorBoard ended early:\n{log.read_text()}")
                return re.search(r"http://127\.0\.0\.1:\d+/", log.read_text())

            yield TensorBoard(wait_until(address, "TensorBoard serves").group())
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def chromium(*arguments: str) -> Iterator[webdriver.Chrome]:
    """A headless Chromium with an empty profile, and with these arguments too; skips the test where there is none."""
    binary, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if binary is None or driver is None:
        reason = "Chromium or chromedriver is missing: apt-get install chromium chromium-driver"
        if os.environ.get("FORGE_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = binary
        for argument in (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--window-size=1400,900",
            f"--user-data-dir={profile}",
            *arguments,
        ):
            options.add_argument(argument)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver, port=free_port()))
        try:
            yield browser
        finally:
            browser.quit()
