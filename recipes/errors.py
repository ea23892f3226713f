"""The one error that users see."""


class UserError(ValueError):
    """Something a user can mend: says what was given, what is allowed, and how to mend it, in one line."""
