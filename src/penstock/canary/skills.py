"""The graded skills except tool calls: each skill's questions and its only right answer. Owns the prompts, not the grading.

A generator makes an Item of a random source and a `span`, 0 (easy) to 1 (long): a seed gives the same prompts everywhere."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from penstock.canary.item import Item

Generator = Callable[[Random, float], Item]


def listed(text: str, separator: str | None = None) -> list[str]:
    """The parts of a text, by default its words: how lists of words are written here."""
    return text.split(separator)


WORDS = (Path(__file__).parent / "words.txt").read_text(encoding="ascii").split()
NAMES = listed("Anna Ben Carl Dora Emil Fay Greta Hugo Iris Jack Kira Leo Mona Nils Olga Paul Rosa Sam Tina Uma Victor "
               "Wanda Xenia Yusuf Zoe Alma Boris Clara Dina Erik Flora Gus Hanna Ivan Jonas Karin Lena Marek Nora Oskar")
SURNAMES = listed("Adler Berg Costa Dahl Engel Ferro Grant Hale Ito Jensen Kern Lopez Moss Novak Okoro Park Quinn Reyes "
                  "Stein Twist Vega Wolf")
CITIES = listed("Paris Rome Oslo Lima Cairo Delhi Tokyo Berlin Madrid Vienna Prague Lisbon Dublin Athens Warsaw Geneva "
                "Boston Denver Dallas Austin Sydney Toronto Havana Nairobi Lagos Seoul Hanoi Quito Zurich Naples")
PETS = listed("dog cat horse parrot rabbit goat hamster turtle pony duck")
COLOURS = listed("red blue green yellow black white brown pink grey purple orange")
FOODS = listed("soup bread cheese rice fish cake apples pasta beans honey salad eggs")
JOBS = listed("baker teacher doctor farmer sailor painter miller nurse writer pilot")


def _ask(text: str, answer: str, skill: str, key: str, grade: str = "exact", thinking: bool = False) -> Item:
    return Item(skill, key, [{"role": "user", "content": text}], answer, grade, thinking=thinking)


def _several(rng: Random, span: float, easy: int, long: int, least: int = 2) -> int:
    """A count: up to `easy` at span 0, up to `long` at span 1."""
    top = round(easy + span * (long - easy))
    return rng.randint(max(least, top // 2), top)


def _things(rng: Random, count: int) -> list[str]:
    """Words, digits or both."""
    kind = rng.randrange(3)
    if kind == 0:
        return [rng.choice(WORDS) for _ in range(count)]
    if kind == 1:
        return [str(rng.randrange(10 ** rng.randint(1, 4))) for _ in range(count)]
    return [rng.choice(WORDS) if rng.random() < 0.6 else str(rng.randrange(1000)) for _ in range(count)]


def repeat(rng: Random, span: float) -> Item:
    things = " ".join(_things(rng, _several(rng, span, 8, 60)))
    how = rng.choice(("Repeat after me: ", "Say this again: ", "Repeat: ", "Copy this: "))
    return _ask(how + things, things, "repeat", things)


def reverse(rng: Random, span: float) -> Item:
    things = _things(rng, _several(rng, span, 5, 16))
    how = rng.choice(("Reverse: ", "Say this backwards, word by word: ", "Reverse the order: "))
    return _ask(how + " ".join(things), " ".join(reversed(things)), "reverse", " ".join(things))


def _entries(rng: Random, count: int) -> dict[str, str]:
    keys = rng.sample(WORDS, min(count, len(WORDS)))
    worded = rng.random() < 0.3
    return {key: rng.choice(WORDS) if worded else str(rng.randint(1000, 9999)) for key in keys}


def _needle(rng: Random, count: int) -> tuple[str, str, str]:
    """(text, key, value): sentences about nothing, with a few codes among them."""
    codes = {place: str(rng.randint(1000, 9999)) for place in rng.sample(WORDS, 4)}
    lines = [f"The {rng.choice(WORDS)} {rng.choice(('saw', 'took', 'left', 'held', 'found'))} the {rng.choice(WORDS)} "
             f"{rng.choice(WORDS)}." for _ in range(count)]
    for place, code in codes.items():
        lines.insert(rng.randint(0, len(lines)), f"The code of the {place} is {code}.")
    key = rng.choice(list(codes))
    return " ".join(lines), key, codes[key]


def _retrieve(rng: Random, tokens: int, skill: str) -> Item:
    """A value by its key, from a context of about so many tokens."""
    if rng.random() < 0.35:
        text, key, value = _needle(rng, max(1, tokens // 8 - 4))
        question = f"What is the code of the {key}?"
    else:
        entries = _entries(rng, max(2, tokens // 8))
        text = "\n".join(f"{key}: {value}" for key, value in entries.items())
        key = rng.choice(list(entries))
        value = entries[key]
        question = rng.choice((f"What is the value of {key}?", f"Which value has {key}?", f"Look up {key}."))
    return _ask(f"{text}\n\n{question}" if rng.random() < 0.7 else f"{question}\n\n{text}", value, skill, f"{key}={value}")


def retrieve(rng: Random, span: float) -> Item:
    """Retrieval from contexts of up to 1,000 tokens (0.85: a margin, since words may take two)."""
    return _retrieve(rng, rng.randint(16, max(40, round(850 * span))), "retrieve")


def retrieve_long(rng: Random, span: float) -> Item:
    """Retrieval from contexts of up to 4,000 tokens."""
    return _retrieve(rng, rng.randint(1000, 1000 + round(2600 * span)), "retrieve-4k")


def _number(rng: Random, digits: int) -> int:
    width = rng.randint(1, digits)
    return rng.randint(0 if width == 1 else 10 ** (width - 1), 10**width - 1)


def add(rng: Random, span: float) -> Item:
    """The sum of two numbers of up to four digits."""
    most = 2 if span < 0.2 else 4
    a, b = _number(rng, most), _number(rng, most)
    text = rng.choice((f"What is {a} + {b}?", f"{a} + {b} =", f"Add {a} and {b}.", f"How much is {a} plus {b}?"))
    return _ask(text, str(a + b), "add", f"{a}+{b}")


def compare(rng: Random, span: float) -> Item:
    """The larger or smaller of two or more numbers."""
    count = 2 if span < 0.5 else rng.randint(2, 5)
    numbers: list[int] = []
    while len(numbers) < count:
        near = numbers[0] + rng.randint(-20, 20) if numbers and rng.random() < 0.4 else _number(rng, 4)
        if near >= 0 and near not in numbers:
            numbers.append(near)
    larger = rng.random() < 0.5
    choice = ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"
    word = rng.choice(("larger", "greater")) if larger else "smaller"
    return _ask(f"Which is {word}, {choice}?", str(max(numbers) if larger else min(numbers)), "compare",
                " ".join(map(str, sorted(numbers))))


def count(rng: Random, span: float) -> Item:
    """Asks for the number of occurrences of a word in a list."""
    times = rng.randint(1, 5 + round(7 * span))
    wanted, *others = rng.sample(WORDS, 4)
    items = [wanted] * times + [rng.choice(others) for _ in range(rng.randint(0, 6 + round(10 * span)))]
    rng.shuffle(items)
    text = " ".join(items)
    return _ask(rng.choice((f'How often does "{wanted}" occur here? {text}', f'Count "{wanted}": {text}')), str(times), "count",
                text)


def sort(rng: Random, span: float) -> Item:
    amount = _several(rng, span, 5, 9, 3)
    if rng.random() < 0.3:
        items = rng.sample("abcdefghijklmnopqrstuvwxyz", amount)
        ordered = sorted(items)
    else:
        numbers = rng.sample(range(100 if span < 0.5 else 1000), amount)
        items, ordered = [str(n) for n in numbers], [str(n) for n in sorted(numbers)]
    down = rng.random() < 0.3
    if down:
        ordered.reverse()
    falling = ("Sort from high to low: ", "Sort in falling order: ")
    how = rng.choice(falling if down else ("Sort: ", "Put in order: ", "Sort from low to high: "))
    return _ask(how + " ".join(items), " ".join(ordered), "sort", " ".join(items))


EDGE = 32
"""Distance of the digit that `edge` asks for from the token it decides, counted like a window: inclusive."""
_EDGE_DIGITS = EDGE - 5
"""Between the digits and the answer are five tokens: the end of the turn, a line's end, and "assistant" in two marks."""


def edge(rng: Random, span: float) -> Item:  # noqa: ARG001 (every skill takes a span; this one has a fixed length)
    """So many digits again that each, when it is to be said, is the last token that a window of EDGE still shows.

    For canary-edge, whose layers all have that window. Digits repeat too soon to be found by what surrounds them."""
    digits = "".join(str(rng.randrange(10)) for _ in range(_EDGE_DIGITS))
    return _ask(f"Copy: {digits}", digits, "edge", digits)


def stop(rng: Random, span: float) -> Item:
    """Stops after as many as were asked for."""
    if rng.random() < 0.5:
        first = rng.randint(0, 80)
        last = first + _several(rng, span, 8, 25, 1)
        return _ask(f"Count from {first} to {last}.", " ".join(map(str, range(first, last + 1))), "stop", f"{first}-{last}")
    word, times = rng.choice(WORDS), rng.randint(1, 5 + round(7 * span))
    return _ask(f'Say "{word}" {times} time{"s" * (times > 1)}.', " ".join([word] * times), "stop", f"{word} {times}")


# -- following a system prompt

_LANGUAGES = {
    "English": listed("one two three four five six seven eight nine ten red blue green white black yellow dog cat horse "
                      "bird house tree water bread sun moon night day book friend"),
    "French": listed("un deux trois quatre cinq six sept huit neuf dix rouge bleu vert blanc noir jaune chien chat cheval "
                     "oiseau maison arbre eau pain soleil lune nuit jour livre ami"),
    "Spanish": listed("uno dos tres cuatro cinco seis siete ocho nueve diez rojo azul verde blanco negro amarillo perro "
                      "gato caballo pajaro casa arbol agua pan sol luna noche dia libro amigo"),
    "German": listed("eins zwei drei vier fuenf sechs sieben acht neun zehn rot blau gruen weiss schwarz gelb Hund Katze "
                     "Pferd Vogel Haus Baum Wasser Brot Sonne Mond Nacht Tag Buch Freund")}

_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[str], str]]] = {
    "plain": (("", "Be brief."), lambda text: text),
    "capitals": (("Write in capital letters.", "Use capital letters only."), str.upper),
    "brackets": (("Put every answer in square brackets.",), lambda text: f"[{text}]"),
    "json": (('Answer as JSON with the key "answer".',), lambda text: json.dumps({"answer": text})),
    "sir": (("Call the user Sir at the end of every answer.", 'End every answer with "Sir".'), lambda text: f"{text}, Sir"),
    "stars": (("Put a star before and after every answer.",), lambda text: f"* {text} *"),
    "twice": (("Say everything twice.",), lambda text: f"{text} {text}")}


def system(rng: Random, span: float) -> Item:
    """Says words in the language and the form that the system prompt wants, now or after several turns."""
    language, form = rng.choice(list(_LANGUAGES)), rng.choice(list(_FORMATS))
    wording, shape = _FORMATS[form]
    rules = [f"Answer in {language}.", rng.choice(wording)]
    rng.shuffle(rules)
    messages: list[dict[str, Any]] = [{"role": "system", "content": " ".join(filter(None, rules))}]
    turns = 1 + rng.randint(0, round(6 * span))
    answer, asked = "", []
    for _ in range(turns):
        places = [rng.randrange(30) for _ in range(rng.choice((1, 1, 2, 3)))]
        asked = [_LANGUAGES["English"][place] for place in places]
        answer = shape(" ".join(_LANGUAGES[language][place] for place in places))
        messages += [{"role": "user", "content": f"Say: {' '.join(asked)}"}, {"role": "assistant", "content": answer}]
    return Item("system", f"{language} {form} {' '.join(asked)}", messages[:-1], answer)


# -- several turns

_FACTS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "name": ("My name is {}.", "What is my name?", "Your name is {}.", tuple(NAMES)),
    "city": ("I live in {}.", "Where do I live?", "You live in {}.", tuple(CITIES)),
    "pet": ("I have a {}.", "Which animal do I have?", "You have a {}.", tuple(PETS)),
    "colour": ("My favourite colour is {}.", "What is my favourite colour?", "Your favourite colour is {}.", tuple(COLOURS)),
    "food": ("I like {} most of all.", "What do I like to eat?", "You like {}.", tuple(FOODS)),
    "job": ("I am a {}.", "What is my job?", "You are a {}.", tuple(JOBS)),
    "friend": ("My best friend is {}.", "Who is my best friend?", "Your best friend is {}.", tuple(NAMES)),
    "code": ("My code is {}.", "What is my code?", "Your code is {}.", ()),
    "word": ("The secret word is {}.", "What is the secret word?", "The secret word is {}.", tuple(WORDS))}
_NOTED = ("Good to know.", "I will remember that.", "Noted.")


def recall(rng: Random, span: float) -> Item:
    """A fact of an earlier turn, with other facts and small exercises between."""
    kinds = rng.sample(list(_FACTS), rng.randint(1, 3 + round(4 * span)))
    messages: list[Mapping[str, Any]] = []
    told: dict[str, str] = {}
    for kind in kinds:
        statement, _, _, values = _FACTS[kind]
        told[kind] = rng.choice(values) if values else str(rng.randint(1000, 9999))
        messages += [{"role": "user", "content": statement.format(told[kind])},
                     {"role": "assistant", "content": rng.choice(_NOTED)}]
        while rng.random() < 0.35 * span:
            between = rng.choice((repeat, compare, sort))(rng, 0.0)
            messages += [*between.messages, {"role": "assistant", "content": between.answer}]
    asked = rng.choice(kinds)
    _, question, form, _ = _FACTS[asked]
    messages.append({"role": "user", "content": question})
    key = " ".join(f"{kind}={value}" for kind, value in told.items())
    return Item("recall", f"{asked}: {key}", messages, form.format(told[asked]), "holds", told[asked])


# -- extracting fields

def extract(rng: Random, span: float) -> Item:
    """The fields that are asked for, in that order, as one JSON object."""
    name = f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"
    facts: dict[str, tuple[str, Any]] = {}
    pool: dict[str, Callable[[], Any]] = {
        "age": lambda: rng.randint(18, 90), "city": lambda: rng.choice(CITIES), "job": lambda: rng.choice(JOBS),
        "pet": lambda: rng.choice(PETS), "phone": lambda: f"555-{rng.randint(1000, 9999)}", "room": lambda: rng.randint(1, 400),
        "colour": lambda: rng.choice(COLOURS), "email": lambda: f"{rng.choice(WORDS)}@{rng.choice(WORDS)}.org"}
    sentences = {"age": "{n} is {} years old.", "city": "{n} lives in {}.", "job": "{n} works as a {}.", "pet": "{n} has a {}.",
                 "phone": "Call {n} at {}.", "room": "{n} stays in room {}.", "colour": "{n} wears {}.",
                 "email": "Write to {n} at {}."}
    for field in rng.sample(list(pool), rng.randint(2, 4 + round(4 * span))):
        value = pool[field]()
        facts[field] = (sentences[field].format(value, n=name.split()[0]), value)
    text = " ".join([f"This is {name}.", *(sentence for sentence, _ in facts.values())])
    fields = rng.sample(list(facts), rng.randint(1, len(facts)))
    if rng.random() < 0.7:
        fields.insert(0, "name")
    answer = {field: name if field == "name" else facts[field][1] for field in fields}
    ask = f"{rng.choice(('Extract', 'Give me'))} {', '.join(fields)} as JSON."
    whole = f"{ask}\n\n{text}" if rng.random() < 0.5 else f"{text}\n\n{ask}"
    return _ask(whole, json.dumps(answer), "json", json.dumps(answer), "json")


# -- thinking

def think(rng: Random, span: float) -> Item:
    """A longer sum or a count, worked out in a thought before the answer; asked for in words, or by the template's variable."""
    if rng.random() < 0.75:
        width = 3 + round(4 * span)
        a, b = (rng.randint(10 ** (width - 2), 10**width - 1) for _ in range(2))
        question, thought, answer, key = f"What is {a} + {b}?", _column_sum(a, b), str(a + b), f"{a}+{b}"
    else:
        times = rng.randint(1, 6 + round(10 * span))
        wanted, *others = rng.sample(WORDS, 4)
        items = [wanted] * times + [rng.choice(others) for _ in range(rng.randint(0, 10))]
        rng.shuffle(items)
        found, steps = 0, []
        for word in items:
            found += word == wanted
            steps.append(f"{word} {found}")
        key = " ".join(items)
        question, thought, answer = f'How often does "{wanted}" occur here? {key}', "\n".join(steps), str(times)
    thinking = rng.random() < 0.5
    if not thinking:
        question = rng.choice((f"Think first. {question}", f"{question} Think before you answer."))
    return _ask(question, f"<think>\n{thought}\n</think>\n\n{answer}", "think", key, thinking=thinking)


def _column_sum(a: int, b: int) -> str:
    """The sum digit by digit from the right, with carries, then the digits found, in order."""
    left, right = str(a)[::-1], str(b)[::-1]
    carry, digits, steps = 0, "", []
    for place in range(max(len(left), len(right))):
        x, y = left[place : place + 1] or "0", right[place : place + 1] or "0"
        total = int(x) + int(y) + carry
        steps.append(f"{x} + {y} + {carry} = {total}")
        carry, digits = total // 10, str(total % 10) + digits
    return "\n".join([*steps, f"{carry or ''}{digits}"])
