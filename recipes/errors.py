"""The one error that users see."""


class UserError(ValueError):
    """What a user can mend: one line of what was given, what is allowed, and how to mend it."""
