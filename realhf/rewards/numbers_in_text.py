"""The number that a text gives as its answer."""

import re

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d[\d,]*(?:\.\d+)?)?")
_BOXED = r"\boxed{"
_FRACTION = re.compile(r"([-+]?)\s*\\[dt]?frac\s*{([^{}]+)}\s*{([^{}]+)}")
_MARK = "####"
# A number of more digits is none that anybody wrote as an answer, and takes long to compute.
_LONGEST = 400


def answer_number(text: str) -> float | None:
    """The number of `answer_text`; None without one. Thousands have commas or none; a fraction is `a/b` or
    `\\frac{a}{b}`; units, `$` and `%` are passed over.
    """
    found = answer_text(text)
    return None if found is None else _value(found)


def answer_text(text: str) -> str | None:
    """The number in the last `\\boxed{}`, else behind the last `####`, else the last number of the text, as it is
    written there, without the commas of thousands; None without one."""
    boxed = _last_boxed(text)
    is_marked = boxed is None and _MARK in text
    part = text.rpartition(_MARK)[2] if is_marked else text if boxed is None else boxed
    found = _NUMBER.findall(_FRACTION.sub(r"\1\2/\3", part))
    return found[0 if is_marked else -1].replace(",", "").rstrip(".") if found else None


def is_number(text: str) -> bool:
    """Whether a text is a number and nothing else."""
    return _NUMBER.fullmatch(text.strip()) is not None


def _last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}`."""
    begin = text.rfind(_BOXED)
    if begin < 0:
        return None
    depth = 0
    for place in range(begin + len(_BOXED) - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin + len(_BOXED) : place]
    return None


def _value(number: str) -> float | None:
    if len(number) > _LONGEST:
        return None
    top, _, bottom = number.partition("/")
    try:
        value: float | None = float(top) / (float(bottom) if bottom else 1.0)
    except (ValueError, ZeroDivisionError, OverflowError):
        value = None
    return value
