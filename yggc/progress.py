"""Progress lines: what runs, for how long, and what is left.

On a terminal one line is redrawn each second; elsewhere a line is printed when a stage starts, every 15 seconds and at
its end. What is left is the time the same stage took before on this machine, or an estimate from its size.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import TextIO

from yggrt.wire import write_atomically

TICK_S = 1.0
PLAIN_TICK_S = 15.0


class Progress:
    """Prints the stages of one command. history: file that keeps how long each stage took; None keeps nothing."""

    def __init__(self, history: Path | None = None, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._history = history
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._is_terminal = self._stream.isatty()
        self._started = monotonic()
        self._durations = _read_history(history)

    def say(self, text: str) -> None:
        """One line, now."""
        if not self._quiet:
            print(text, file=self._stream, flush=True)

    @contextmanager
    def stage(self, name: str, expected_s: float, key: str | None = None) -> Iterator[None]:
        """Run a stage. key: under which its duration is remembered; expected_s: first estimate, in seconds."""
        key = key or name
        expected = self._durations.get(key, expected_s)
        started = monotonic()
        done = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(name, started, expected, done), daemon=True)
        ticker.start()
        try:
            yield
        except BaseException:
            self._stop(ticker, done)
            raise
        self._stop(ticker, done)
        elapsed = monotonic() - started
        self.say(f"  {name:<34} done in {elapsed:6.1f} s   ({monotonic() - self._started:.0f} s in all)")
        self._durations[key] = elapsed
        if self._history is not None:
            with suppress(OSError):
                write_atomically(self._history, json.dumps(self._durations, indent=1).encode())

    def reused(self, name: str) -> None:
        """A stage whose result was kept."""
        self.say(f"  {name:<34} kept from before")

    def _tick(self, name: str, started: float, expected: float, done: threading.Event) -> None:
        if self._quiet:
            return
        interval = TICK_S if self._is_terminal else PLAIN_TICK_S
        while not done.wait(interval):
            elapsed = monotonic() - started
            left = expected - elapsed
            remaining = f"about {left:.0f} s left" if left >= 1 else "longer than expected"
            line = f"  {name:<34} {elapsed:4.0f} s elapsed, {remaining}"
            if self._is_terminal:
                print(f"\r\033[K{line}", end="", file=self._stream, flush=True)
            else:
                print(line, file=self._stream, flush=True)

    def _stop(self, ticker: threading.Thread, done: threading.Event) -> None:
        done.set()
        ticker.join()
        if self._is_terminal and not self._quiet:
            print("\r\033[K", end="", file=self._stream, flush=True)


def _read_history(path: Path | None) -> dict[str, float]:
    if path is None:
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {str(key): float(value) for key, value in entries if isinstance(value, int | float)}
