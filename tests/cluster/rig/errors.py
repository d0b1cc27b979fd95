"""What a rig raises."""


class RigError(RuntimeError):
    """A rig cannot be made or changed as asked; the message says why."""
