"""Notice ranks that wait for each other forever, say who waits where and for whom, and end the job.

`watch.py` starts at the group that a strategy joins; docs/hangs.md describes what it reports and when it ends a job.
"""
