"""Tests of options: valid and invalid values, environment variables, and stores."""

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

INVALID: list[dict[str, Any]] = [
    {"dump": 5}, {"executables": 0}, {"executables": True}, {"executables": 2.0}, {"fallback": "eager"}, {"forms": "convolution=xla"},
    {"forms": {"convolution": 1}}, {"freeze": 1}, {"tune": None}, {"exact_rng": "yes"}, {"cache": 3}, {"heap": "drop"}, {"xla": 3},
    {"donate": 0}, {"distributed": "nccl"}, {"engines": "dynaxla"}, {"engines": []},
    {"engines": ["inductor", "eager"]}, {"engines": ["dynaxla", "dynaxla"]}, {"engines": ["dynaxla", 1]},
    {"xla": {"a": None}}, {"xla": {1: True}}, {"compile": "later"}, {"sizes": 8},
]  # fmt: skip
VALID: dict[str, Any] = {
    "dump": "here", "executables": 1, "fallback": "error", "freeze": True, "tune": True, "exact_rng": True, "donate": False,
    "distributed": "xla", "cache": Path("there"), "xla": {"a": True, "b": 1, "c": 0.5, "d": "text"}, "compile": "now", "sizes": "buckets",
}  # fmt: skip
# Options of other backends, and deprecated options, which are still accepted.
VALID_ELSEWHERE: dict[str, Any] = {"engines": ("dynaxla", "eager"), "forms": {"convolution": "xla"}, "heap": "leave"}


@pytest.mark.parametrize("options", INVALID, ids=str)
def test_invalid_option_value_is_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=f"option {name}=(.|\n)*{name} is "):
        Options.parse(options, None)


def test_all_options_have_valid_and_invalid_values() -> None:
    names = {"forms" if field.name == "implementations" else field.name for field in dataclasses.fields(Options)}
    assert names == VALID.keys() | VALID_ELSEWHERE.keys() == {name for options in INVALID for name in options}
    parsed = Options.parse(VALID, None)
    assert {name: getattr(parsed, name) for name in VALID} == VALID
    assert len(VALID) == 12


@pytest.mark.parametrize(
    ("option", "value", "new"),
    [
        ("engines", ["dynaxla", "eager"], 'an option of backend="dynaxla_auto"'),
        ("forms", {"convolution": "xla"}, "the environment variable DYNAXLA_IMPLEMENTATIONS"),
        ("heap", "leave", "the environment variable DYNAXLA_HEAP"),
    ],
)
def test_deprecated_options_warn(option: str, value: Any, new: str) -> None:
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


def test_contradictory_old_names_are_refused() -> None:
    with pytest.raises(OptionError, match="partition='xla' together with collectives='torch'"):
        Options.parse({"partition": "xla", "collectives": "torch"}, None)
    with pytest.raises(OptionError, match=r"option collectives='nccl'(.|\n)*distributed, which is 'torch', 'xla' or 'spmd'"):
        Options.parse({"collectives": "nccl"}, None)


def test_warning_names_the_line_of_the_call() -> None:
    compiled = torch.compile(torch.exp, backend="dynaxla", options={"collectives": "torch"})
    with pytest.warns(DeprecationWarning, match="collectives") as raised:
        compiled(torch.ones(3))
    line = inspect.getsourcelines(test_warning_names_the_line_of_the_call)[1]
    assert [(warning.filename, warning.lineno) for warning in raised] == [(__file__, line + 3)]


def test_engines_of_dynaxla_auto() -> None:
    assert Options.parse(None, None, "dynaxla_auto").engines == ("dynaxla", "inductor", "eager")
    assert Options.parse({"engines": ["eager", "dynaxla"]}, None, "dynaxla_auto").engines == ("eager", "dynaxla")
    with pytest.raises(OptionError, match=r"the options are: .*, xla, engines$"):
        Options.parse({"nothing": 1}, None, "dynaxla_auto")
    with pytest.raises(OptionError, match=r"the options are: .*, xla$"):
        Options.parse({"nothing": 1}, None)


@pytest.mark.parametrize("options", [{"compile": "background"}, {"freeze": True}, {"tune": True}], ids=str)
def test_options_that_spmd_excludes(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"distributed='spmd' together with .*(.|\n)*leave one of the two options out"):
        Options.parse({"distributed": "spmd", **options}, None)
    assert Options.parse({"distributed": "spmd", "freeze": False, "compile": "now"}, None).distributed == "spmd"


@pytest.mark.parametrize("name", ["freeze", "tune"])
def test_options_that_background_compilation_excludes(name: str) -> None:
    assert Options.parse({"compile": "background", name: False, "sizes": "buckets"}, None).compile == "background"
    with pytest.raises(OptionError, match=f"compile='background' together with {name}(.|\n)*leave one of the two options out"):
        Options.parse({"compile": "background", name: True}, None)


def test_unknown_options_and_modes_are_refused() -> None:
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


def test_environment_variables_and_precedence_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
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
    from_environment = Options()
    assert (from_environment.dump, from_environment.cache, from_environment.compile, from_environment.heap) == ("a", "b", "now", "leave")
    assert from_environment.implementations == {"convolution": "xla", "contraction": "onednn"}
    assert from_environment.dump_directory == Path("a")
    from_options = Options.parse({"dump": None, "cache": ""}, None)
    assert (from_options.dump_directory, from_options.cache) == (None, "")


@pytest.mark.parametrize(
    ("name", "value"), [("DYNAXLA_IMPLEMENTATIONS", "convolution"), ("DYNAXLA_COMPILE", "later"), ("DYNAXLA_HEAP", "drop")]
)
def test_invalid_environment_variable_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=f"{name}='{value}'"):
        Options.parse(None, None)


def test_each_folder_has_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Options(cache=str(tmp_path)).store("programs")
    assert store is not None
    assert store.folder == tmp_path / "programs"
    assert Options(cache=".").store("programs") is store
    assert Options(cache=str(tmp_path)).store("tuning") is not store
    assert Options(cache="").store("programs") is None
    monkeypatch.setenv("HOME", str(tmp_path))
    home_store = Options(cache="~/mine").store("programs")
    assert home_store is not None
    assert home_store.folder == tmp_path / "mine" / "programs"


def test_default_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If the default directory cannot be used, nothing is stored. If a directory was given and cannot be used, an error is raised."""
    monkeypatch.delenv("DYNAXLA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config._default_store.cache_clear()
    try:
        store = Options().store("programs")
        assert store is not None
        assert store.folder == tmp_path / "dynaxla" / "programs"
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        config._default_store.cache_clear()
        assert Options().store("programs") is None
        assert "compiled programs are not kept for later processes" in caplog.text
    finally:
        config._default_store.cache_clear()
    with pytest.raises(OptionError, match="cannot be used"):
        Options(cache=str(tmp_path / "file")).store("programs")


def test_empty_cache_variable_disables_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DYNAXLA_CACHE", "")
    torch.compile(torch.exp, backend="dynaxla")(torch.ones(5))
    assert not list(tmp_path.iterdir())


def test_unusable_cache_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="cannot be used"):
        torch.compile(torch.exp, backend="dynaxla", options={"cache": str(tmp_path / "file")})(torch.ones(2))
