"""Train the EAGLE-3 draft of SmolLM2-135M-Instruct on the model's own answers to generated questions.

    python scripts/train_smollm2_eagle3.py --target FOLDER        # writes examples/models/smollm2-eagle3

There are four kinds of questions: ``chat`` (about many topics, some with a second turn), ``code`` (functions to write),
``edit`` (changes to existing code), ``summary`` (of an earlier answer of the model). Every tenth topic and task is held
out of training. A fifth kind, used only for training, is ``self-asked``: questions that the model writes in place of
the user (Magpie, arXiv 2406.08464). Every other answer is greedy, the rest are sampled at temperature 0.7. A second run
with the same options resumes from the ``--work`` folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from demo_corpus import card
from safetensors.torch import load_file, save_file

from specexport import LLM, SamplingParams
from specexport.cli import HelpFormatter
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.methods.eagle3.spec import Eagle3Training
from specexport.methods.eagle3.train import train_eagle3

Kind = Literal["chat", "code", "edit", "summary", "self-asked"]
TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
_AT_ONCE = 64
"""Number of questions per file; these are answered together."""
_MOST_TOKENS = 192
_MAX_QUESTION = 96
"""Maximum number of tokens of a question that the model writes."""
_ASKING = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n"
)
"""Text of the chat template before a question."""
_GROUP = 32
"""Number of neighbouring weights that share a scale."""
_TEMPERATURES = (0.0, 0.7)


@dataclass(frozen=True)
class Question:
    """The question of the first turn, and of the second, if there is one."""

    kind: Kind
    text: str
    follow_up: str | None = None


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


def _part(things: list[str] | tuple[str, ...], held_out: bool) -> list[str]:
    """Every tenth item if held out, else all others."""
    return [thing for number, thing in enumerate(things) if (number % 10 == 0) == held_out]


def _follow_ups() -> Iterator[str | None]:
    """Yields the second turns: a question for every third first turn, else None."""
    return itertools.cycle(text for second in _split(_SECOND) for text in (None, None, second))


def questions(held_out: bool) -> Iterator[Question]:
    """The held-out questions of the first three kinds, or all others, in a fixed order."""
    follow_ups = _follow_ups()
    for group, forms in _FORMS.items():
        for topic, form in itertools.product(_part(_split(_TOPICS[group]), held_out), _split(forms)):
            yield Question("chat", form.format(topic), next(follow_ups))
    for task, form, language in itertools.product(_part(_split(_FUNCTIONS), held_out), _split(_CODE_FORMS), _LANGUAGES):
        yield Question("code", form.format(task=task, language=language))
    for snippet, edit in itertools.product(_part(_SNIPPETS, held_out), _split(_EDITS)):
        yield Question("edit", f"{edit}:\n```\n{snippet}\n```")


def about(texts: list[str], seed: int) -> Iterator[Question]:
    """Asks for a summary of each text."""
    forms, draw = _split(_SUMMARIES), random.Random(seed)
    for text in texts:
        yield Question("summary", f"{draw.choice(forms)}\n\n{text}")


def self_asked_questions(llm: LLM, seed: int) -> list[Question]:
    """Questions that the model writes; those that mention a held-out topic or do not end are left out."""
    params = [
        SamplingParams(max_tokens=_MAX_QUESTION, temperature=1.0, top_p=0.95, seed=seed + number)
        for number in range(_AT_ONCE)
    ]
    held_out = [topic for topics in (*_TOPICS.values(), _FUNCTIONS) for topic in _part(_split(topics), True)]
    outputs = [output.outputs[0] for output in llm.generate([_ASKING] * _AT_ONCE, params, use_tqdm=False)]
    texts = [output.text.strip() for output in outputs if output.finish_reason == "stop"]
    kept = [text for text in texts if text and not any(topic.lower() in text.lower() for topic in held_out)]
    return [Question("self-asked", text, follow_up) for text, follow_up in zip(kept, _follow_ups(), strict=False)]


def _answers(llm: LLM, chats: list[list[dict[str, str]]], temperatures: list[float], seed: int) -> list[str]:
    if not chats:
        return []
    params = [
        SamplingParams(max_tokens=_MOST_TOKENS, temperature=temperature, seed=seed + number)
        for number, temperature in enumerate(temperatures)
    ]
    return [output.outputs[0].text for output in llm.chat(chats, params, use_tqdm=False)]


def in_files(questions: Iterable[Question]) -> list[Callable[[], list[Question]]]:
    """Functions that return the questions of each file, :data:`_AT_ONCE` at a time."""
    every = list(questions)
    return [partial(every.__getitem__, slice(at, at + _AT_ONCE)) for at in range(0, len(every), _AT_ONCE)]


def write_conversations(
    llm: LLM, files: Iterable[Callable[[], list[Question]]], folder: Path, seed: int
) -> Iterator[dict[str, Any]]:
    """Generates the model's answers to the questions of each file, unless it exists; yields the conversations."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, questions_of_file in enumerate(files):
        path = folder / f"{number:03d}.jsonl"
        if not path.exists():
            group = questions_of_file()
            temperatures = [_TEMPERATURES[at % len(_TEMPERATURES)] for at in range(len(group))]
            conversations = [[{"role": "user", "content": question.text}] for question in group]
            first = _answers(llm, conversations, temperatures, seed + number * _AT_ONCE)
            for conversation, answer in zip(conversations, first, strict=True):
                conversation.append({"role": "assistant", "content": answer})
            continued = [at for at, question in enumerate(group) if question.follow_up is not None]
            for at in continued:
                conversations[at].append({"role": "user", "content": group[at].follow_up or ""})
            second = _answers(
                llm, [conversations[at] for at in continued], [temperatures[at] for at in continued], seed + number
            )
            for at, answer in zip(continued, second, strict=True):
                conversations[at].append({"role": "assistant", "content": answer})
            lines = [
                json.dumps({"kind": question.kind, "messages": conversation}) + "\n"
                for question, conversation in zip(group, conversations, strict=True)
            ]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(lines), encoding="utf-8")
            temporary.replace(path)
            print(f"{folder.name}: file {number + 1} of {len(group)} conversations", flush=True)
        yield from (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def texts_of(
    llm: LLM, work: Path, *, held_out: bool, count: int, summaries: int, self_asked_files: int, seed: int
) -> Path:
    """Writes conversations for ``specexport train``, and returns their file.

    The arguments are the numbers of questions of the first three kinds, of summaries, and of files of questions that
    the model writes.
    """
    questions_ = list(questions(held_out))
    random.Random(seed).shuffle(questions_)
    name = "held-out" if held_out else "learnt"
    conversations = list(write_conversations(llm, in_files(questions_[:count]), work / name, seed))
    # The model summarizes its own answers.
    written = [
        conversation["messages"][1]["content"] for conversation in conversations if conversation["kind"] == "chat"
    ]
    long = [text for text in written if len(text) > 300][:summaries]
    conversations += write_conversations(llm, in_files(about(long, seed)), work / f"{name}-summaries", seed + 500_000)
    files = [
        partial(self_asked_questions, llm, seed + 600_000 + number * _AT_ONCE) for number in range(self_asked_files)
    ]
    conversations += write_conversations(llm, files, work / f"{name}-self-asked", seed + 700_000)
    path = work / f"{name}.jsonl"
    path.write_text("".join(json.dumps(conversation) + "\n" for conversation in conversations), encoding="utf-8")
    return path


def some_of_each_kind(texts: Path, count: int) -> Path:
    """Writes the first ``count`` conversations of each kind: measuring all at every checkpoint takes too long."""
    kept: dict[str, list[str]] = {}
    for line in texts.read_text(encoding="utf-8").splitlines(keepends=True):
        kept.setdefault(json.loads(line)["kind"], []).append(line)
    path = texts.with_name(f"{texts.stem}-{count}-of-each{texts.suffix}")
    path.write_text("".join(line for lines in kept.values() for line in lines[:count]), encoding="utf-8")
    return path


def store_in_int8(folder: Path) -> int:
    """Rounds a draft's matrices to int8 in compressed-tensors' format; returns the number of parameters."""
    file, config = folder / "model.safetensors", folder / "config.json"
    stored: dict[str, torch.Tensor] = {}
    parameters = 0
    for name, tensor in load_file(file).items():
        parameters += tensor.numel() if tensor.is_floating_point() else 0
        if tensor.ndim != 2:
            stored[name] = tensor
            continue
        groups = tensor.float().unflatten(1, (-1, _GROUP))
        scales = (groups.abs().amax(-1) / 127).half().clamp(min=2.0**-14)
        stored[name] = (groups / scales.float()[..., None]).round().clamp(-127, 127).char().flatten(1)
        stored[f"{name}_scale"] = scales
    save_file(stored, file, metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
    document = json.loads(config.read_text(encoding="utf-8"))
    document["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    config.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return parameters


def measure(bundle: Path, held_out: Path) -> list[dict[str, Any]]:
    """Acceptance lengths of four draft tokens on each kind of held-out conversation, greedy and sampled."""
    conversations = [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()]
    rows: list[dict[str, Any]] = []
    method = {"method": "eagle3", "num_speculative_tokens": 4}
    llm = LLM(bundle=str(bundle), speculative_config=method, calibrate=False)
    for kind in ("chat", "code", "edit", "summary"):
        prompts = [conversation["messages"][:1] for conversation in conversations if conversation["kind"] == kind][:16]
        row: dict[str, Any] = {"kind": kind, "conversations": len(prompts)}
        for temperature in _TEMPERATURES:
            params = SamplingParams(max_tokens=96, temperature=temperature, seed=1)
            # One by one, as few draft tokens pay in a batch.
            outputs = [llm.chat([prompt], params, use_tqdm=False)[0] for prompt in prompts]
            done = [output.outputs[0].metrics for output in outputs]
            accepted, steps = sum(stats.accepted for stats in done), sum(stats.steps for stats in done)
            row[f"T={temperature}"] = round(1 + accepted / steps, 3)
        rows.append(row)
    llm.close()
    return rows


def main() -> None:
    """Generates the texts, trains and measures the draft, and writes it with its card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--target", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--conversations", type=int, default=2944, help="conversations about topics, code and edits")
    parser.add_argument("--summaries", type=int, default=512, help="conversations that summarize an answer")
    parser.add_argument(
        "--self-asked-files", type=int, default=128, help="files of up to 64 questions that the model writes"
    )
    parser.add_argument("--steps", type=int, default=600, help="training steps, of 8 windows of 256 tokens")
    parser.add_argument("--draft", help="draft to start from, with the same vocabulary (default: a new one)")
    parser.add_argument("--lr", type=float, help="learning rate (default: the optimizer's)")
    parser.add_argument("--ttt-steps", type=int, default=4, help="draft tokens in training")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens that the draft may propose")
    parser.add_argument("--intermediate-size", type=int, default=1536, help="width of the draft's MLP")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("examples/models/smollm2-eagle3"), help="folder to write"
    )
    parser.add_argument("--work", type=Path, default=Path("build/smollm2-eagle3"), help="folder to resume from")
    parser.add_argument("--texts-only", action="store_true", help="stop before training")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    writer = args.work / "writer"
    if not (writer / "specexport.json").exists():
        build(BuildOptions(target=args.target, output=writer, precision="int8", max_seq_len=1024, max_batch_size=8))
    llm = LLM(bundle=str(writer), calibrate=False)
    texts = partial(texts_of, llm, args.work)
    held_out = texts(held_out=True, count=320, summaries=64, self_asked_files=0, seed=args.seed + 1_000_000)
    learnt = texts(
        held_out=False,
        count=args.conversations,
        summaries=args.summaries,
        self_asked_files=args.self_asked_files,
        seed=args.seed,
    )
    llm.close()
    if args.texts_only:
        return
    options = Eagle3Training(
        target=args.target,
        data=[learnt],
        held_out=str(some_of_each_kind(held_out, 12)),
        output=args.output,
        overwrite=True,
        work=args.work / "training",
        seq_len=256,
        batch_size=8,
        steps=args.steps,
        save_every=25,
        warmup=0.03,
        intermediate_size=args.intermediate_size,
        draft=args.draft,
        draft_vocab_size=None if args.draft else args.vocab,
        lr=args.lr,
        tie_lm_head=True,
        ttt_steps=args.ttt_steps,
        optimizer="muon",
        seed=args.seed,
    )
    record = train_eagle3(options, partial(print, flush=True))
    parameters = store_in_int8(args.output)
    # Without the folders of this machine.
    record["options"] |= {"target": TARGET, "data": [learnt.name], "held_out": held_out.name, "work": None}
    record["options"] |= {"output": args.output.name, "draft": args.draft and Path(args.draft).name}
    (args.output / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    bundle = args.work / "bundle"
    methods = ({"method": "eagle3", "model": str(args.output), "num_speculative_tokens": 4},)
    build(BuildOptions(target=args.target, output=bundle, precision="int8", methods=methods, overwrite=True))
    rows = measure(bundle, held_out)
    (args.work / "acceptance.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    table = ["| held-out conversations | greedy | temperature 0.7 |", "|---|---|---|"]
    table += [f"| {row['kind']} ({row['conversations']}) | {row['T=0.0']:.2f} | {row['T=0.7']:.2f} |" for row in rows]
    curve = [point for point in record["draft"]["history"] if "evaluation" in point]
    readme = card(
        "smollm2-eagle3",
        python=platform.python_version(),
        torch=torch.__version__,
        windows=record["windows"],
        held_out_windows=record["held_out_windows"],
        steps=args.steps,
        flags=f"--conversations {args.conversations} --summaries {args.summaries} "
        f"--self-asked-files {args.self_asked_files} --steps {args.steps}",
        ttt_steps=args.ttt_steps,
        minutes=f"{record['draft']['seconds'] / 60:.0f}",
        seed=args.seed,
        parameters=parameters,
        acceptance="\n".join(table),
        curve="\n".join(f"| {point['step']} | {point['evaluation'].split()[-1]} |" for point in curve),
    )
    (args.output / "README.md").write_text(readme, encoding="utf-8")


if __name__ == "__main__":
    main()
