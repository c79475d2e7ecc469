"""The step loop: plan, launch, then read the step before. Owns the scheduler and the runner, and joins nothing else."""

from __future__ import annotations

from jaxinfer.runner.runner import InFlight, ModelRunner
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.types import EngineInfo, EngineStats, Request, TokenEvent


class Engine:
    """A model that runs requests. Not thread-safe: one thread calls it."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, info: EngineInfo):
        self.info = info
        self._runner = runner
        self._scheduler = scheduler
        self._in_flight: InFlight | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._in_flight is not None or self._scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queues a request. Raises QueueFull, or InvalidRequest for one that can never run."""
        self._scheduler.submit(request)

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request and frees its pages at once. None if it is not running or waiting."""
        return self._scheduler.abort(request_id)

    def step(self) -> list[TokenEvent]:
        """Launches the next step, then waits for the one before it and returns what that one did."""
        plan = self._scheduler.next_plan()
        launched = self._runner.launch(plan) if plan is not None else None
        finished, self._in_flight = self._in_flight, launched
        return [] if finished is None else self._scheduler.apply(self._runner.collect(finished))

    def stats(self) -> EngineStats:
        """A snapshot. When nothing runs, it also checks that every page came back; the cache may keep any of them."""
        s = self._scheduler
        if not self.has_work and s.pool.num_used:
            raise RuntimeError(f"nothing runs, but {s.pool.num_used} pages are held")
        return EngineStats(
            num_running=s.num_running,
            num_waiting=s.num_waiting,
            num_pages_used=s.pool.num_used,
            num_pages_cached=s.pool.num_cached,
            num_pages=self.info.num_pages,
            prompt_tokens=s.prompt_tokens,
            cached_prompt_tokens=s.cached_prompt_tokens,
            num_evictions=s.num_evictions,
            generation_tokens=s.generation_tokens,
            num_preemptions=s.num_preemptions,
            num_steps=s.num_steps,
            compilations_after_ready=self._runner.compilations_after_ready,
        )

    def close(self) -> None:
        """Gives up the device's memory."""
        self._in_flight = None
        self._runner.close()
