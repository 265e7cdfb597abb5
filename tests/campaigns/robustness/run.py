"""End, fail, kill, restart, resize and cut jobs of several processes and machines, and count what went wrong."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from clean_exits import control, forked, programs
from cuts import cuts
from elastic import resized
from failures import failures_by
from kills import kills
from restarts import restarts
from runner import Campaign, Group, main

GROUPS = {
    "exits": Group("jobs of two and three ranks end with exit code 0", forked, 100),
    "programs": Group("the same, whose ranks are programs of their own", programs, 20),
    "control": Group("jobs that leave as torch does, and how those end", control, 16),
    "failures": Group("one rank fails: all end, soon, with its words first", failures_by("nobody"), 14),
    "launched": Group("the same under trainer launch", failures_by("launch"), 28),
    "torchrun": Group("the same under torchrun", failures_by("torchrun"), 28, is_default=False),
    "kills": Group("one of two ranks killed, and the job started again", kills, 22),
    "restarts": Group("a rank killed under a launcher that restarts once", restarts, 80),
    "elastic": Group("a machine lost, and another one found", resized, 4),
    "cuts": Group("the network cut between two machines", cuts, 4),
}

if __name__ == "__main__":
    # One after the other: it is judged how soon processes end.
    sys.exit(main(Campaign("robustness", __doc__ or "", GROUPS, ("jobs", "judged wrong"), jobs=1)))
