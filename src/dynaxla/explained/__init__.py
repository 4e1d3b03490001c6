"""What becomes of a function: graphs, programs, costs by line, and what to do next. `dynaxla.explain`, and the command of that name."""

from .calling import explain as explain
from .explanation import Explanation as Explanation
