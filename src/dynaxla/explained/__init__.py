"""`dynaxla.explain` and `dynaxla explain`: report the graphs, the programs and the costs by line of a function, with advice."""

from .explain_function import explain as explain
from .explanation import Explanation as Explanation
