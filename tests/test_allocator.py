from __future__ import annotations

import subprocess
import sys

NUM_ROUNDS = 50
FAULTS_OF_A_ROUND = 8 * 2**18 // 4096
CHURN = f"""
import resource
from jaxinfer.allocator import keep_freed_memory

def churn():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({NUM_ROUNDS}):
        blocks = [bytearray(2**18) for _ in range(8)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = churn()
print(keep_freed_memory(), before, churn())
"""


def test_memory_that_was_freed_is_used_again_without_a_page_fault():
    done = subprocess.run([sys.executable, "-c", CHURN], capture_output=True, text=True, check=True)
    can, before, after = done.stdout.split()
    if can == "True":
        assert int(after) < 3 * FAULTS_OF_A_ROUND < int(before)
    else:
        assert sys.platform != "linux"
