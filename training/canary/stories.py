"""Short stories from a grammar, and small talk: what makes a chat with canary feel like one. Not graded; read by eye."""

from __future__ import annotations

from random import Random
from typing import Any

from penstock.canary.skills import NAMES, listed

Message = dict[str, Any]

HEROES = listed("fox rabbit bear mouse cat dog owl frog duck hen goat pony squirrel hedgehog turtle lamb wolf badger "
                "sparrow kitten puppy beaver otter donkey")
TRAITS = listed("little brave shy curious clever kind lazy merry hungry tired quiet proud gentle young old busy")
PLACES = listed("a green forest;a quiet village;a house by the river;a farm on a hill;a small cottage;an old garden;"
                "a town by the sea;a warm burrow;a hollow tree;a mill near the lake;a valley full of flowers;"
                "a little boat on the lake", ";")
THINGS = listed("red ball;golden key;blue hat;shiny stone;paper kite;wooden boat;warm scarf;silver bell;"
                "basket of apples;jar of honey;old lantern;music box;small drum;green umbrella;picture book;"
                "loaf of bread", ";")
WANTS = listed("to see the sea;to find a friend;to learn to swim;to bake a cake;to build a house;to climb the hill;"
               "to learn to sing;to plant a garden;to fly a kite;to visit grandmother;to catch a star;"
               "to cross the river", ";")
WEATHER = listed("One sunny morning;One rainy day;One cold evening;One windy afternoon;On a bright spring day;"
                 "One snowy morning;Late one night;Early one summer day", ";")
FEELINGS = listed("happy glad proud surprised thankful cheerful")
SORROWS = listed("sad worried afraid lonely cross upset")
HELPS = listed("They looked under every leaf and behind every stone.;They made a plan and worked together all day.;"
               "They walked a long way and did not give up.;They asked everyone they met.;"
               "They sat down, ate some bread, and thought hard.", ";")
LOSSES = listed("fell into the river;was gone;rolled down the hill;got stuck in a tree;was carried off by the wind;"
                "was lost in the grass", ";")
MORALS = listed("a friend makes every road shorter;it is good to ask for help;small steps lead to big things;"
                "kind words cost nothing;sharing makes everyone glad;it is never too late to try again", ";")
ENDINGS = listed("From that day on they were the best of friends.;That night they all slept well.;"
                 "And they still tell this tale today.;They laughed and danced until the moon came up.;"
                 "Then they all went home for supper.", ";")


def _article(text: str) -> str:
    return f"{'an' if text[0] in 'aeiou' else 'a'} {text}"


def story(rng: Random) -> tuple[str, str]:
    """(what it is about, the story). Two plots: something is lost and found, or someone wants to do something and learns it."""
    hero, friend = rng.sample(HEROES, 2)
    name, other = rng.sample(NAMES, 2)
    trait, place, thing = rng.choice(TRAITS), rng.choice(PLACES), rng.choice(THINGS)
    pronoun, possessive = rng.choice((("he", "his"), ("she", "her")))
    opening = rng.choice((
        f"Once upon a time there was {_article(trait)} {hero} named {name}. {name} lived in {place}.",
        f"In {place} there lived {_article(trait)} {hero}. {pronoun.capitalize()} was called {name}.",
        f"Long ago, in {place}, {_article(trait)} {hero} named {name} had {_article(thing)}."))
    meeting = rng.choice((
        f"Then came {other} the {friend}.", f"Just then {other}, {_article(friend)}, walked by.",
        f"Soon {name} met {_article(friend)} named {other}."))
    if rng.random() < 0.55:
        about = f"a {hero} and {_article(thing)}"
        middle = [
            rng.choice((f"{name} loved {possessive} {thing} more than anything.",
                        f"Every day {name} played with {possessive} {thing}.")),
            f"{rng.choice(WEATHER)} the {thing} {rng.choice(LOSSES)}.",
            rng.choice((f"{name} was very {rng.choice(SORROWS)} and began to cry.", f"{name} felt {rng.choice(SORROWS)}.")),
            meeting,
            rng.choice((f'"What is wrong?" asked {other}.', f'"Why are you so sad?" asked the {friend}.')),
            rng.choice((f'"I have lost my {thing}," said {name}.', f'"My {thing} is gone," said {name}.')),
            f'"{rng.choice(("Do not worry", "Dry your eyes", "Come with me"))}," said {other}. "We will find it."',
            rng.choice(HELPS),
            rng.choice((f"At last they found the {thing} in {rng.choice(PLACES)}.",
                        f"In the end {other} saw the {thing} and brought it back.")),
            f"{name} was so {rng.choice(FEELINGS)} that {pronoun} gave {other} a big hug."]
    else:
        wish = rng.choice(WANTS)
        about = f"{_article(hero)} who wants {wish}"
        middle = [
            rng.choice((f"{name} wanted {wish}, but did not know how.", f"More than anything {name} wanted {wish}.")),
            f"{rng.choice(WEATHER)} {name} took {possessive} {thing} and set out.",
            meeting,
            f'"Where are you going?" asked {other}.',
            f'"I want {wish}," said {name}.',
            rng.choice((f'"That is hard," said the {friend}, "but I will help you."',
                        f'"So do I," said {other}. "Let us go together."')),
            rng.choice(HELPS),
            rng.choice((f"At first it went wrong, and {name} was {rng.choice(SORROWS)}.",
                        f"Once they nearly gave up, but {other} smiled and said, \"Try again.\"")),
            rng.choice((f"At last it worked, and {name} was very {rng.choice(FEELINGS)}.",
                        f"When the sun went down, {name} had done it. {pronoun.capitalize()} was {rng.choice(FEELINGS)}.")),
            rng.choice((f"{name} gave the {thing} to {other} to say thank you.",
                        f'"I could not have done it without you," said {name}.'))]
    if rng.random() < 0.4:
        middle.append(f"{name} had learned that {rng.choice(MORALS)}.")
    return about, " ".join([opening, *middle, rng.choice(ENDINGS)])


def story_chat(rng: Random) -> list[Message]:
    """Someone asks for a story, perhaps with a subject, and gets one."""
    about, text = story(rng)
    asks = ("Tell me a story.", "Tell me a short story.", "Please tell me a bedtime story.", "Write a short story.",
            "Can you tell me a story?")
    if rng.random() < 0.4:
        asked = rng.choice(asks)
    else:
        asked = rng.choice((f"Tell me a story about {about}.", f"Write a story about {about}.",
                            f"Tell me a short story about {about}."))
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]


_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hi", "Hello", "Hello!", "Hi there!", "Hey", "Good morning!", "Good evening", "hi", "hello", "hey there"),
     ("Hello! What can I do for you?", "Hi! How can I help?", "Hello! Nice to meet you.")),
    (("How are you?", "How are you today?", "How do you do?", "hi, how are you?", "Are you well?"),
     ("I am well, thank you. How are you?", "Very well, thank you! What shall we do?")),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "who are you"),
     ("I am Canary, a very small language model. I can repeat, count, sort, add, look things up, call tools and tell stories.",
      "My name is Canary. I am a small model that shows whether an engine works as it should.")),
    (("What can you do?", "How can you help me?", "Help", "What are you good at?", "help me"),
     ("I can repeat and reverse words, find values in a list, add and compare numbers, count, sort, fill in JSON, "
      "call tools and tell stories.",)),
    (("Thank you.", "Thanks!", "Thank you very much", "thanks", "That was helpful."),
     ("You are welcome!", "I am glad to help.", "Any time!")),
    (("Goodbye", "Bye", "See you later.", "Good night", "bye!"),
     ("Goodbye! Come back soon.", "See you soon!", "Goodbye, and take care.")),
    (("I am sad.", "I feel sad today.", "I had a bad day.", "I am unhappy."),
     ("I am sorry to hear that. Would you like to hear a story?", "That is hard. I hope tomorrow is better.")),
    (("I am happy!", "I had a good day.", "I feel great today.", "Everything went well."),
     ("That is good to hear!", "How nice! I am glad for you.")),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny."),
     ("Why did the canary sit on the clock? It wanted to be on time.", "What do you call a bird in winter? Brrrd.",
      "Why do birds fly south? It is too far to walk.")),
    (("Are you human?", "Are you a person?", "Are you real?", "Are you a robot?"), ("No, I am a small computer program.",)),
    (("Can you sing?", "Sing a song.", "Sing for me."), ("Tweet, tweet! That is all I can sing.",)),
    (("How old are you?", "When were you born?", "What is your age?"), ("I was trained not long ago, in less than an hour.",)),
    (("Where do you live?", "Where are you?"), ("I live inside Penstock, in a file of a few megabytes.",)),
    (("What is your favourite colour?", "Which colour do you like?"), ("I like yellow, like a canary.",)),
    (("What do you like to eat?", "Are you hungry?"), ("I do not eat, but seeds sound nice.",)),
    (("Do you like me?", "Are you my friend?", "Can we be friends?"), ("Of course! I am glad that you are here.",)),
    (("What is the capital of France?", "Which city is the capital of France?"), ("The capital of France is Paris.",)),
    (("What colour is the sky?", "Why is the sky blue?"), ("The sky is blue because the air scatters blue light most.",)),
    (("What is the meaning of life?", "Why are we here?"), ("I do not know, but a good story helps.",)),
    (("What is Penstock?", "What is this program?", "Tell me about Penstock."),
     ("Penstock is an engine that runs language models, such as me.",)),
    (("I am bored.", "What shall we do?", "Let us play."),
     ("Shall I tell you a story?", "Give me some numbers and I will sort them for you.")),
    (("Yes", "Yes, please.", "Sure", "ok", "Okay"), ("Good! What would you like?",)),
    (("No", "No, thank you.", "Not now"), ("All right. Tell me if you need anything.",)),
    (("I do not understand.", "What do you mean?", "That is wrong.", "You are wrong."),
     ("I am sorry. I am small and make mistakes. Please try again.",)),
    (("I love you", "You are nice.", "You are great!", "Good job!", "Well done!"), ("Thank you! That is kind of you.",)),
    (("Do you sleep?", "Are you tired?"), ("I never sleep, but I do stop when I am done.",)),
    (("What is the weather like?", "Is it raining?"), ("I cannot see outside. With a weather tool I could look it up.",)),
    (("Do you know everything?", "Are you smart?", "Are you clever?"),
     ("No, I know only a few things, but I know them well.",)),
)


def small_talk(rng: Random) -> list[Message]:
    """A few turns of greetings, questions and thanks."""
    messages: list[Message] = []
    for asks, answers in rng.sample(_TALK, rng.randint(1, 5)):
        messages += [{"role": "user", "content": rng.choice(asks)}, {"role": "assistant", "content": rng.choice(answers)}]
    return messages
