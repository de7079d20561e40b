"""The graded skills with tools: choosing and calling one, answering from its result, and leaving tools alone.

Owns these prompts and their tool schemas. `skills` has the rest and says what a generator is."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from penstock.canary.item import Item
from penstock.canary.skills import CITIES, NAMES, WORDS, listed

Value = Callable[[Random], Any]

CURRENCIES = ("euro", "dollar", "pound", "yen", "franc", "peso")
LANGUAGES = ("French", "German", "Spanish", "Italian", "Greek", "Polish")


def _words(rng: Random) -> str:
    return " ".join(rng.sample(WORDS, rng.randint(1, 4)))


@dataclass(frozen=True)
class Field:
    """A parameter: its JSON type, what it means, and values of it."""

    type: str
    about: str
    value: Value


CITY = Field("string", "the city", lambda rng: rng.choice(CITIES))
PERSON = Field("string", "the person's name", lambda rng: rng.choice(NAMES))
MINUTES = Field("integer", "minutes", lambda rng: rng.randint(1, 90))
TIME = Field("string", "time of day, as HH:MM", lambda rng: f"{rng.randint(0, 23):02d}:{rng.randrange(0, 60, 5):02d}")
NUMBER = Field("integer", "a number", lambda rng: rng.randint(0, 999))
WORD = Field("string", "a word", lambda rng: rng.choice(WORDS))
TEXT = Field("string", "the text", _words)


@dataclass(frozen=True)
class Tool:
    """A function that can be called: ways to ask for it, and what it answers.

    `asks` and `says` name the parameters in braces; `says` also {result}, a value of `result`."""

    name: str
    about: str
    fields: Mapping[str, Field]
    asks: tuple[str, ...]
    result: str
    value: Value
    says: str

    def schema(self) -> dict[str, Any]:
        """The tool as OpenAI's API takes it."""
        properties = {name: {"type": field.type, "description": field.about} for name, field in self.fields.items()}
        return {"type": "function", "function": {"name": self.name, "description": self.about, "parameters": {
            "type": "object", "properties": properties, "required": list(self.fields)}}}


def _number(low: int, high: int) -> Value:
    return lambda rng: rng.randint(low, high)


TOOLS = (
    Tool("get_weather", "Current temperature in a city", {"city": CITY},
         ("What is the weather in {city}?", "How warm is it in {city}?", "Is it cold in {city} today?"),
         "temperature", _number(-10, 38), "It is {result} degrees in {city}."),
    Tool("get_time", "Current local time in a city", {"city": CITY},
         ("What time is it in {city}?", "Tell me the time in {city}."), "time", TIME.value, "It is {result} in {city}."),
    Tool("set_timer", "Start a timer", {"minutes": MINUTES},
         ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes."), "timer", _number(1, 99),
         "Timer {result} is running."),
    Tool("set_alarm", "Set an alarm", {"time": TIME}, ("Wake me at {time}.", "Set an alarm for {time}."), "alarm",
         _number(1, 99), "Alarm {result} is set for {time}."),
    Tool("send_message", "Send a message to a person", {"person": PERSON, "text": TEXT},
         ('Send "{text}" to {person}.', 'Write to {person}: "{text}"', 'Tell {person} "{text}".'), "message", _number(100, 999),
         "Message {result} went to {person}."),
    Tool("call_person", "Call a person by phone", {"person": PERSON}, ("Call {person}.", "Phone {person}, please."), "call",
         _number(100, 999), "Call {result} to {person} has begun."),
    Tool("convert_money", "Convert money between currencies", {
        "amount": Field("integer", "how much", lambda rng: rng.randint(1, 999)),
        "source": Field("string", "currency to convert from", lambda rng: rng.choice(CURRENCIES[:3])),
        "target": Field("string", "currency to convert to", lambda rng: rng.choice(CURRENCIES[3:]))},
        ("How much is {amount} {source} in {target}?", "Convert {amount} {source} to {target}."), "amount", _number(1, 9999),
        "{amount} {source} is {result} {target}."),
    Tool("stock_price", "Price of a share", {"company": Field("string", "name of the company", WORD.value)},
         ("What does a share of {company} cost?", "What is the stock price of {company}?"), "price", _number(1, 999),
         "A share of {company} costs {result}."),
    Tool("translate", "Translate a text", {
        "text": TEXT, "language": Field("string", "language to translate to", lambda rng: rng.choice(LANGUAGES))},
        ('Translate "{text}" to {language}.', 'What is "{text}" in {language}?'), "translation", _words,
        "In {language} it is: {result}"),
    Tool("multiply", "Multiply two numbers", {"a": NUMBER, "b": NUMBER}, ("What is {a} times {b}?", "Multiply {a} by {b}."),
         "product", _number(0, 99999), "The product is {result}."),
    Tool("book_table", "Reserve a table in a restaurant", {
        "people": Field("integer", "number of guests", lambda rng: rng.randint(1, 12)), "time": TIME},
        ("Book a table for {people} at {time}.", "Reserve a table at {time} for {people} people."), "table", _number(1, 60),
        "Table {result} is booked for {time}."),
    Tool("find_train", "Next train between two cities", {
        "origin": Field("string", "city of departure", lambda rng: rng.choice(CITIES[::2])),
        "destination": Field("string", "city of arrival", lambda rng: rng.choice(CITIES[1::2]))},
        ("When does a train go from {origin} to {destination}?", "Find a train to {destination} from {origin}."), "departure",
        TIME.value, "The train to {destination} leaves at {result}."),
    Tool("play_song", "Play a song", {"title": Field("string", "title of the song", _words)},
         ('Play "{title}".', 'I want to hear the song "{title}".'), "track", _number(1, 999), "Playing track {result}."),
    Tool("add_note", "Write a note", {"text": TEXT}, ('Note: "{text}"', 'Write down "{text}".'), "note", _number(1, 999),
         "Note {result} is written."),
    Tool("light", "Switch the light of a room", {
        "room": Field("string", "the room", lambda rng: rng.choice(("kitchen", "hall", "bedroom", "bathroom", "garden"))),
        "on": Field("boolean", "true for on, false for off", lambda rng: rng.random() < 0.5)},
        ("Switch the light in the {room} {on}.", "Turn {on} the light in the {room}."), "lamps", _number(1, 9),
        "{result} lamps in the {room} are {on}."),
    Tool("define_word", "Meaning of a word", {"word": WORD}, ("What does the word {word} mean?", "Define {word}."), "meaning",
         _words, "It means: {result}"))

_SYLLABLES = listed("ba ko mi ra tu lo ve si na pe du fi go ha ki mo")


def _invented(rng: Random) -> Tool:
    """An unseen tool: only its schema gives its name and parameters."""
    name = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 3)))
    verb, *names = rng.sample(WORDS, rng.randint(2, 3))
    fields = {field: rng.choice((NUMBER, WORD)) for field in names}
    parts = " and ".join(f"{field} {{{field}}}" for field in names)
    return Tool(name, f"Does {verb}", fields, (f"Do {verb} with {parts}.", f"I need {verb} with {parts}."), "result",
                _number(0, 9999), "The result is {result}.")


def _spoken(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: ("off", "on")[value] if isinstance(value, bool) else value for name, value in values.items()}


def _choice(rng: Random, span: float) -> tuple[Tool, list[Tool]]:
    """A tool, and all that are offered: up to 3 at span 0, up to 8 at span 1."""
    count = rng.randint(1, 3 + round(5 * span))
    offered = rng.sample(TOOLS, count)
    place = rng.randrange(count)
    if rng.random() < 0.35:
        offered[place] = _invented(rng)
    return offered[place], offered


def call(rng: Random, span: float) -> Item:
    """One call of the right tool with the right arguments."""
    tool, offered = _choice(rng, span)
    values = {name: field.value(rng) for name, field in tool.fields.items()}
    question = rng.choice(tool.asks).format(**_spoken(values))
    call = f"<tool_call>\n{json.dumps({'name': tool.name, 'arguments': values})}\n</tool_call>"
    return Item("tool-call", f"{tool.name} {question}", [{"role": "user", "content": question}], call, "call",
                tools=[each.schema() for each in offered])


def answer(rng: Random, span: float) -> Item:
    """The answer to the question, from what the tool gave back."""
    tool, offered = _choice(rng, span)
    values = {name: field.value(rng) for name, field in tool.fields.items()}
    result = tool.value(rng)
    question = rng.choice(tool.asks).format(**_spoken(values))
    # Given back as text, which is what OpenAI's API carries.
    content = json.dumps({tool.result: result})
    messages: list[Mapping[str, Any]] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": tool.name, "arguments": json.dumps(values)}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": content}]
    said = tool.says.format(result=result, **{k: v for k, v in _spoken(values).items() if k != "result"})
    return Item("tool-answer", f"{question} {content}", messages, said, "holds", str(result),
                tools=[each.schema() for each in offered])
