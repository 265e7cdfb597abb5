"""Training arguments and command lines as typed, checked dataclasses, without torch."""
