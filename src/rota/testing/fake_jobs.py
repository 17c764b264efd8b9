"""Jobs of the fake engine: begun by a POST that is answered at once, done some time later.

In the shape of OpenAI's videos, under that path and a plain one. Nothing works on them: how a
job is follows from when it was begun.
"""

from __future__ import annotations

import itertools
import threading
import time

PATHS = ("/v1/videos", "/v1/jobs")
CONTENT = b"the work of a fake engine"


class FakeJobs:
    """Every job of one engine.

    Args:
        job_s: how long each takes.
        fails: how they end.
    """

    def __init__(self, job_s: float, *, fails: bool = False) -> None:
        self._job_s = job_s
        self._fails = fails
        self._begun: dict[str, float] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def begin(self, path: str) -> dict[str, object]:
        """A new job, as the POST is answered."""
        with self._lock:
            job = f"{path.rpartition('/')[2].removesuffix('s')}_{next(self._numbers)}"
            self._begun[job] = time.monotonic()
        return self._show(job)

    def show(self, job: str) -> dict[str, object] | None:
        """How a job is; None = there is none."""
        return self._show(job) if job in self._begun else None

    def drop(self, job: str) -> dict[str, object] | None:
        """Forget a job, as a DELETE does."""
        with self._lock:
            known = self._begun.pop(job, None)
        return None if known is None else {"id": job, "deleted": True}

    def is_done(self, job: str) -> bool:
        begun = self._begun.get(job)
        return begun is not None and time.monotonic() - begun >= self._job_s

    def under_way(self) -> int:
        return sum(not self.is_done(job) for job in list(self._begun))

    def _show(self, job: str) -> dict[str, object]:
        done = "failed" if self._fails else "completed"
        status = done if self.is_done(job) else "in_progress"
        error = {"message": "told to fail"} if status == "failed" else None
        return {"id": job, "object": "job", "status": status, "error": error}
