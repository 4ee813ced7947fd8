"""Lengths of time, in seconds and in words."""

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
WEEK_S, YEAR_S = 7 * DAY_S, 365 * DAY_S


def duration(seconds: float) -> str:
    """In the two largest units: "4.2 s", "3 min 20 s", "2 h 5 min", "3 d 4 h"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    units = (("d", DAY_S), ("h", HOUR_S), ("min", MINUTE_S), ("s", 1))
    largest = next(i for i, (_, size) in enumerate(units) if whole >= size)
    parts: list[str] = []
    for name, size in units[largest : largest + 2]:
        count, whole = divmod(whole, size)
        parts.append(f"{count} {name}" if count or not parts else "")
    return " ".join(filter(None, parts))
