"""Numbers in sentences."""


def counted(number: int, thing: str) -> str:
    """``1 slot``, ``2 slots``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
