"""A plugin of pytest that ends by saying what ran on this machine, and what did not and why: `-p not_run_here`."""

from collections import defaultdict


def pytest_terminal_summary(terminalreporter):
    """Print the counts, then each reason with the tests it kept from running."""
    ran = sum(len(terminalreporter.getreports(name)) for name in ("passed", "failed"))
    kept = defaultdict(list)
    for report in terminalreporter.getreports("skipped"):
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "?"
        kept[reason].append(report.nodeid.rpartition("::")[2])
    terminalreporter.section("what ran here")
    terminalreporter.write_line(f"ran here: {ran}; not run here: {sum(len(names) for names in kept.values())}")
    for reason, names in sorted(kept.items()):
        terminalreporter.write_line(f"not run here, because it {reason}: {len(names)}")
        for name in names:
            terminalreporter.write_line(f"    {name}")
