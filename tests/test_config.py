"""Options: what is refused, what the environment says, and where things are kept."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from dynaxla import config
from dynaxla.config import Options
from dynaxla.errors import OptionError

WRONG: list[dict[str, Any]] = [
    {"dump": 5}, {"executables": 0}, {"executables": True}, {"executables": 2.0}, {"fallback": "eager"}, {"forms": "convolution=xla"},
    {"forms": {"convolution": 1}}, {"freeze": 1}, {"tune": None}, {"exact_rng": "yes"}, {"cache": 3}, {"heap": "drop"}, {"xla": 3},
    {"donate": 0}, {"distributed": "nccl"}, {"engines": "dynaxla"}, {"engines": []},
    {"engines": ["inductor", "eager"]}, {"engines": ["dynaxla", "dynaxla"]}, {"engines": ["dynaxla", 1]},
    {"xla": {"a": None}}, {"xla": {1: True}}, {"compile": "later"}, {"sizes": 8},
]  # fmt: skip
RIGHT: dict[str, Any] = {
    "dump": "here", "executables": 1, "fallback": "error", "freeze": True, "tune": True, "exact_rng": True, "donate": False,
    "distributed": "xla", "cache": Path("there"), "xla": {"a": True, "b": 1, "c": 0.5, "d": "text"}, "compile": "now", "sizes": "buckets",
}  # fmt: skip
# No options of the backend "dynaxla", and still taken.
RIGHT_ELSEWHERE: dict[str, Any] = {"engines": ("dynaxla", "eager"), "forms": {"convolution": "xla"}, "heap": "leave"}


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_wrong_option_value(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=f"option {name}=(.|\n)*{name} is "):
        Options.parse(options, None)


def test_every_option_is_taken_and_refused_somewhere() -> None:
    names = {"forms" if field.name == "implementations" else field.name for field in dataclasses.fields(Options)}
    assert names == RIGHT.keys() | RIGHT_ELSEWHERE.keys() == {name for options in WRONG for name in options}
    parsed = Options.parse(RIGHT, None)
    assert {name: getattr(parsed, name) for name in RIGHT} == RIGHT
    assert len(RIGHT) == 12


@pytest.mark.parametrize(
    ("option", "value", "new"),
    [
        ("engines", ["dynaxla", "eager"], 'an option of backend="dynaxla_auto"'),
        ("forms", {"convolution": "xla"}, "the environment variable DYNAXLA_IMPLEMENTATIONS"),
        ("heap", "leave", "the environment variable DYNAXLA_HEAP"),
    ],
)
def test_what_is_no_option_any_more(option: str, value: Any, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"the option {option} is now {new}; dynaxla 0.2 refuses it here") as raised:
        parsed = Options.parse({option: value}, None)
    attribute = "implementations" if option == "forms" else option
    assert getattr(parsed, attribute) == (tuple(value) if option == "engines" else value)
    assert [warning.filename for warning in raised] == [__file__]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"collectives": "torch"}, "torch"),
        ({"collectives": "xla"}, "xla"),
        ({"partition": "torch"}, "torch"),
        ({"partition": "xla"}, "spmd"),
        ({"collectives": "xla", "partition": "torch"}, "xla"),
        ({"collectives": "xla", "partition": "xla"}, "spmd"),
    ],
    ids=str,
)
def test_old_names_of_distributed(old: dict[str, str], new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"is now distributed='{new}'; dynaxla 0.2 removes the old name") as raised:
        assert Options.parse(old, None) == Options(distributed=new)
    assert len(raised) == len(old)
    with pytest.raises(OptionError, match="together with distributed"):
        Options.parse({**old, "distributed": new}, None)


def test_old_names_that_contradict_each_other() -> None:
    with pytest.raises(OptionError, match="partition='xla' together with collectives='torch'"):
        Options.parse({"partition": "xla", "collectives": "torch"}, None)
    with pytest.raises(OptionError, match=r"option collectives='nccl'(.|\n)*distributed, which is 'torch', 'xla' or 'spmd'"):
        Options.parse({"collectives": "nccl"}, None)


def test_a_warning_of_a_compiled_function_names_the_line_of_its_call() -> None:
    compiled = torch.compile(torch.exp, backend="dynaxla", options={"collectives": "torch"})
    with pytest.warns(DeprecationWarning, match="collectives") as raised:
        compiled(torch.ones(3))
    line = inspect.getsourcelines(test_a_warning_of_a_compiled_function_names_the_line_of_its_call)[1]
    assert [(warning.filename, warning.lineno) for warning in raised] == [(__file__, line + 3)]


def test_engines_of_dynaxla_auto() -> None:
    assert Options.parse(None, None, "dynaxla_auto").engines == ("dynaxla", "inductor", "eager")
    assert Options.parse({"engines": ["eager", "dynaxla"]}, None, "dynaxla_auto").engines == ("eager", "dynaxla")
    with pytest.raises(OptionError, match=r"the options are: .*, xla, engines$"):
        Options.parse({"nothing": 1}, None, "dynaxla_auto")
    with pytest.raises(OptionError, match=r"the options are: .*, xla$"):
        Options.parse({"nothing": 1}, None)


@pytest.mark.parametrize("given", [{"compile": "background"}, {"freeze": True}, {"tune": True}], ids=str)
def test_what_does_not_go_with_spmd(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"distributed='spmd' together with .*(.|\n)*leave one of the two options out"):
        Options.parse({"distributed": "spmd", **given}, None)
    assert Options.parse({"distributed": "spmd", "freeze": False, "compile": "now"}, None).distributed == "spmd"


@pytest.mark.parametrize("name", ["freeze", "tune"])
def test_what_does_not_go_with_compilation_in_the_background(name: str) -> None:
    assert Options.parse({"compile": "background", name: False, "sizes": "buckets"}, None).compile == "background"
    with pytest.raises(OptionError, match=f"compile='background' together with {name}(.|\n)*leave one of the two options out"):
        Options.parse({"compile": "background", name: True}, None)


def test_unknown_options_and_modes() -> None:
    with pytest.raises(OptionError, match=r"unknown option 'dmup'(.|\n)*did you mean 'dump'"):
        Options.parse({"dmup": "here"}, None)
    with pytest.raises(OptionError, match="unknown option 'quite_another'") as raised:
        Options.parse({"quite_another": 1}, None)
    assert "did you mean" not in str(raised.value)
    with pytest.raises(OptionError, match=r"unknown mode 'fast'(.|\n)*max-autotune"):
        Options.parse(None, "fast")
    assert Options.parse({}, "default") == Options.parse(None, None) == Options()


def test_presets_of_torch_compile(caplog: pytest.LogCaptureFixture) -> None:
    assert Options.parse(None, "max-autotune").tune
    assert Options.parse({"freeze": True}, "max-autotune-no-cudagraphs") == Options(tune=True, freeze=True)
    assert not Options.parse({"tune": False}, "max-autotune").tune
    config._log_reduce_overhead.cache_clear()
    with caplog.at_level("INFO", logger="dynaxla"):
        assert Options.parse(None, "reduce-overhead") == Options.parse(None, "reduce-overhead") == Options()
    (message,) = caplog.messages
    assert "reduce-overhead" in message


def test_the_environment_and_what_goes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DUMP", "IMPLEMENTATIONS", "CACHE", "COMPILE", "HEAP"):
        monkeypatch.delenv(f"DYNAXLA_{name}", raising=False)
    assert (Options().dump, Options().implementations, Options().cache, Options().compile, Options().heap) == (
        None,
        {},
        None,
        "auto",
        "keep",
    )
    monkeypatch.setenv("DYNAXLA_DUMP", "a")
    monkeypatch.setenv("DYNAXLA_IMPLEMENTATIONS", " convolution = xla,, contraction=onednn ")
    monkeypatch.setenv("DYNAXLA_CACHE", "b")
    monkeypatch.setenv("DYNAXLA_COMPILE", "now")
    monkeypatch.setenv("DYNAXLA_HEAP", "leave")
    found = Options()
    assert (found.dump, found.cache, found.compile, found.heap) == ("a", "b", "now", "leave")
    assert found.implementations == {"convolution": "xla", "contraction": "onednn"}
    assert found.dump_directory == Path("a")
    given = Options.parse({"dump": None, "cache": ""}, None)
    assert (given.dump_directory, given.cache) == (None, "")


@pytest.mark.parametrize(
    ("name", "value"), [("DYNAXLA_IMPLEMENTATIONS", "convolution"), ("DYNAXLA_COMPILE", "later"), ("DYNAXLA_HEAP", "drop")]
)
def test_a_wrong_variable_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=f"{name}='{value}'"):
        Options.parse(None, None)


def test_one_store_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = Options(cache=str(tmp_path)).store("programs")
    assert found is not None
    assert found.folder == tmp_path / "programs"
    assert Options(cache=".").store("programs") is found
    assert Options(cache=str(tmp_path)).store("tuning") is not found
    assert Options(cache="").store("programs") is None
    monkeypatch.setenv("HOME", str(tmp_path))
    mine = Options(cache="~/mine").store("programs")
    assert mine is not None
    assert mine.folder == tmp_path / "mine" / "programs"


def test_the_users_directory_of_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where it cannot be used, work goes on without it; a directory that was asked for must be there."""
    monkeypatch.delenv("DYNAXLA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config._default_store.cache_clear()
    try:
        found = Options().store("programs")
        assert found is not None
        assert found.folder == tmp_path / "dynaxla" / "programs"
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        config._default_store.cache_clear()
        assert Options().store("programs") is None
        assert "compiled programs are not kept for later processes" in caplog.text
    finally:
        config._default_store.cache_clear()
    with pytest.raises(OptionError, match="cannot be used"):
        Options(cache=str(tmp_path / "file")).store("programs")


def test_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DYNAXLA_CACHE", "")
    torch.compile(torch.exp, backend="dynaxla")(torch.ones(5))
    assert not list(tmp_path.iterdir())


def test_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="cannot be used"):
        torch.compile(torch.exp, backend="dynaxla", options={"cache": str(tmp_path / "file")})(torch.ones(2))
