"""Numbers and lengths of time in words."""


def counted(number: int, thing: str) -> str:
    """``1 slot``, ``2,000 slots``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A length of time: ``12 s``, ``3 min 20 s``, ``1 h 5 min``."""
    whole = max(int(seconds), 0)
    if whole < 60:
        return f"{max(seconds, 0.0):.0f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
