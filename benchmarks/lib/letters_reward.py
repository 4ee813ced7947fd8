"""A reward of the sorting task for jobs on random weights: it differs between responses from the start."""


def copied(prompts: list[str], responses: list[str]) -> list[float]:
    """By how many of the prompt's letters a response has."""
    return [
        sum(letter in response for letter in prompt) / max(1, len(prompt)) - 0.01 * len(response)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
