"""Notice ranks that wait for each other forever, say who waits where and for whom, and end the job.

`watch.py` starts at the group that a strategy joins; docs/hangs.md describes what it reports and when it ends a job.
"""

HANG_EXIT_CODE = 97
"""The exit code of every process of a job that was ended because its ranks hung."""
