import sys

print("no data here", file=sys.stderr)
sys.exit(3)
