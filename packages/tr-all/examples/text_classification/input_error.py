"""Define the one error that these scripts report without a traceback."""


class InputError(ValueError):
    """What was given, arguments or data, cannot be used as it is; the message says what to change."""
