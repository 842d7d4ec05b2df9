"""Where the seconds of a decoding go."""

from __future__ import annotations

import time
from types import TracebackType


class Recorder:
    """Adds up wall-clock seconds by name: `with recorder.time("draft"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str) -> _Timing:
        return _Timing(self, name)

    def snapshot(self) -> dict[str, float]:
        return dict(self.seconds)


class _Timing:
    __slots__ = ("_name", "_recorder", "_start")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        spent = time.perf_counter() - self._start
        seconds = self._recorder.seconds
        seconds[self._name] = seconds.get(self._name, 0.0) + spent
