"""A runner in each of several processes: that of process 0 tells the others what it does, and they do the same.

All programs have collectives, so all processes run the same ones in the same order. What they sample is on every
device, and process 0 reads it from one of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax

from jaxinfer.engine.group import Group, exit_before_jax
from jaxinfer.engine.messages import Launch, Reset, Sample, ToDo
from jaxinfer.runner.runner import InFlight, ModelRunner, StuckStep, Unsampled
from jaxinfer.scheduler.plan import StepPlan, StepResult, TokenMask, Transferred

CHECK_S = 0.1
"""How often whoever waits for a step looks whether all processes live."""


class LeadingRunner:
    """The runner of process 0. A step that fails in it ends all processes: the others may wait in it for ever."""

    def __init__(self, runner: ModelRunner, group: Group):
        self._runner = runner
        self._group = group

    @property
    def compilations_after_ready(self) -> int:
        """See ModelRunner; of this process."""
        return self._runner.compilations_after_ready

    @property
    def page_file_bytes(self) -> int:
        return self._runner.page_file_bytes

    @property
    def num_disk_writes(self) -> int:
        return self._runner.num_disk_writes

    @property
    def num_disk_reads(self) -> int:
        return self._runner.num_disk_reads

    def launch(self, plan: StepPlan) -> InFlight | Unsampled | None:
        """See ModelRunner. Raises ProcessLost."""
        with self._group.working():
            self._group.tell(Launch.of(plan))
            try:
                return self._runner.launch(plan)
            except Exception as error:
                raise self._group.parted(error) from error

    def sample(self, launched: Unsampled, masks: Sequence[TokenMask]) -> InFlight:
        """See ModelRunner. Raises ProcessLost."""
        with self._group.working():
            self._group.tell(Sample(masks))
            try:
                return self._runner.sample(launched, masks)
            except Exception as error:
                raise self._group.parted(error) from error

    def collect(self, in_flight: InFlight, timeout_s: float) -> StepResult:
        """See ModelRunner. Raises ProcessLost, also for a step that takes too long."""
        limit_s = time.monotonic() + timeout_s
        with self._group.working():
            while True:
                self._group.check()
                left_s = limit_s - time.monotonic()
                try:
                    return self._runner.collect(in_flight, min(CHECK_S, timeout_s))
                except StuckStep:
                    if left_s <= 0:
                        reason = f"step {in_flight.plan.step} was not done within {timeout_s:g} s (step_timeout_s)"
                        raise self._group.parted(StuckStep(reason)) from None
                except Exception as error:
                    raise self._group.parted(error) from error

    def transferred(self) -> list[Transferred]:
        """None: nothing leaves the devices."""
        return []

    def wait_for_transfer(self, timeout_s: float) -> None:
        """Returns after that time."""
        time.sleep(timeout_s)

    def reset(self) -> None:
        """See ModelRunner."""
        with self._group.working():
            self._group.tell(Reset())
            self._runner.reset()

    def close(self) -> None:
        """Gives up the devices' memory, and ends the other processes. Nothing can be launched any more."""
        if self._group.failure is None:  # what waits for a process that is gone cannot be given up
            self._runner.close()
        self.dismiss()

    def dismiss(self) -> None:
        """Ends the other processes, and waits for that."""
        leave(self._group)


def leave(group: Group, reason: str | None = None) -> None:
    """Ends the group, and waits until JAX knows in all of its processes that they end."""
    if not group.leave(reason):
        return
    if reason is None:
        jax.distributed.shutdown()
    else:
        exit_before_jax()


def follow(runner: ModelRunner, group: Group) -> None:
    """Does what process 0 does, until that ends. Raises ProcessLost, also for a step that fails."""
    unsampled: Unsampled | None = None
    for message in group.to_do():
        with group.working():
            try:
                unsampled = _do(message, runner, unsampled)
            except Exception as error:
                raise group.parted(error) from error
    runner.close()
    jax.distributed.shutdown()


def _do(message: ToDo, runner: ModelRunner, unsampled: Unsampled | None) -> Unsampled | None:
    """What is to be sampled next."""
    match message:
        case Launch():
            launched = runner.launch(message.plan())
            return launched if isinstance(launched, Unsampled) else None
        case Sample(masks=masks):
            assert unsampled is not None
            runner.sample(unsampled, masks)
        case Reset():
            runner.reset()
    return None
