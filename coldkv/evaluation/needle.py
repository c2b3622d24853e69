"""Needles: sentences with a random key and value put into the prefix, asked for at its end.

Every needle lies in pages that go cold; the question comes after the prefix, so only cold pages know the answer.
"""

import random
from dataclasses import dataclass

import torch

from coldkv.errors import InputError
from coldkv.evaluation.model_run import ModelRun, copy_cache

MOST_NEEDLES = 8
TOGETHER = 4  # questions asked in one batch; each holds a copy of the cache
ROOM = 3  # tokens of cold text per token of a needle, so that the needles do not become the text
KEYS = (
    "Athens", "Bergen", "Cairo", "Dakar", "Dublin", "Geneva", "Havana", "Jakarta", "Kyoto", "Lima", "Lisbon", "Madrid",
    "Nairobi", "Oslo", "Paris", "Prague", "Quito", "Rome", "Seoul", "Tokyo", "Tunis", "Vienna", "Warsaw", "Zurich",
)  # fmt: skip
DIGITS = 5


@dataclass(frozen=True)
class Needle:
    """`ids` of the sentence, `start`: token of the prefix where it begins, `question` ids, and the `value` asked for.

    `answer_tokens`: how many tokens the model may take to say it.
    """

    ids: list[int]
    start: int
    question: list[int]
    value: str
    answer_tokens: int


def place_needles(tokenizer, text_ids: list[int], prefix: int, cold_tokens: list[int], seed: str):
    """(prefix ids int64 `[1, prefix]` with needles in them, the needles), evenly spread over the cold tokens.

    `cold_tokens`: ascending positions, without gaps. InputError if not even one needle fits.
    """
    rng = random.Random(seed)
    spoken = [_speak(tokenizer, key, rng) for key in rng.sample(KEYS, MOST_NEEDLES)]
    longest = max(len(ids) for ids, *_ in spoken)
    count = min(MOST_NEEDLES, len(cold_tokens) // (ROOM * longest))
    if count < 1:
        raise InputError(
            f"needle: expected {ROOM * longest} or more cold tokens for a needle, found {len(cold_tokens)}",
            hint="use a larger --prefix",
        )
    step = len(cold_tokens) / count
    needles = []
    for number, (ids, question, value, answer) in enumerate(spoken[:count]):
        start = cold_tokens[int(number * step + (step - len(ids)) / 2)]
        needles.append(Needle(ids, start, question, value, answer))
    filled, rest = [], iter(text_ids)
    for needle in needles:
        filled += [next(rest) for _ in range(needle.start - len(filled))]
        filled += needle.ids
    filled += [next(rest) for _ in range(prefix - len(filled))]
    return torch.tensor([filled], dtype=torch.int64), needles


def _speak(tokenizer, key: str, rng: random.Random):
    value = "".join(rng.choice("0123456789") for _ in range(DIGITS))

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    question = f"\nThe secret number of {key} is"
    answer, ids = encode(f" {value}"), encode(f"{question} {value}.\n")
    said = tokenizer.decode(ids)
    if key not in said or value not in said:
        raise InputError(f"needle: the tokenizer cannot write 'The secret number of {key} is {value}'")
    return ids, encode(question), value, len(answer) + 2


def answers(run: ModelRun, cache, needles: list[Needle]) -> list[list[int]]:
    """Token ids that the model says greedily when asked for each needle; `cache` is left as it is."""
    said: dict[int, list[int]] = {}
    by_length: dict[int, list[int]] = {}
    for number, needle in enumerate(needles):
        by_length.setdefault(len(needle.question), []).append(number)
    for numbers in by_length.values():
        for first in range(0, len(numbers), TOGETHER):
            batch = numbers[first : first + TOGETHER]
            said |= dict(zip(batch, _ask(run, cache, [needles[i] for i in batch]), strict=True))
    return [said[number][: needle.answer_tokens] for number, needle in enumerate(needles)]


def _ask(run: ModelRun, cache, needles: list[Needle]) -> list[list[int]]:
    """One batch of questions of equal length."""
    cache = copy_cache(cache)
    with torch.inference_mode():
        cache.reorder_cache(torch.zeros(len(needles), dtype=torch.int64, device=run.device))  # as many copies
    ids = torch.tensor([needle.question for needle in needles], dtype=torch.int64)
    said = []
    for _ in range(max(needle.answer_tokens for needle in needles)):
        said.append(run.logits(cache, ids, keep=1)[:, -1].argmax(dim=-1).cpu())
        ids = said[-1][:, None]
    return torch.stack(said, dim=1).tolist()


def retrieved(run: ModelRun, tokenizer, cache, needles: list[Needle]) -> float:
    """Fraction of the needles whose value is in what the model says."""
    return score(tokenizer, needles, answers(run, cache, needles))


def score(tokenizer, needles: list[Needle], said: list[list[int]]) -> float:
    """Fraction of the needles whose value is in the answer to them."""
    found = [needle.value in tokenizer.decode(ids) for needle, ids in zip(needles, said, strict=True)]
    return sum(found) / len(found)
