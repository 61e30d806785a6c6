"""Generated questions for a small chat model; its answers are the training data of its draft.

Four kinds: ``chat`` (questions about many topics, some with a second turn), ``code`` (functions to write), ``edit``
(changes to existing code), ``summary`` (of an earlier answer of the model). Every tenth topic and task is held out of
training.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["chat", "code", "edit", "summary"]


@dataclass(frozen=True)
class Question:
    """The questions of the first turn and, if there is one, of the second."""

    kind: Kind
    text: str
    then: str | None = None


_TOPICS = {
    "explain": """photosynthesis; gravity; the water cycle; black holes; plate tectonics; the immune system; inflation;
        supply and demand; the greenhouse effect; evolution; electricity; magnetism; the solar system; DNA; vaccines;
        the ozone layer; tides; earthquakes; volcanoes; rainbows; lightning; antibiotics; the periodic table; atoms;
        nuclear energy; solar power; wind turbines; batteries; the stock market; insurance; compound interest; taxes;
        democracy; the separation of powers; human rights; the United Nations; machine learning; neural networks;
        the internet; encryption; search engines; databases; operating systems; compilers; recursion; binary numbers;
        cloud computing; computer viruses; 3D printing; GPS; the human heart; digestion; sleep; memory; stress; fever;
        bees and pollination; coral reefs; rain forests; deserts; glaciers; hurricanes; the food chain; fossils;
        dinosaurs; the Roman Empire; the Renaissance; the Industrial Revolution; the printing press; the Silk Road;
        the French Revolution; the Cold War; the space race; ancient Egypt; the Great Wall of China; jazz; the guitar;
        opera; impressionism; photography; poetry; mythology; chess; football; the Olympic Games; yoga; meditation;
        bread; cheese; chocolate; coffee; tea; spices; fermentation; recycling; composting; public transport; bicycles;
        airplanes; bridges; skyscrapers; lighthouses; clocks; calendars; maps; money; mathematics; probability;
        fractions; prime numbers; the Pythagorean theorem; statistics; logic; philosophy; ethics; psychology""",
    "do": """learning a new language; cooking pasta; growing tomatoes; training a puppy; running a first marathon;
        saving money; writing a resume; preparing for a job interview; giving a presentation; studying for an exam;
        planning a trip to Italy; packing for a hike; moving to a new city; making friends; sleeping better;
        eating more vegetables; reducing stress; working from home; managing time; starting a small business;
        writing a short story; painting a room; fixing a flat tire; cleaning a kitchen; organizing a birthday party;
        learning to swim; playing the piano; taking better photographs; baking bread; making coffee; caring for a cat;
        keeping houseplants alive; building a campfire; reading more books; learning to program; choosing a laptop;
        writing a thank-you note; negotiating a salary; resolving a conflict at work; leading a team meeting;
        teaching children to read; starting a vegetable garden; saving energy at home; preparing for winter;
        keeping a journal; improving handwriting; memorizing a speech; making a budget; buying a used car;
        hosting a dinner for friends""",
    "write": """a rainy day in the city; an old lighthouse; a dog who finds its way home; the first day of school;
        a robot that learns to paint; a lost letter; autumn leaves; a trip to the moon; a small bakery; the sea at
        night; two friends who meet again; a garden in spring; a train journey; a dragon who is afraid of fire; a
        quiet library; a market in the morning; a storm; grandmother's kitchen; a clock that runs backwards; a
        mountain village; the last day of summer; a cat and the moon; a musician in the subway; a message in a bottle;
        snow""",
    "pair": """cats and dogs; tea and coffee; books and films; cities and villages; cars and bicycles; Python and Java;
        cotton and wool; viruses and bacteria; weather and climate; a debit card and a credit card; planets and stars;
        frogs and toads; butter and margarine; a simile and a metaphor; speed and velocity; mass and weight;
        renting and buying a home; a leader and a manager; knowledge and wisdom; summer and winter holidays;
        RAM and storage; arithmetic and algebra; whales and fish; running and swimming; pencils and pens""",
}
_FORMS = {
    "explain": """What is {}?; Explain {} in simple terms.; Can you explain {} to a ten-year-old?; How does {} work?;
        Why is {} important?; Give me three facts about {}.; Write a short paragraph about {}.; What should I know about
        {}?; What are common misunderstandings about {}?; Tell me about the history of {}.; List five key ideas about
        {}.; How does {} affect our daily life?; What is a good example of {}?; Describe {} in two sentences.""",
    "do": """Give me some tips for {}.; What are the first steps for {}?; I need help with {}. What should I do?;
        Write a step-by-step guide for {}.; What mistakes should I avoid when {}?; How long does {} usually take?;
        What do I need for {}?; Make a checklist for {}.; Write a short email to a friend with advice on {}.;
        What are the benefits of {}?""",
    "write": """Write a short story about {}.; Write a poem about {}.; Write the first paragraph of a novel about {}.;
        Describe {} using all five senses.; Write a dialogue about {}.; Suggest three titles for a story about {}.;
        Write a haiku about {}.; Write a diary entry about {}.""",
    "pair": """What is the difference between {}?; Compare {}.; What do {} have in common?; Which is better: {}?;
        Make a short list of pros and cons of {}.; When should I choose between {}?""",
}
_SECOND = """Can you explain that more simply?; Give me an example.; Why is that?; Can you make it shorter?;
    What else should I know?; Can you put that into a list?; Thank you! Can you say it in one sentence?;
    What is the most important point?"""
_FUNCTIONS = """reverses a string; checks whether a word is a palindrome; returns the factorial of a number;
    returns the n-th Fibonacci number; counts the vowels in a text; finds the largest number in a list;
    removes duplicates from a list; sorts a list of numbers; merges two sorted lists; computes the average of a list;
    counts how often each word occurs; checks whether a number is prime; lists the prime numbers below n;
    computes the greatest common divisor; converts Celsius to Fahrenheit; converts a number to binary;
    reads a file and counts its lines; flattens a nested list; finds the second largest number in a list;
    rotates a list by k places; checks whether two words are anagrams; sums the digits of a number;
    validates an email address; capitalizes each word; computes the power of a number; transposes a matrix;
    multiplies two matrices; searches a sorted list by bisection; removes all spaces from a text;
    finds the longest word in a sentence; computes the area of a circle; prints a multiplication table;
    splits a list into chunks; returns the common elements of two lists; checks whether brackets are balanced;
    generates a random password; computes the distance between two points; inverts a dictionary;
    groups words by their first letter; implements a stack; implements a queue; implements bubble sort;
    implements quicksort; counts the days between two dates; checks whether a year is a leap year"""
_LANGUAGES = ("Python", "JavaScript", "Java", "C", "Go")
_CODE_FORMS = """Write a {language} function that {task}.;
    Write {language} code for a function that {task}, with comments.;
    Show me a {language} function that {task} and an example of its use."""
_SNIPPETS = (
    "def add(a, b):\n    return a + b",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)",
    "def greet(name):\n    print('Hello, ' + name)",
    "def is_even(n):\n    if n % 2 == 0:\n        return True\n    else:\n        return False",
    "def count_words(text):\n    words = text.split()\n    return len(words)",
    "def find(items, wanted):\n    for i in range(len(items)):\n        if items[i] == wanted:\n            return i\n"
    "    return -1",
    "class Counter:\n    def __init__(self):\n        self.value = 0\n\n    def increase(self):\n"
    "        self.value += 1",
    "def read_lines(path):\n    f = open(path)\n    lines = f.readlines()\n    f.close()\n    return lines",
    "def square_all(numbers):\n    result = []\n    for x in numbers:\n        result.append(x * x)\n    return result",
    "def maximum(a, b, c):\n    m = a\n    if b > m:\n        m = b\n    if c > m:\n        m = c\n    return m",
    "def area(width, height):\n    return width * height",
    "def join(words):\n    text = ''\n    for word in words:\n        text = text + word + ' '\n    return text",
    "def fahrenheit(celsius):\n    return celsius * 9 / 5 + 32",
    "def last(items):\n    return items[len(items) - 1]",
    "for i in range(10):\n    if i % 2 == 0:\n        print(i)",
    "def power(x, n):\n    result = 1\n    for i in range(n):\n        result = result * x\n    return result",
    "def swap(pair):\n    a = pair[0]\n    b = pair[1]\n    return (b, a)",
    "def initials(name):\n    parts = name.split(' ')\n    return parts[0][0] + parts[1][0]",
    "def discount(price, percent):\n    return price - price * percent / 100",
    "prices = [3, 5, 8]\ntotal = 0\nfor p in prices:\n    total += p\nprint(total)",
)
_EDITS = """Add type hints to this code; Add a docstring to this code; Rename the variables to be more descriptive;
    Add comments to this code; Make this code shorter; Add a check for wrong input to this code; Rewrite this code in
    JavaScript; Add a test for this code; Explain this code and repeat it; Fix the style of this code"""
_SUMMARIES = """Summarize this text in two sentences:; Summarize the following text:; Rewrite the following text
    in simpler words:; List the main points of this text:; Give this text a title and shorten it:;
    Correct and repeat this text:"""


def _split(texts: str) -> list[str]:
    """The parts of a text between semicolons, without line breaks."""
    return [" ".join(part.split()) for part in texts.split(";")]


def questions(held_out: bool) -> Iterator[Question]:
    """All questions of the first three kinds that are held out, or all others, in a fixed order."""

    def part(things: list[str] | tuple[str, ...]) -> list[str]:
        return [thing for number, thing in enumerate(things) if (number % 10 == 0) == held_out]

    # Every third question has a second turn.
    follow = itertools.cycle(text for second in _split(_SECOND) for text in (None, None, second))
    for group, forms in _FORMS.items():
        for topic, form in itertools.product(part(_split(_TOPICS[group])), _split(forms)):
            yield Question("chat", form.format(topic), next(follow))
    for task, form, language in itertools.product(part(_split(_FUNCTIONS)), _split(_CODE_FORMS), _LANGUAGES):
        yield Question("code", form.format(task=task, language=language))
    for snippet, edit in itertools.product(part(_SNIPPETS), _split(_EDITS)):
        yield Question("edit", f"{edit}:\n```\n{snippet}\n```")


def about(texts: list[str], seed: int) -> Iterator[Question]:
    """A question of the fourth kind about each text."""
    forms, draw = _split(_SUMMARIES), random.Random(seed)
    for text in texts:
        yield Question("summary", f"{draw.choice(forms)}\n\n{text}")
