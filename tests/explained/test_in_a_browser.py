"""Tests of the pages of real models in Chromium: `make explain-pages`."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dynaxla
from benchmarks import breaks
from dynaxla.bench import suites
from dynaxla.explained import Explanation

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        webdriver = importlib.import_module("selenium.webdriver")
    except ImportError:
        pytest.fail("there is no selenium here: make explain-pages installs it")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.fail("there is no Chromium with its driver here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


def resnet() -> Explanation:
    model = suites.import_package("torchvision").models.resnet50().eval()
    with torch.no_grad():
        return dynaxla.explain(model, torch.randn(1, 3, 224, 224))


def with_breaks() -> Explanation:
    with torch.no_grad():
        return dynaxla.explain(breaks.SideEffects().eval(), *breaks.vectors(1, torch.Generator().manual_seed(0)))


def training() -> Explanation:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 10))
    optimizer = torch.optim.AdamW(model.parameters())

    @dynaxla.compile_step
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return dynaxla.explain(step, torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))


SECTIONS = {"next", "lines", "phases", "graphs"}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("make", [resnet, with_breaks, training], ids=lambda make: make.__name__)
def test_page_is_complete(browser: Any, tmp_path: Path, make: Any, dark: bool) -> None:
    explanation = explanation_of(make)
    path = explanation.save(tmp_path / "page.html")
    assert path.stat().st_size < 1 << 20
    browser.get_log("performance")
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.execute_cdp_cmd("Network.enable", {})
    browser.get(path.as_uri())
    assert browser.title == f"dynaxla explains {explanation.name}"
    assert SECTIONS | ({"breaks"} if explanation.breaks else set()) <= {
        item.get_attribute("id") for item in browser.find_elements("tag name", "section")
    }
    for link in browser.find_elements("css selector", "nav a"):
        name = link.get_attribute("href").partition("#")[2]
        link.click()
        (target,) = browser.find_elements("id", name)
        top = browser.execute_script("return arguments[0].getBoundingClientRect().top", target)
        end = browser.execute_script("return window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 2")
        assert abs(top) < 2 or end, f"the link to {name} does not lead to it"
    pictures = browser.find_elements("tag name", "svg")
    assert len(pictures) == 2
    for picture in pictures:
        assert picture.size["width"] > 300
        assert picture.size["height"] >= 24
        assert all(bar.size["width"] > 0 for bar in picture.find_elements("css selector", "rect.bar"))
    overflow = browser.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0, "the page is wider than its window"
    text_color, background = (sum(colour(browser, name)) for name in ("color", "background-color"))
    assert (text_color > background) == dark
    assert not [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    requests = [entry["message"] for entry in browser.get_log("performance") if 'requestWillBeSent"' in entry["message"]]
    assert requests, "the request for the page itself is missing"
    assert not [message for message in requests if '"url":"http' in message]
    shown = browser.find_element("tag name", "body").text
    for cost in explanation.costs:
        assert str(cost.line) in shown
    for graph in explanation.graphs:
        assert graph.name in shown
    assert len(browser.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 10_000


_explanations: dict[Any, Explanation] = {}


def explanation_of(make: Any) -> Explanation:
    """Returns the explanation, which is made once for both colour schemes."""
    if make not in _explanations:
        _explanations[make] = make()
        assert _explanations[make].costs
        assert not _explanations[make].error
    return _explanations[make]


def colour(browser: Any, name: str) -> list[int]:
    text = browser.find_element("tag name", "body").value_of_css_property(name)
    return [int(part) for part in text.partition("(")[2].rstrip(")").split(",")[:3]]
