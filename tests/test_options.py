"""Options are stated once: checks, flags, keywords, the server's fields and the docs' tables follow from them."""

import argparse
import inspect
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from specexport import LLM, AsyncEngine
from specexport.cli import parser
from specexport.commands.flags import UsageError, add_flags, from_flags
from specexport.contract.errors import BuildError, RequestError
from specexport.contract.methods.base import MethodOptions
from specexport.contract.options import Options, option, options
from specexport.exporter.options import BuildOptions, BuildSettings
from specexport.options import EngineOptions, ServerOptions, ServiceOptions
from specexport.runtime import Engine, SamplingParams

pytestmark = pytest.mark.exporter  # the server's extra is part of what tests of the exporter need


class Cake(Options, frozen=True, kw_only=True):
    """Options of each kind.

    Attributes:
        recipe: what to bake.
        eggs: how many.
        sugar: share.
        minutes: in the oven (default: until it is done).
        fruits: in the dough (default: none).
        heights: of its layers.
        shape: of the tin.
        size: of the tin (default: 24).
        baked: bake it.
        glazed: glaze it.
    """

    recipe: Annotated[Path, option("FILE", positional=True)]
    eggs: Annotated[int, option("N", group="of hens: fresh ones", short="-e", ge=1, le=12)] = 3
    sugar: Annotated[float, option("S", gt=0, le=1)] = 0.5
    minutes: Annotated[int | None, option("M", ge=0)] = None
    fruits: Annotated[tuple[str, ...], option("NAME", repeat=True, min_length=1)] = ()
    heights: Annotated[tuple[int, ...], option("CM", ge=1)] = (2, 2)
    shape: Literal["round", "square"] = "round"
    size: Annotated[Literal[18, 24] | None, option("CM")] = None
    baked: Annotated[bool, option(off="leave the dough as it is")] = True
    glazed: bool = False
    notes: Annotated[str, option(hidden=True)] = ""


def flags(*words: str) -> Cake:
    """The options of a command line."""
    command = argparse.ArgumentParser()
    add_flags(command, Cake)
    return from_flags(Cake, command.parse_args(words), notes="warm")


def test_flags_set_the_fields_of_their_names():
    assert flags("a.txt") == Cake(recipe=Path("a.txt"), notes="warm")
    words = ["-e", "2", "--sugar", "0.1", "--fruits", "fig", "--fruits", "plum", "--heights", "1", "3", "--no-baked"]
    assert flags("b", *words, "--glazed", "--size", "18", "--minutes", "7", "--shape", "square") == Cake(
        recipe="b",  # a path may be a text
        eggs=2,
        sugar=0.1,
        fruits=("fig", "plum"),
        heights=(1, 3),
        baked=False,
        glazed=True,
        size=18,
        minutes=7,
        shape="square",
        notes="warm",
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("eggs", 0, "a whole number from 1 to 12"),
        ("eggs", True, "a whole number from 1 to 12"),
        ("eggs", 2.0, "a whole number from 1 to 12"),
        ("sugar", 0, r"a number in \(0, 1\]"),
        ("sugar", float("nan"), r"a number in \(0, 1\]"),
        ("minutes", -1, "a whole number >= 0"),
        ("fruits", ("fig", ""), "a list, each a text that is not empty"),
        ("fruits", "fig", "a list, each a text that is not empty"),
        ("heights", (1, 0), "a list, each a whole number >= 1"),
        ("shape", "heart", "one of round, square"),
        ("size", 20, "one of 18, 24"),
        ("baked", 1, "true or false"),
        ("recipe", 5, "a path"),
    ],
)
def test_wrong_values_are_refused_in_words(name, value, expected):
    right: dict[str, Any] = {"recipe": "x"}
    with pytest.raises(BuildError, match=f"{name} is .*; expected {expected}$"):
        Cake(**right | {name: value})


def test_numbers_may_be_numpys():
    cake = Cake(recipe=Path("x"), eggs=np.int64(4), sugar=np.float32(0.5), heights=np.array([1, 2]))
    assert (cake.eggs, cake.sugar, cake.heights) == (4, 0.5, (1, 2))
    assert type(cake.eggs) is int


def test_errors_of_the_command_line_name_the_flag():
    for words, message in (
        (["-e", "13"], "--eggs is 13; expected a whole number from 1 to 12"),
        (["--size", "20"], "--size is 20; expected one of 18, 24"),
        (["--heights", "0"], "--heights is .0,.; expected a list"),
    ):
        with pytest.raises(UsageError, match=message):
            flags("x", *words)


def test_help_has_groups_defaults_and_choices(capsys):
    command = argparse.ArgumentParser(prog="bake")
    add_flags(command, Cake, unset={"sugar": "to taste"}, eggs="of any hen")
    shown = " ".join(command.format_help().split())
    for part in (
        "of hens: fresh ones -e N, --eggs N of any hen (default: 3)",
        "--sugar S share (default: to taste)",
        "--minutes M in the oven (default: until it is done)",
        "--fruits NAME in the dough; repeatable (default: none)",
        "--shape {round,square} of the tin (default: round)",
        "--no-baked leave the dough as it is",
    ):
        assert part in shown
    assert "notes" not in shown


# --- who takes which options ------------------------------------------------------------------------------------------


def test_every_way_to_open_a_model_takes_the_same_options():
    fields = set(EngineOptions.__struct_fields__)
    assert set(inspect.signature(LLM).parameters) == fields
    assert set(inspect.signature(AsyncEngine.open).parameters) == fields | {"max_queue"}
    assert set(ServiceOptions.__struct_fields__) == fields | {"max_queue"}
    assert set(BuildSettings.__struct_fields__) <= fields & set(BuildOptions.__struct_fields__)


def test_an_engine_has_the_defaults_of_the_options():
    # As tests leave nothing in the cache folder, they have other defaults of calibrate and cache_graphs.
    other = {"bundle", "calibrate", "cache_graphs", *BuildSettings.__struct_fields__}
    shared = inspect.signature(Engine.load).parameters.keys() & options(EngineOptions).keys() - other
    assert shared == {"threads", "check_hashes", "backend", "gpu_memory_utilization", "max_model_len"}
    for name in shared:
        assert inspect.signature(Engine.load).parameters[name].default == options(EngineOptions)[name].default


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_commands_that_open_a_model_have_every_option_as_a_flag(command):
    (commands,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    actions = {action.dest: action for action in commands.choices[command]._actions}
    sampling = () if command == "serve" else options(SamplingParams)
    for name, declared in options(ServerOptions if command == "serve" else EngineOptions).items():
        if declared.about.get("hidden") or name in options(BuildSettings).keys() & options(SamplingParams).keys():
            continue
        assert name in actions
        if declared.choices and declared.about["metavar"] is None and name not in sampling:
            assert tuple(actions[name].choices or ()) == declared.choices  # bf16 and fp8 among the precisions


def test_the_servers_fields_have_the_ranges_of_sampling_parameters():
    from specexport.server.requests import SAMPLING, CompletionRequest

    properties = CompletionRequest.model_json_schema()["properties"]
    for name in SAMPLING:
        shown = str(properties[name])
        about = options(SamplingParams)[name].about
        assert options(SamplingParams)[name].help[1:] in properties[name]["anyOf"][0]["description"]
        for limit, key in (("ge", "minimum"), ("gt", "exclusiveMinimum"), ("le", "maximum")):
            assert limit not in about or f"'{key}': {about[limit]}" in shown
    assert "'maximum': 2" in str(properties["temperature"])  # as in OpenAI's API


def test_ray_takes_the_servers_options():
    from pydantic import BaseModel, ValidationError

    from specexport.server.request_parts import model_of

    model = model_of(BaseModel, ServerOptions, ("speculative_config", "served_model_name", "replicas", "timeout"))
    read = model(speculative_config={"method": "ngram"}, served_model_name=["a"], replicas="2").model_dump()
    assert read == {
        "speculative_config": {"method": "ngram"}, "served_model_name": ("a",), "replicas": 2, "timeout": 600.0
    }  # fmt: skip
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        model(replicas=0)


def test_contradictions_name_the_parameter():
    for given, message in (
        ({"json_schema": "{}", "grammar": "start: /a/"}, "grammar was given with json_schema"),
        ({"json_schema": "{}", "ignore_eos": True}, "ignore_eos is True; expected False with a json_schema"),
        ({"json_schema": {"type": "object"}, "ignore_eos": True}, "ignore_eos is True; expected False"),
        ({"grammar": "start: /a/", "min_tokens": 1}, "min_tokens is "),
        ({"max_tokens": 1, "min_tokens": 2}, "min_tokens is "),
    ):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**given)
        assert caught.value.param == message.split()[0]
        assert str(caught.value).startswith(message)


def test_a_method_that_nothing_makes_for_a_target_is_named():
    class Bare(MethodOptions, frozen=True, kw_only=True, tag="bare"):
        pass

    with pytest.raises(BuildError, match="the method bare has neither options that make it for a target"):
        Bare().for_target(1)


class Compiled(Options, frozen=True, kw_only=True):
    __doc__ = (
        "A docstring without its indentation, as Python 3.13 compiles it.\n\nAttributes:\n    size: its\n        size."
    )

    size: int = 1


def test_docstrings_are_read_whatever_python_compiles_them():
    assert options(Compiled)["size"].help == "its size"
