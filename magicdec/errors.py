"""Every error a user can cause: what is wrong, the value, and the mend.

`assert` is for our own invariants; everything here is for input that came from outside.
"""


class MagicDecError(Exception):
    """Base of all errors that MagicDec raises on purpose; the text is meant to be shown to a user as it is."""


class ConfigError(MagicDecError):
    """A configuration file or an option holds a value that cannot be used."""


class CheckpointError(MagicDecError):
    """A model checkpoint is missing, damaged, or of a kind that is not supported."""


class PairError(MagicDecError):
    """Target and draft do not fit each other."""


class BuildError(MagicDecError):
    """Building an engine failed for an outside reason, such as a full disk."""


class EngineError(MagicDecError):
    """An engine directory cannot be loaded or run here."""


class RequestError(MagicDecError, ValueError):
    """A request cannot be served: prompt, sampling parameters or sizes are out of bounds."""


class QueueFullError(MagicDecError):
    """Too many requests are open; the same request may be served later."""


class NotReadyError(MagicDecError):
    """No requests are taken any more: the server is shutting down, or its engine has failed."""


class EngineFailedError(MagicDecError):
    """The engine broke down while the request was open, through no fault of the request."""
