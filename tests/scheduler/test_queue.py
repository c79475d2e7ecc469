"""Who is looked at first, and how often others may go before those who came earlier."""

import random

import pytest

from jaxinfer.scheduler.queue import MAX_OVERTAKEN, WaitingQueue, is_overtaken, order_key
from jaxinfer.scheduler.sequence import Sequence
from jaxinfer.types import Request
from tests.scheduler.fake_device import make_limits


class Queue(WaitingQueue):
    """Whose sequences are named by the number of their arrival. Checked after every change."""

    def __init__(self) -> None:
        super().__init__()
        self.seqs: list[Sequence] = []

    def come(self, priority: int = 0) -> Sequence:
        request = Request(request_id=str(len(self.seqs)), prompt_ids=(1,), max_tokens=1, priority=priority)
        self.seqs.append(Sequence(request, make_limits(), len(self.seqs)))
        self.add(self.seqs[-1])
        return self.seqs[-1]

    def go(self, number: int) -> None:
        self.admit(self.seqs[number])
        assert [*self] == sorted(self, key=order_key)

    @property
    def numbers(self) -> list[int]:
        return [seq.arrival for seq in self]


def test_equal_sequences_go_first_come_first_served():
    queue = Queue()
    for _ in range(4):
        queue.come()
    assert queue.numbers == [0, 1, 2, 3]
    assert [seq.arrival for seq in queue.first(2)] == [0, 1] and len(queue.first(9)) == len(queue) == 4


def test_lower_priorities_go_first_and_equal_ones_in_their_order():
    queue = Queue()
    for priority in (5, 0, -3, 0, 5, -3):
        queue.come(priority)
    assert queue.numbers == [2, 5, 1, 3, 0, 4]


def test_a_sequence_that_comes_back_has_the_place_of_its_arrival():
    queue = Queue()
    for priority in (0, 1, 0, 0):
        queue.come(priority)
    queue.go(2)
    queue.add(queue.seqs[2])
    assert queue.numbers == [0, 2, 3, 1]


def test_only_those_that_came_before_are_overtaken():
    queue = Queue()
    for priority in (0, 0, 0, -1):
        queue.come(priority)
    queue.go(1)
    assert [seq.num_overtaken for seq in queue.seqs] == [1, 0, 0, 0]
    queue.go(3)
    assert [seq.num_overtaken for seq in queue.seqs] == [2, 0, 1, 0]
    queue.remove(queue.seqs[0])
    queue.go(2)
    assert [seq.num_overtaken for seq in queue.seqs] == [2, 0, 1, 0]


def test_the_first_of_all_overtakes_an_earlier_one_of_less_urgency():
    queue = Queue()
    late = queue.come(7)
    queue.come(0)
    queue.go(1)
    assert late.num_overtaken == 1


def test_one_that_was_overtaken_often_enough_goes_before_every_priority():
    queue = Queue()
    patient, other = queue.come(2**31 - 1), queue.come(1)
    for i in range(MAX_OVERTAKEN):
        assert not is_overtaken(patient)
        queue.come(-5)
        assert queue.numbers[0] == 2 + i
        queue.go(2 + i)
    assert is_overtaken(patient) and is_overtaken(other)
    queue.come(-(2**31))
    assert queue.numbers == [0, 1, 2 + MAX_OVERTAKEN]


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_overtaken_more_often_than_the_bound_where_the_overtaken_are_not_passed(seed: int):
    rng, queue = random.Random(seed), Queue()
    for _ in range(2000):
        if rng.random() < 0.5 or not len(queue):
            queue.come(rng.choice([-1, 0, 0, 3]))
            continue
        first = queue.first(8)
        last = next((i for i, seq in enumerate(first) if is_overtaken(seq)), len(first) - 1)
        queue.go(first[rng.randint(0, last)].arrival)
        assert all(seq.num_overtaken <= MAX_OVERTAKEN for seq in queue)
