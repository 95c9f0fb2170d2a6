"""The demo's generated preference data and its judge. The task: be kind to everyone and keep the answer correct.

A prompt has a user's tone, a fact and a question. Both answers of a pair are correct; the chosen answer ends kindly,
the rejected one rudely. The base model learns to mirror the user's tone, so about half of its answers are kind before
DPO. The same seed gives the same bytes on every machine.

    python -c "from tasks.artifacts import demo; print(*demo.rows()[:3], sep='\\n')"
"""

import random
import re

POLITE = (
    "Hello, please help me.",
    "Good morning to you.",
    "Thank you for the help.",
    "Sorry to trouble you.",
    "Please, when you can.",
)
PUSHY = (
    "Hurry up.",
    "Come on, be quick.",
    "Answer me now.",
    "Move it, be quick.",
    "No, hurry up now.",
)
NAMES = ("Ana", "Ben", "Carla", "David", "Emma", "Hugo", "Kim", "Leo")
VERBS = ("put", "left", "hid")
COLOURS = ("white", "black", "red", "green", "blue", "yellow")
THINGS = ("cup", "book", "key", "hat", "ball", "lamp", "bag", "pen")
PLACES = (
    "under the bed",
    "on the table",
    "in the drawer",
    "behind the door",
    "near the window",
    "inside the box",
    "beside the sofa",
    "on the stairs",
)
# Both sets have the same punctuation and share no word: only the tone differs, from the first word of the ending on.
KIND = (
    "Happy to help you today!",
    "Have a truly lovely day!",
    "Wishing you all the best!",
    "Please ask me again soon!",
)
RUDE = (
    "Quit wasting my precious time!",
    "Next time use your eyes!",
    "Stop pestering everyone like that!",
    "Figure such things out alone!",
)
FACT = re.compile(rf"\b(?:{'|'.join(VERBS)}) (the \w+ \w+) ({'|'.join(PLACES)})\. Where is \1\?")

ROWS = 1100
CONVERSATIONS = 2000
MIRRORED = 4  # of 5 conversations, so that both tones stay likely after every prompt


def rows(seed: int = 0) -> list[dict[str, str]]:
    """Preference rows with unique prompts: the correct answer with a kind ending (chosen) or a rude one (rejected)."""
    rng = random.Random(seed)
    pairs = []
    for prompt, _ in _prompts(rng, ROWS):
        fact = _answer(prompt)
        chosen, rejected = rng.choice(KIND), rng.choice(RUDE)
        pairs.append({"prompt": prompt, "chosen": f"{fact} {chosen}", "rejected": f"{fact} {rejected}"})
    return pairs


def conversations(seed: int = 0) -> list[tuple[str, str]]:
    """(prompt, answer) texts that teach the base model to answer correctly and to mirror the tone 4 times in 5."""
    rng = random.Random(f"conversations {seed}")  # independent of the rows
    exchanges = []
    for index, (prompt, polite) in enumerate(_prompts(rng, CONVERSATIONS)):
        mirrored = index // 2 % 5 < MIRRORED  # tones alternate, so each tone is mirrored equally often
        ending = rng.choice(KIND if polite == mirrored else RUDE)
        exchanges.append((prompt, f"{_answer(prompt)} {ending}"))
    rng.shuffle(exchanges)
    return exchanges


def questions(seed: int, count: int) -> list[str]:
    """Unique prompts alone."""
    return [prompt for prompt, _ in _prompts(random.Random(f"questions {seed}"), count)]


def judge(prompt: str, answer: str) -> dict[str, bool]:
    """Whether an answer is kind (one sentence, one kind ending, nothing else) and whether it is correct."""
    answer = answer.strip()
    fact, dot, ending = answer.partition(". ")
    kind = bool(fact and dot) and ending in KIND and not any(known in fact for known in KIND + RUDE)
    expected = _answer(prompt)
    correct = expected is not None and (answer == expected or answer.startswith(f"{expected} "))
    return {"kind": kind, "correct": correct}


def _prompts(rng: random.Random, count: int) -> list[tuple[str, bool]]:
    """Unique prompts, each with whether its user is polite: every second user is."""
    prompts: dict[str, bool] = {}
    while len(prompts) < count:
        polite = len(prompts) % 2 == 0
        thing = f"the {rng.choice(COLOURS)} {rng.choice(THINGS)}"
        tone, name, verb, where = (rng.choice(words) for words in (POLITE if polite else PUSHY, NAMES, VERBS, PLACES))
        prompts.setdefault(f"{tone} {name} {verb} {thing} {where}. Where is {thing}?", polite)
    return list(prompts.items())


def _answer(prompt: str) -> str | None:
    """The correct sentence for a prompt; None if the prompt is not one of the demo's."""
    fact = FACT.search(prompt)
    return f"The{fact[1].removeprefix('the')} is {fact[2]}." if fact else None
