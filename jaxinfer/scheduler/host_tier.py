"""HostTier: which pages of the prefix cache lie in which frame of host memory. The runner has the bytes."""

from __future__ import annotations

from collections import OrderedDict

from jaxinfer.scheduler.pages import PageError
from jaxinfer.scheduler.tree import Frame, Node


class HostTier:
    """Frames 0..num_frames - 1, of `frame_pages` pages each.

    A frame is filled once, by one copy from the device or from disk, and is free again when nobody wants any page of
    it. The frame used least recently is given up first.
    """

    def __init__(self, num_frames: int, frame_pages: int):
        self.num_frames = num_frames
        self.frame_pages = frame_pages
        self.num_pages_used = 0
        self._free = list(range(num_frames - 1, -1, -1))
        self._used: OrderedDict[int, Frame] = OrderedDict()  # used last at the end

    @property
    def num_pages(self) -> int:
        return self.num_frames * self.frame_pages

    @property
    def has_free(self) -> bool:
        """Whether a frame can be filled now."""
        return bool(self._free)

    def oldest(self) -> Frame | None:
        """The frame to be given up next; None if all are locked, or there are none."""
        return next((frame for frame in self._used.values() if not frame.num_locks), None)

    def take(self) -> Frame:
        """A free frame, with no page in it yet."""
        if not self.has_free:
            raise PageError(f"a frame was asked for, but all {self.num_frames} are filled")
        frame = Frame(self._free.pop())
        self._used[frame.number] = frame
        return frame

    def put(self, frame: Frame, node: Node) -> None:
        """The next page of the frame is a copy of this node's."""
        if len(frame.nodes) >= self.frame_pages:
            raise PageError(f"frame {frame.number} is full")
        node.frame, node.index = frame, len(frame.nodes)
        frame.nodes.append(node)
        self.num_pages_used += 1

    def touch(self, frame: Frame) -> None:
        """It was used just now."""
        self._used.move_to_end(frame.number)

    def drop(self, node: Node) -> None:
        """Nobody wants this node's page here any more."""
        frame = node.frame
        assert frame is not None
        node.frame, frame.nodes[node.index] = None, None
        self.num_pages_used -= 1
        self.free_if_empty(frame)

    def free_if_empty(self, frame: Frame) -> None:
        """Once nobody wants a page of it and nobody counts on it."""
        if not frame.num_locks and not any(frame.nodes) and frame.number in self._used:
            del self._used[frame.number]
            self._free.append(frame.number)

    def check_integrity(self, nodes: list[Node]) -> None:
        """Raises PageError unless the frames hold just these nodes."""
        numbers = sorted([*self._free, *self._used])
        if numbers != list(range(self.num_frames)):
            raise PageError(f"frames {numbers} are free or used; each must be there once")
        found = {id(node) for frame in self._used.values() for node in frame.nodes if node is not None}
        if found != {id(node) for node in nodes} or len(nodes) != self.num_pages_used:
            raise PageError(f"{len(found)} nodes are in frames, {len(nodes)} say so, {self.num_pages_used} are counted")
        for frame in self._used.values():
            if not any(frame.nodes) and not frame.num_locks:
                raise PageError(f"frame {frame.number} is used by nobody")
            for i, node in enumerate(frame.nodes):
                if node is not None and (node.frame is not frame or node.index != i):
                    raise PageError(f"place {i} of frame {frame.number} is of a node that is elsewhere")
