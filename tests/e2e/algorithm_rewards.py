"""Rewards of `test_algorithms_plans.py`: random responses have many different ones."""


def copied(prompt: str, response: str) -> float:
    """The share of the prompt's letters that the response has."""
    letters = set(prompt)
    return len(letters & set(response)) / len(letters)


def copied_unless_short(prompt: str, response: str) -> float | None:
    """As `copied`; none of a response of fewer than three letters."""
    return copied(prompt, response) if len(response) >= 3 else None


def copied_letters(prompt: str, response: str, response_tokens: list[str]) -> list[float]:
    """By token whether its letter is in the prompt; the end token has none."""
    return [float(text != "" and text in prompt) for text in response_tokens]


def repeats(response: str) -> float:
    """A cost: above 0 for a response that has a letter twice."""
    return len(response) - len(set(response)) - 0.5
