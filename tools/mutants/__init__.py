"""Plant small faults in what numbers depend on, one at a time, and count those that a package's own tests catch.

mutmut and cosmic-ray are not used: both want one package at the root of a repository, mutate the tree or a copy of all
of it, and start a new pytest for each mutant, which imports torch for some four seconds; neither takes a test's way
into processes that it starts into account. Here one process imports torch once and forks for each mutant.
"""
