"""Errors that a user can mend. Scripts print them as one message, without a traceback."""


class UserError(ValueError):
    """A setting or an input that cannot work; the message names the thing and the remedy."""
