"""Which threads have the processor first, where more of them want it than there are cores.

A forward uses every core and waits for the slowest: each millisecond that a thread beside it
takes from one core is lost on all of them. So threads that nobody waits for step back. Linux
alone knows priorities of threads; elsewhere it is the whole process that would step back, and
nothing is done.
"""

from __future__ import annotations

import os
import sys
import threading

#: Of work that is to be done soon, though nobody waits for it. Added to the nice value, it leaves
#: a thread a tenth of the time of one that wants the same core, and all that no other wants.
SOON = 10


def give_way(niceness: int = SOON) -> None:
    """Lower the priority of the calling thread and of those that it starts.

    Not to the idle class of the kernel: a thread of that class may be kept waiting for long while
    it holds the interpreter's lock, and the engine with it.

    Args:
        niceness: to add to the thread's own, as of ``nice``.
    """
    if sys.platform == "linux":
        own = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, own)
        os.setpriority(os.PRIO_PROCESS, own, min(19, before + niceness))
