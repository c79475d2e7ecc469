"""The program of an engine's process, or of a follower's; see `serving.engine_command`."""

from __future__ import annotations

import queue
import sys

import msgspec

from jaxinfer.allocator import keep_freed_memory
from jaxinfer.build import REFUSALS, build_engine, build_follower
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.follower import Follower, follower_main
from jaxinfer.engine.loop import engine_main
from jaxinfer.timer_slack import wake_in_time


def main(config_json: str, show_progress: str, fds: str) -> None:
    """Runs until the owner's channel, the first of `fds`, closes."""
    config = msgspec.json.decode(config_json, type=EngineConfig)
    wake_in_time()
    shown, lost = bool(int(show_progress)), queue.SimpleQueue[str]()
    built: list[Engine] = []

    def build() -> Engine:
        built.append(build_engine(config, show_progress=shown, on_lost=lost.put))
        keep_freed_memory()  # only now: of what loading took, all goes back
        return built[0]

    def build_other() -> Follower:
        follower = build_follower(config, show_progress=shown, on_lost=lost.put)
        keep_freed_memory()
        return follower

    if config.process_id:
        follower_main(fds, build_other, REFUSALS, lost)
    else:
        limit_s = config.step_timeout_s
        engine_main(fds, build, REFUSALS, step_timeout_s=limit_s, lost=lost, at_end=lambda: built[0].dismiss())


if __name__ == "__main__":
    main(*sys.argv[1:])
